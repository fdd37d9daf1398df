#!/usr/bin/env bash
# Start Ray on this host, under a supervisor that starts it again whenever it ends by itself.
#
#   start.sh [--keep] ray start --block ...
#
# The supervisor is a systemd unit where this user may install one (and MANTA_SYSTEMD is not `no`), else supervise.sh.
# With --keep a Ray that runs already with the same command, environment and installation is left alone: the autoscaler
# starts Ray again on a host that it had lost, and the supervisor has done that by then.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
base=$(dirname "$here")
log=$base/ray.log

die() { echo "start.sh: $*" >&2; exit 1; }

keep=no
[ "$1" != --keep ] || { keep=yes; shift; }
command=("$@")

# shellcheck source=/dev/null
. "$base/profile.sh"

# Without a token of its own Ray makes one, which no other host accepts.
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
[ "${RAY_AUTH_MODE:-}" != token ] || [ -s "$token" ] || die "there is no token in $token; file_mounts should bring it"
[ ! -f "$token" ] || chmod 600 "$token"

# With a store larger than /dev/shm Ray puts it on a disk, and every chunk with it.
for argument in "${command[@]}"; do
    case $argument in --object-store-memory=*)
        there=$(df --block-size=1 --output=size /dev/shm | tail -n 1)
        [ "${argument#*=}" -le "$there" ] ||
            die "/dev/shm of $(hostname) has $there bytes, ${argument#*=} are asked for: enlarge it, or lower ray.object_store_mib"
        ;;
    esac
done

# On premises all hosts run the same commands: what this one is for stands in a list, by address or name. In a cloud
# there is no list, and the host's group says it.
resources=
while read -r host roles; do
    for name in $(hostname -I) "$(hostname)" "$(hostname -f 2>/dev/null || true)"; do
        [ "$host" = "$name" ] || continue
        for role in $roles; do resources+="${resources:+, }\"manta_$role\": 1000"; done
        # Ray would ask the routing table for its address, and a host may have several.
        [[ $host =~ ^[0-9.]+$ ]] && command+=("--node-ip-address=$host")
        break 2
    done
done < <(cat "$base/roles" 2>/dev/null)
[ -z "$resources" ] || command+=("--resources={$resources}")

# What the autoscaler says of this host, its group and the head. It comes with the command alone.
saved() { for name in "${!RAY_@}"; do printf 'export %s=%q\n' "$name" "${!name}"; done; }
started="$(printf '%q ' "${command[@]}")"
wanted="$started
$(saved)
$(cat "$base/installed")"
supervised() {
    systemctl is-active --quiet manta-ray 2>/dev/null || kill -0 "$(cat "$base/supervisor.pid" 2>/dev/null)" 2>/dev/null
}
if [ "$keep" = yes ] && [ "$wanted" = "$(cat "$base/started" 2>/dev/null)" ] && supervised &&
    pgrep -u "$(id -u)" -x raylet >/dev/null; then
    echo "Ray runs already"
    exit 0
fi

"$here/stop.sh" >/dev/null || true
saved >"$base/node.env"
printf 'exec %s\n' "$started" >"$base/command"
: >"$log"
if [ "${MANTA_SYSTEMD:-}" != no ] && [ -d /run/systemd/system ] && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
    sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")
    sed -e "s|@USER@|$(id -un)|" -e "s|@BASE@|$base|" "$here/manta-ray.service" |
        $sudo tee /etc/systemd/system/manta-ray.service >/dev/null
    $sudo systemctl daemon-reload
    $sudo systemctl enable --quiet manta-ray
    $sudo systemctl restart manta-ray
else
    setsid --fork "$here/supervise.sh" </dev/null >>"$log" 2>&1
fi

for _ in $(seq 240); do
    if grep -q "Ray runtime started" "$log"; then
        printf '%s\n' "$wanted" >"$base/started"
        echo "Ray runs"
        exit 0
    fi
    sleep 0.5
done
tail -n 20 "$log" >&2
die "Ray did not start within two minutes; the supervisor goes on trying, its log is $log"
