"""How long engines and tiers take, given or fitted to what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cluster.simulation.config import Bandwidth, EngineTimes, TiersConfig

Source = Literal["dram", "peer", "disk", "remote"]


class MeasurementError(ValueError):
    """Measurements that no times can be fitted to. The message says FILE:LINE, what was found and what is needed."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill", tag_field="kind", forbid_unknown_fields=True):
    tokens: int
    seconds: float
    cached: int = 0


class Decode(msgspec.Struct, frozen=True, tag="decode", tag_field="kind", forbid_unknown_fields=True):
    """One decode step."""

    streams: int
    seconds: float


class Loaded(msgspec.Struct, frozen=True, tag="load", tag_field="kind", forbid_unknown_fields=True):
    tier: Source
    bytes: int
    seconds: float


class Measured(NamedTuple):
    engine: EngineTimes
    tiers: TiersConfig


def prefill_s(times: EngineTimes, tokens: int, cached: int) -> float:
    """Seconds to compute `tokens` behind `cached` ones, alone and without the overhead."""
    return tokens * (times.prefill_token_s + (cached + tokens / 2) * times.prefill_pair_s)


def read_measured(path: Path, engine: EngineTimes, tiers: TiersConfig) -> Measured:
    """The times given, with those replaced that the file measures. Raises MeasurementError."""
    prefills: list[Prefill] = []
    decodes: list[Decode] = []
    loads: dict[Source, list[Loaded]] = {}
    for row in _rows(path):
        if isinstance(row, Prefill):
            prefills.append(row)
        elif isinstance(row, Decode):
            decodes.append(row)
        else:
            loads.setdefault(row.tier, []).append(row)
    changed: dict[str, float] = {}
    if prefills:
        rows = [[1.0, each.tokens, each.tokens * (each.cached + each.tokens / 2)] for each in prefills]
        names = ("prefill_overhead_s", "prefill_token_s", "prefill_pair_s")
        changed |= dict(zip(names, _fit(rows, [each.seconds for each in prefills]), strict=True))
    if decodes:
        fitted = _fit([[1.0, each.streams] for each in decodes], [each.seconds for each in decodes])
        changed |= dict(zip(("decode_step_s", "decode_stream_s"), fitted, strict=True))
    for name in ("prefill_token_s", "decode_step_s"):
        if name in changed and changed[name] <= 0:
            raise MeasurementError(
                f"{path}: {name} comes out as 0; needed: measurements that differ in length"
            )
    bandwidths = {f"from_{tier}": _bandwidth(each, path) for tier, each in loads.items()}
    return Measured(engine.model_copy(update=changed), tiers.model_copy(update=bandwidths))


def _rows(path: Path) -> Iterable[Prefill | Decode | Loaded]:
    decode = msgspec.json.Decoder(Prefill | Decode | Loaded).decode
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise MeasurementError(f"{path}: can't be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MeasurementError(
                f"{path}:{number}: {error}; needed: an object whose kind is prefill, decode or load"
            ) from error
        if min(value for value in msgspec.structs.astuple(row) if not isinstance(value, str)) < 0:
            raise MeasurementError(f"{path}:{number}: found a negative number; needed: 0 or more")
        yield row


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares with no factor below 0: the most negative one is left out until none is."""
    matrix, wanted = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    used = list(range(matrix.shape[1]))
    factors = np.zeros(matrix.shape[1])
    while used:
        part = matrix[:, used]
        scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
        found = np.linalg.lstsq(part / scale, wanted, rcond=None)[0] / scale
        if found.min() >= 0:
            factors[used] = found
            break
        del used[int((found * scale).argmin())]
    return [float(factor) for factor in factors]


def _bandwidth(loads: Sequence[Loaded], path: Path) -> Bandwidth:
    latency, per_byte = _fit([[1.0, each.bytes] for each in loads], [each.seconds for each in loads])
    if per_byte <= 0:
        raise MeasurementError(
            f"{path}: the rate of {loads[0].tier} comes out without a bound; needed: loads of different sizes"
        )
    return Bandwidth(latency_s=latency, bytes_per_s=1 / per_byte)
