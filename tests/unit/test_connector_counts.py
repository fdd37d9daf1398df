"""What the connector counts, across steps and processes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from workers.vllm.connector.counts import Counts, merge, quantile
from workers.vllm.connector.engine_report import EngineReport, read_report, write_report
from workers.vllm.connector.known_chunks import KnownChunks
from workers.vllm.connector.metadata import LoadResult, StepReport
from workers.vllm.connector.request_state import Admission


def test_counts_are_taken_once_and_hold_nothing_that_json_can_t() -> None:
    counts = Counts()
    counts.add("loaded_tokens", "dram", 64)
    counts.add("loaded_tokens", "dram", 64)
    counts.add("saved_chunks", "stored")
    counts.admitted(Admission("t", "r", 1, (0, 2, 0, 0, 0), 3))
    taken = counts.take()
    assert json.loads(json.dumps(taken)) == {
        "loaded_tokens": {"dram": 128},
        "saved_chunks": {"stored": 1},
        "admissions": {"t": {"r": [1, [0, 2, 0, 0, 0], 3]}},
    }
    assert counts.take() == {}


def test_the_counts_of_two_intervals_are_those_of_one() -> None:
    def interval(amount: int, name: str) -> dict[str, object]:
        return {
            "lookups": {"answered": amount, name: 1},
            "calls": [amount],
            "admissions": {"t": {name: [amount]}},
        }

    assert merge(interval(1, "a"), interval(2, "b")) == {
        "lookups": {"answered": 3, "a": 1, "b": 1},
        "calls": [1, 2],
        "admissions": {"t": {"a": [1], "b": [2]}},
    }
    assert merge({}, interval(1, "a")) == merge(interval(1, "a"), {}) == interval(1, "a")


def test_a_quantile_is_a_call_that_happened() -> None:
    calls = [float(number) for number in range(1000)][::-1]
    assert (quantile(calls, 0.99), quantile(calls, 0.5), quantile([7.0], 0.99)) == (990.0, 500.0, 7.0)


def test_reports_of_workers_add_up() -> None:
    first = StepReport([LoadResult("a", (1,), "")], {1: 10}, {"a": 1}, [(b"k", "stored")])  # type: ignore[list-item]
    second = StepReport([], {1: 5, 3: 2}, {"a": 1, "b": 2}, [])
    both = first.aggregate(second)
    assert (both.loads, both.saved) == (first.loads, first.saved)
    assert (both.loaded_bytes, both.gathered) == ({1: 15, 3: 2}, {"a": 2, "b": 2})
    assert not StepReport()
    for part in (
        {"loads": first.loads},
        {"loaded_bytes": {1: 1}},
        {"gathered": {"a": 1}},
        {"saved": first.saved},
    ):
        assert StepReport(**part), "a report that says anything is told"


def test_the_chunks_known_longest_are_forgotten_first() -> None:
    known = KnownChunks(capacity=3)
    keys = [bytes([number]) * 32 for number in range(5)]
    for key in keys[:3]:
        known.add(key)  # type: ignore[arg-type]
    known.add(keys[0])  # type: ignore[arg-type]
    known.note(keys[3:], b"\x01\x00")  # type: ignore[arg-type]
    assert [key in known for key in keys] == [True, False, True, True, False]
    known.clear()
    assert len(known) == 0


def test_a_report_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert read_report(path) is None
    report = EngineReport("LBHNC", "ab" * 32, False, "two groups")
    write_report(path, report)
    assert read_report(path) == report
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
    path.write_bytes(b'{"layout": 7}')
    with pytest.raises(msgspec.ValidationError):
        read_report(path)
