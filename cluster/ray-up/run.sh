#!/usr/bin/env bash
# Become the Ray of this host, as start.sh was told. Run by the supervisor; ends when a part of Ray ends by itself.
set -euo pipefail
base=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=/dev/null
. "$base/profile.sh"
# shellcheck source=/dev/null
. "$base/node.env"
# Ray's launcher sets these for the commands that it runs on a host; engines would have one thread each.
unset OMP_NUM_THREADS PYTHONWARNINGS
if [ -f "$base/secrets.env" ]; then
    chmod 600 "$base/secrets.env"
    set -a
    # shellcheck source=/dev/null
    . "$base/secrets.env"
    set +a
fi
ulimit -n "$(ulimit -H -n)"
cd
# shellcheck source=/dev/null
. "$base/command"
