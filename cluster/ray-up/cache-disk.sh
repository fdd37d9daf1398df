#!/usr/bin/env bash
# Make the folder of the disk cache: on a local NVMe disk where this host has one, else on the disk that is there.
#
#   cache-disk.sh FOLDER
#
# A disk is formatted only if it is a cloud's instance store (its content never outlives the machine) and holds
# nothing, or if MANTA_CACHE_DEVICE names it. One that was formatted before is mounted again, with what it holds.
# Several become one stripe. Without root there is a folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
mount=$(dirname "$folder")
label=manta-cache
sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")

instance_stores() {
    lsblk --nodeps --noheadings --paths --output NAME,MODEL 2>/dev/null |
        awk '/Amazon EC2 NVMe Instance Storage|nvme_card/ && !/Elastic Block Store|nvme_card-pd/ {print $1}' |
        while read -r disk; do
            # Nothing on it: no partition, no file system, no member of an array.
            [ "$(lsblk --noheadings "$disk" | wc -l)" = 1 ] && [ -z "$($sudo blkid -p -o value -s TYPE "$disk")" ] &&
                echo "$disk"
        done
}

set_up_disk() {
    local device=${MANTA_CACHE_DEVICE:-} disks
    if $sudo blkid -L "$label" >/dev/null; then
        device=$($sudo blkid -L "$label")
    else
        if [ -z "$device" ]; then
            mapfile -t disks < <(instance_stores)
            [ "${#disks[@]}" -gt 0 ] || return 0
            device=${disks[0]}
            if [ "${#disks[@]}" -gt 1 ] && command -v mdadm >/dev/null; then
                device=/dev/md/manta
                $sudo mdadm --create "$device" --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
            fi
        fi
        $sudo mkfs.ext4 -q -m 0 -L "$label" "$device"
    fi
    $sudo mkdir -p "$mount"
    $sudo mount -o noatime,discard "$device" "$mount"
}

# Mounting hides what lies below: only where there is nothing yet.
if ! mountpoint -q "$mount" && [ -z "$(ls -A "$mount" 2>/dev/null)" ] && { [ -z "$sudo" ] || $sudo true 2>/dev/null; }; then
    set_up_disk
fi
mkdir -p "$folder" 2>/dev/null || { $sudo mkdir -p "$folder" && $sudo chown "$(id -u):$(id -g)" "$folder"; }
[ -w "$folder" ] || { echo "cache-disk.sh: $(id -un) may not write to $folder" >&2; exit 1; }
# After a restart of the host the disk must be mounted again before Ray starts.
printf '#!/bin/sh\nexec "%s/cache-disk.sh" "%s"\n' "$here" "$folder" >"$(dirname "$here")/mount-cache"
chmod +x "$(dirname "$here")/mount-cache"
df --human-readable --output=source,size,target "$folder" | tail -n 1
