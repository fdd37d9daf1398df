#!/usr/bin/env bash
# Kill what a supervisor's Ray has left behind: sweep.sh SUPERVISOR. The supervisor itself stays.
set -u
mapfile -t marked < <(grep --files-with-matches --null-data --no-messages --line-regexp "MANTA_SUPERVISOR=$1" /proc/[0-9]*/environ)
for environment in "${marked[@]}"; do
    pid=${environment//[!0-9]/}
    [ "$pid" = $$ ] || [ "$pid" = "$1" ] || kill -9 "$pid" 2>/dev/null
done
