#!/usr/bin/env bash
# Before a pod ends: move away what Serve runs here, let what is open finish, and end Ray. Its preStop hook.
#
#   pre-stop.sh SECONDS          # at most; 0, for the head, waits for nothing
#
# Kubernetes takes the pod out of its Services by itself, but Serve's proxies on other pods, routers and the autoscaler
# know nothing of that. Told that the node goes, Serve starts others elsewhere where there is room and sends nothing new
# here; routers and replicas finish their requests.
set -u
limit=$1
port=${MANTA_HTTP_PORT:-8000}
began=$SECONDS

# To the pod's log, since what a hook writes goes nowhere.
say() { echo "pre-stop.sh: $*" 2>/dev/null >/proc/1/fd/1 || echo "pre-stop.sh: $*"; }

# Routers and replicas, by the names that Ray gives their processes.
serving() { grep -qsz '^ray::ServeReplica:' /proc/[0-9]*/cmdline; }

# Clients whose connections this pod's proxy holds; state 01 is established.
connected() {
    awk -v port="$(printf '%04X' "$port")" '
        $4 == "01" { split($2, here, ":"); if (here[2] == port) found = 1 }
        END { exit !found }' /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

drain() {
    say "draining for up to $limit s"
    # The head may be gone already: then there is nobody to tell, and waiting is all that is left.
    timeout 60 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod ends" \
        --deadline-remaining-seconds "$limit" >/dev/null 2>&1 || say "Ray did not take the drain"
    # Proxies and gateways need a moment to hear of it.
    sleep 10
    while [ $((SECONDS - began)) -lt "$limit" ] && { serving || connected; }; do sleep 2; done
}

# `ray start --block` takes the end of Ray's processes by `ray stop` for no reason to end itself, and the shell that is
# PID 1 does not hear the SIGTERM that follows this hook: without this the pod would stay for all of its grace.
end_blocking() {
    for process in /proc/[0-9]*; do
        # By force: nothing else of Ray is left by then, and asked politely a head's takes more than half a minute.
        tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -q '/ray start ' && kill -KILL "${process#/proc/}"
    done
}

[ "$limit" -eq 0 ] || drain
say "ending Ray after $((SECONDS - began)) s"
ray stop --grace-period 20 >/dev/null 2>&1
end_blocking
exit 0
