#!/usr/bin/env bash
# Stop Ray on this host, and its supervisor, so that it stays stopped. The cache's files stay. Takes the options of
# `ray stop`.
set -u
here=$(cd "$(dirname "$0")" && pwd)
base=$(dirname "$here")
sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")

if grep -qs "$base/" /etc/systemd/system/manta-ray.service; then
    $sudo systemctl disable --quiet --now manta-ray
fi
supervisor=$(cat "$base/supervisor.pid" 2>/dev/null)
rm -f "$base/supervisor.pid" "$base/started"
# The number may have gone to another program since.
[ -n "$supervisor" ] && grep -qs supervise.sh "/proc/$supervisor/cmdline" && kill "$supervisor"
# shellcheck source=/dev/null
[ ! -f "$base/profile.sh" ] || . "$base/profile.sh"
stopped=0
if [ -x "${MANTA_VENV:-}/bin/ray" ]; then
    "$MANTA_VENV/bin/ray" stop "$@"
    stopped=$?
fi
[ -z "$supervisor" ] || "$here/sweep.sh" "$supervisor"
exit $stopped
