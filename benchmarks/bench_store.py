"""`make bench-store`: what KV chunks shared by the cluster cost and gain, beside LMCache and Mooncake."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.status import Status

from benchmarks.engines import MODEL
from benchmarks.harness import Report, terminal
from benchmarks.store_choice import choice_figures
from benchmarks.store_hosts import hosts_figures
from benchmarks.store_knowledge import knowledge_figures
from benchmarks.store_sharing import sharing_figures
from benchmarks.store_traffic import traffic_figures
from benchmarks.store_transfer import transfer_figures
from benchmarks.store_ttft import ttft_figures
from cluster.models import fetch_model

OnRound = Callable[[str], None]
PARTS = ("ttft", "store", "hosts", "traffic", "memory", "sharing", "choice")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_store", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--prompts", type=int, default=5, help="prompts whose TTFTs are measured")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of traffic without reuse")
    parser.add_argument("--store-rounds", type=int, default=40, help="rounds of reading chunks")
    parser.add_argument("--seconds", type=float, default=30.0, help="of conversations, at each concurrency")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="chunks known to the actor")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report, console = Report("store"), terminal()
    for name in chosen:
        with console.status(name) as status:

            def on_round(what: str, name: str = name, status: Status = status) -> None:
                status.update(f"{name}: {what}")

            measure(name, report, options, on_round)
    return report.finish(console)


def measure(part: str, report: Report, options: argparse.Namespace, on_round: OnRound) -> None:
    match part:
        case "ttft":
            ttft_figures(report, smollm2(), options.prompts, on_round)
        case "store":
            transfer_figures(report, options.store_rounds, on_round)
        case "hosts":
            hosts_figures(report, options.store_rounds, on_round)
        case "traffic":
            traffic_figures(report, smollm2(), options.rounds, on_round)
        case "memory":
            knowledge_figures(report, options.chunks, on_round)
        case "sharing":
            sharing_figures(report, smollm2(), options.seconds, on_round)
        case "choice":
            choice_figures(report, smollm2(), on_round)


def smollm2() -> Path:
    """Fetched and converted once per machine."""
    return fetch_model(MODEL, lambda step, done: None)


if __name__ == "__main__":
    sys.exit(main())
