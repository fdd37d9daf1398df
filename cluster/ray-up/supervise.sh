#!/usr/bin/env bash
# manta-ray.service for a host without systemd: runs Ray, and runs it again when it ends. stop.sh ends both.
set -u
here=$(cd "$(dirname "$0")" && pwd)
base=$(dirname "$here")
# Engines start processes of their own, which would keep their GPU: all that comes from here carries this mark.
export MANTA_SUPERVISOR=$$
echo $$ >"$base/supervisor.pid"

while [ "$(cat "$base/supervisor.pid" 2>/dev/null)" = $$ ]; do
    "$here/run.sh"
    echo "supervise.sh: Ray ended with code $? on $(date --iso-8601=seconds), starting it again"
    "$here/sweep.sh" "$MANTA_SUPERVISOR"
    sleep 2
done
