"""Prints the addresses of Ray's living nodes, again whenever they change. Runs on a host.

python watch_nodes.py ADDRESS
"""

from __future__ import annotations

import sys
import time

import ray

PERIOD_S = 0.1
PREFIX = "alive:"
"""Of the lines that are meant; Ray writes others between them."""


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    shown = None
    while True:
        alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        if alive != shown:
            print(PREFIX, *alive, flush=True)
            shown = alive
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
