"""The systems that Manta is measured beside: optional, in an environment of their own that `make bench-peers` makes."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL = "not installed: make bench-peers"


def environment() -> Path:
    """`$BENCH_VENV`, `.venv-bench` in the repository where that is not set."""
    return Path(os.environ.get("BENCH_VENV", ROOT / ".venv-bench"))


def command(name: str) -> Path | None:
    """A command of the peers' environment; None where it is not installed."""
    path = environment() / "bin" / name
    return path if path.is_file() else None


def python_with(module: str) -> Path | None:
    """The peers' Python, if a package is installed there."""
    python = command("python")
    found = list(environment().glob(f"lib/python3*/site-packages/{module}"))
    return python if python is not None and found else None
