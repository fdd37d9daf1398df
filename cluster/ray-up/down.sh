#!/usr/bin/env bash
# Take a cluster of `ray up` down, on all of its hosts:
#
#   cluster/ray-up/down.sh FILE
#
# `ray down` stops Ray on the head and, in a cloud, ends the machines. On premises Ray goes on running on the workers:
# this stops it there too. Exit code 1 with the hosts that could not be reached.
set -euo pipefail
file=$1

# user, key, head, workers: from the cluster's own file; empty in a cloud.
mapfile -t hosts < <(python3 - "$file" <<'END'
import sys, yaml
data = yaml.safe_load(open(sys.argv[1]))
provider, auth = data["provider"], data["auth"]
if provider["type"] == "local":
    print(auth["ssh_user"], auth.get("ssh_private_key", ""), provider.get("external_head_ip") or provider["head_ip"], *provider["worker_ips"], sep="\n")
END
)
stop_on() {
    # shellcheck disable=SC2088 # the home folder of that host
    ssh -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o LogLevel=ERROR ${key:+-i "$key" -o IdentitiesOnly=yes} "$user@$1" '~/manta/ray-up/stop.sh'
}

missed=()
if [ "${#hosts[@]}" -gt 0 ]; then
    user=${hosts[0]} key=${hosts[1]/#\~/$HOME}
    # The head first: its autoscaler would start the others again.
    for host in "${hosts[@]:2}"; do
        echo "stopping Ray on $host"
        stop_on "$host" || missed+=("$host")
    done
fi
ray down --yes "$file" || missed+=("ray down")
[ "${#missed[@]}" = 0 ] || { echo "down.sh: not stopped: ${missed[*]}" >&2; exit 1; }
