"""`make lab`: hosts for a person, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys

from rich.console import Console
from rich.table import Table

from cluster.interrupts import as_ctrl_c
from tests.hosts.lab import OPERATOR, Lab, why_not


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lab", description=__doc__)
    parser.add_argument("--hosts", type=int, default=3, help="besides the operator's (default: %(default)s)")
    parser.add_argument(
        "--shm-mib", type=int, default=1024, help="/dev/shm of each, MiB (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    console = Console(highlight=False)
    try:
        with as_ctrl_c(), Lab() as lab:
            lab.make([OPERATOR, *(f"n{number}" for number in range(arguments.hosts))], arguments.shm_mib)
            console.print(table(lab))
            console.print(f"ssh: {lab.ssh} {lab.hosts[-1].name}", soft_wrap=True)
            console.print("Ctrl-C removes them all.")
            while True:
                signal.pause()
    except KeyboardInterrupt:
        console.print("removed")
    return 0


def table(lab: Lab) -> Table:
    shown = Table(box=None, pad_edge=False)
    for column in ("host", "address", "/dev/shm", "PID 1"):
        shown.add_column(column)
    for host in lab.hosts:
        shown.add_row(host.name, host.address, f"{host.shm_mib} MiB", str(host.pid1))
    return shown


if __name__ == "__main__":
    sys.exit(main())
