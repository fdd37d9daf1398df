#!/bin/bash
# Becomes PID 1 of a lab host. Runs in new mount, PID, UTS and IPC namespaces, in the host's network.
#   host_init.sh FOLDER NAME ADDRESS SHM_MIB SSH_ENVIRONMENT VISIBLE...
# FOLDER holds the host's disk; VISIBLE are paths of this machine that the host sees in their place.
set -euo pipefail
folder=$1 name=$2 address=$3 shm=$4 environment=$5
shift 5

mount --make-rprivate /
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /run/machine /run/upper /run/work
# All that the machine has, to take the visible paths from after the host's own folders have covered them.
mount --rbind / /run/machine
disk=/run/machine$folder

own() { # a folder that begins empty
    mkdir -p "$disk/own$1"
    mount --bind "$disk/own$1" "$1"
}
copied() { # a folder that begins as the machine's and keeps the host's changes to itself
    [ -d "$1" ] || return 0
    local place
    # An upper layer needs a real file system below it; in a container the memory has to do.
    for place in "$disk" /run; do
        mkdir -p "$place/upper$1" "$place/work$1"
        mount -t overlay -o "lowerdir=/run/machine$1,upperdir=$place/upper$1,workdir=$place/work$1" \
            overlay "$1" 2>/dev/null && return 0
    done
    echo "no overlay on $1: the host shares it with the machine" >&2
}

for path in /etc /var /opt /srv /mnt /usr/local; do copied "$path"; done
own /root
own /tmp
chmod 700 /root
chmod 1777 /tmp
for path in "$@"; do
    [ "$path" -ef "/run/machine$path" ] && continue
    mkdir -p "$path"
    mount --rbind "/run/machine$path" "$path"
done
# A folder above the others may have covered one that was in its place before.
for path in "$@"; do
    [ "$path" -ef "/run/machine$path" ] || { echo "$path can't be made visible" >&2; exit 1; }
done

mount --bind "$disk/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$disk/resolv.conf" /etc/resolv.conf; fi
cp "$disk/host_key" /run/sshd/host_key
chmod 600 /run/sshd/host_key
mkdir -p /tmp/ray
mount -t tmpfs -o "mode=1777,size=${shm}m" tmpfs /dev/shm
cd /
umount --lazy /run/machine

exec /usr/sbin/sshd -D -e -f /dev/null -o "ListenAddress=$address" -o HostKey=/run/sshd/host_key \
    -o PermitRootLogin=prohibit-password -o StrictModes=no -o UsePAM=no -o PidFile=none \
    -o "SetEnv=$environment" -o MaxSessions=100 -o MaxStartups=100
