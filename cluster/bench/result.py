"""What a run leaves behind: one JSON file that the tables, the page and comparisons are made from."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.config import BenchConfig
from cluster.bench.lengths import Lengths
from cluster.bench.metrics import Distribution, Metrics, distribution, measure, tpot_s
from cluster.bench.record import RequestRecord, RunOutcome
from cluster.bench.timeline import Timeline, timeline

VERSION = 1


class ResultError(ValueError):
    """A file that is no result. The message names it."""


class Machine(msgspec.Struct, frozen=True):
    """Where the client ran."""

    system: str
    cores: int
    python: str


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    label: str
    started: str
    """ISO 8601, UTC."""
    machine: Machine
    config: dict[str, Any]
    """A `BenchConfig`; values of headers are left out."""
    lengths: str
    """How exact the prompts' lengths are, for a person."""
    interrupted: bool
    metrics: Metrics
    timeline: Timeline
    distributions: dict[str, Distribution]
    """By metric: ttft, tpot, itl, e2el."""
    requests: list[RequestRecord] | None = None


def make_result(
    config: BenchConfig, lengths: Lengths, outcome: RunOutcome, started: datetime, save_requests: bool
) -> BenchResult:
    records = outcome.records
    return BenchResult(
        label=config.label or f"{config.workload.kind} at {config.target.url}",
        started=started.astimezone(UTC).isoformat(timespec="seconds"),
        machine=Machine(platform.platform(), os.cpu_count() or 1, platform.python_version()),
        config=_public(config),
        lengths=describe_lengths(lengths, config.target.prompt_form),
        interrupted=outcome.interrupted,
        metrics=measure(records, outcome.elapsed_s, config.goodput),
        timeline=timeline(records, outcome.elapsed_s),
        distributions=_distributions(records),
        requests=records if save_requests else None,
    )


def describe_lengths(lengths: Lengths, prompt_form: str) -> str:
    if prompt_form == "ids":
        return "exact, in token ids"
    if not lengths.exact:
        return "approximate, one word for a token"
    extra = lengths.template_tokens
    return "exact by the endpoint's tokenizer" + (f"; its template adds {extra} tokens" if extra else "")


def save_result(result: BenchResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(result), indent=1 if result.requests is None else 0)
    )


def load_result(path: Path) -> BenchResult:
    """Raises ResultError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise ResultError(f"{path}: can't be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path}: no result of `manta bench serve --json`: {error}") from error
    if result.version != VERSION:
        raise ResultError(f"{path}: its version is {result.version}, this program reads {VERSION}")
    return result


def _distributions(records: Sequence[RequestRecord]) -> dict[str, Distribution]:
    done = [record for record in records if record.outcome == "ok"]
    return {
        "ttft": distribution(record.ttft_s for record in done),
        "tpot": distribution(tpot for record in done if (tpot := tpot_s(record)) is not None),
        "itl": distribution(gap for record in done for gap in record.gaps_s),
        "e2el": distribution(record.latency_s for record in done),
    }


def _public(config: BenchConfig) -> dict[str, Any]:
    fields: dict[str, Any] = config.model_dump(mode="json")
    fields["target"]["headers"] = dict.fromkeys(config.target.headers, "(not saved)")
    for name, value in fields["arrival"].items():
        if isinstance(value, float) and math.isinf(value):
            fields["arrival"][name] = "inf"  # JSON has no number for it
    return fields
