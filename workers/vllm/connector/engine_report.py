"""What the engine's own process tells the replica once it has started: a small file that is written whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class EngineReport(msgspec.Struct, frozen=True):
    layout: str
    """vLLM's name for how blocks lie in memory."""
    identity: str
    """Digest of the engine identity, hex."""
    sharing: bool
    reason: str = ""
    """Why KV is not shared."""


def write_report(path: Path, report: EngineReport) -> None:
    """At once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(report))
    os.replace(temporary, path)


def read_report(path: Path) -> EngineReport | None:
    """None where there is none. Raises msgspec.DecodeError for a file that is something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineReport)
    except FileNotFoundError:
        return None
