"""Chunks between two hosts of a lab, beside what `ray.get` reaches there."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

from benchmarks import peers
from benchmarks.harness import Report, paired_ratio
from benchmarks.store_workload import CHUNK_BYTES, CHUNKS

LEAST = 0.9
SHM_MIB, OBJECT_STORE_MIB = 900, 640
LIMIT_S = 180.0


def hosts_figures(report: Report, rounds: int, on_round: Callable[[str], None]) -> None:
    from tests.hosts.lab import Lab, why_not

    name, target = (
        f"{CHUNKS} chunks of 4 MiB verified in the staging area, from another host",
        f"> {LEAST:g} x",
    )
    if reason := why_not():
        report.skipped(name, "MB/s", reason, target)
        return
    from tests.hosts.ray_hosts import RayHosts

    on_round("starting two hosts")
    with Lab() as lab:
        reader, owner = lab.make(["reader", "owner"], shm_mib=SHM_MIB)
        with RayHosts(reader, [owner], head_cpus=1, object_store_mib=OBJECT_STORE_MIB) as ray_hosts:
            on_round(f"{rounds} rounds")
            command = f"{sys.executable} -m benchmarks.two_hosts {ray_hosts.address} owner {rounds}"
            done = reader.run(f"cd {peers.ROOT} && {command}", env=ray_hosts.env, timeout_s=LIMIT_S)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = (CHUNK_BYTES / statistics.fmean(found[way]) / 1e6 for way in ("manta", "ray"))
    ratio = paired_ratio(found["ray"], found["manta"])
    against = (
        f"ray.get, no check: {theirs:,.0f} MB/s; {ratio.mean:.2f} x that, "
        f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    )
    report.add(name, ours, "MB/s", against, target, ratio.low > LEAST)
