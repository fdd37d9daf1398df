"""Results as files, tables and pages."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from cluster.bench import figures
from cluster.bench.cli import app
from cluster.bench.config import BenchConfigError, bench_config
from cluster.bench.figures import number
from cluster.bench.lengths import Lengths
from cluster.bench.page import comparison_page, result_page
from cluster.bench.plots import ticks
from cluster.bench.prompts import WORDS
from cluster.bench.record import RunOutcome
from cluster.bench.result import BenchResult, ResultError, load_result, make_result, save_result
from cluster.bench.tables import print_comparison, print_result
from tests.unit.test_bench_metrics import record

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def result(scale: float = 1.0, records: Sequence[Any] | None = None, **config: Any) -> BenchResult:
    if records is None:
        times = [
            (0.1 * scale, 0.15 * scale, 0.22 * scale, (0.3 + number / 100) * scale) for number in range(40)
        ]
        records = [
            record(*each, sent=0.05 * place, replica=f"replica-{place % 2}", cached_tokens=5)
            for place, each in enumerate(times)
        ]
        records = [*records, record(outcome="error", error="HTTP 429: full")]
    lengths = Lengths(WORDS, exact=True, template_tokens=8)
    outcome = RunOutcome(list(records), 3.0, interrupted=False)
    fields = {"label": "a <run> & more", "goodput": {"ttft": 500}, **config}
    return make_result(bench_config(fields), lengths, outcome, STARTED, save_requests=False)


def parsed(page: str) -> ET.Element:
    assert page.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def printed(show: Any, *args: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(*args, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_page_is_well_formed_and_holds_every_figure_of_the_result() -> None:
    measured = result()
    root = parsed(result_page(measured))
    text = " ".join(root.itertext())
    for value in (measured.metrics.ttft.mean, measured.metrics.itl.p99, measured.metrics.output_throughput):
        assert number(value) in text
    assert "a <run> & more" in text
    assert "replica-1" in text
    assert "HTTP 429" in text
    assert len(list(root.iter("svg"))) == 6


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = result_page(result())
    assert not re.search(r"<(script|link|img|iframe|object)|\bsrc=|\bhref=|url\(|@import", page)


def test_a_page_has_colours_for_the_light_and_for_the_dark_scheme() -> None:
    style = next(parsed(result_page(result())).iter("style")).text or ""
    light, dark = style.split("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--[\w-]+)\)", style)) - {"--c"}
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark


@pytest.mark.parametrize("records", [[], [record(0.1)], [record(outcome="error", error="timeout: x")]])
def test_a_page_of_next_to_nothing_is_well_formed_and_draws_no_impossible_place(records: list[Any]) -> None:
    page = result_page(result(records=records))
    parsed(page)
    assert "nan" not in page.lower()
    assert "inf" not in page.lower().replace("info", "")


def test_a_histogram_has_a_bar_for_every_filled_bin() -> None:
    measured = result()
    bars = [each for each in parsed(result_page(measured)).iter("rect") if each.get("class") == "bar"]
    filled = sum(1 for name in ("ttft", "itl") for count in measured.distributions[name].bins if count)
    assert len(bars) == filled > 2


def test_a_comparison_shows_every_result_and_the_change_against_the_first() -> None:
    results = [result(label="one"), result(2.0, label="two")]
    text = " ".join(parsed(comparison_page(results)).itertext())
    assert "one" in text
    assert "two" in text
    assert "+100.0%" in text
    table = printed(print_comparison, results)
    assert re.search(r"TTFT mean \(ms\) +100 +200 \+100\.0%", table)


def test_a_result_without_a_figure_compares_too() -> None:
    without = result(records=[record(0.1)], label="bare", goodput={})
    table = printed(print_comparison, [result(label="full"), without])
    assert re.search(r"goodput \(req/s\) +\S+ +-", table)


def test_the_table_says_what_was_measured() -> None:
    table = printed(print_result, result())
    assert re.search(r"requests completed +40", table)
    assert re.search(r"requests failed +1", table)
    assert re.search(r"cached input +50 %", table)
    assert re.search(r"TTFT +100 ", table)
    assert "requests by replica: replica-0 20, replica-1 20" in table
    assert "errors: HTTP 429 1" in table


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    measured = msgspec.structs.replace(result(), requests=[record(0.1, 0.2, tiers={"hbm": 3})])
    save_result(measured, tmp_path / "new" / "a.json")
    assert load_result(tmp_path / "new" / "a.json") == measured


def test_values_of_headers_are_not_saved() -> None:
    measured = result(target={"headers": {"authorization": "Bearer secret"}})
    assert b"secret" not in msgspec.json.encode(measured)
    assert measured.config["target"]["headers"] == {"authorization": "(not saved)"}


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "no result of"), ("no", "no result of"), (None, "can't be read")]
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ResultError, match=said):
        load_result(path)


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    save_result(msgspec.structs.replace(result(), version=99), tmp_path / "x.json")
    with pytest.raises(ResultError, match="version is 99"):
        load_result(tmp_path / "x.json")


def test_compare_prints_and_writes_a_page(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 0.5)):
        save_result(result(scale, label=name), tmp_path / f"{name}.json")
    page = tmp_path / "out" / "page.html"
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    ran = CliRunner().invoke(app, ["compare", *files, "--html", str(page)])
    assert ran.exit_code == 0, ran.output
    assert "-50.0%" in ran.output
    parsed(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["random", "--turns", "3"], "workload.random.turns: Extra inputs are not permitted"),
        (["nonsense"], "workload: Input tag 'nonsense'"),
        (["trace"], "workload.trace.path: Field required"),
        (["--arrival", "poisson"], "poisson arrivals need a rate"),
        (["--arrival", "trace"], "arrivals by trace need a trace"),
        (["--arrival", "closed", "--rate", "3"], "a rate belongs to poisson arrivals"),
        (["--prompt-form", "ids", "--endpoint", "chat"], "chat takes no token ids"),
        (["--url", "localhost:8000"], "needed: http://HOST:PORT"),
        (["--goodput", "ttft"], "needed: METRIC:MILLISECONDS"),
        (["--goodput", "speed:3"], "goodput.speed"),
        (["--header", "x"], "needed: NAME=VALUE"),
        (["--extra-body", "[]"], "needed: a JSON object"),
        (["--num-requests", "0"], "num_requests: Input should be greater than or equal to 1"),
        (["--concurrency", "1000000"], "arrival.concurrency: Input should be less than or equal to"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused_with_the_field_and_what_it_needs(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path))
    ran = CliRunner().invoke(app, ["serve", *options])
    assert ran.exit_code == 1
    assert said in ran.output


def test_a_url_may_end_in_v1() -> None:
    assert bench_config({"target": {"url": "http://h:1/v1/"}}).target.url == "http://h:1"
    with pytest.raises(BenchConfigError, match=r"target\.url"):
        bench_config({"target": {"url": "h"}})


def test_settings_leave_out_what_was_not_set() -> None:
    shown = dict(figures.settings(result().config))
    assert shown["workload.kind"] == "random"
    assert shown["goodput"] == "{'ttft': 500.0}"
    assert "duration_s" not in shown


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_within(low: float, width: float) -> None:
    found = ticks(low, low + width)
    slack = width * 1e-6
    assert len(found) <= 6
    assert all(low - slack <= each <= low + width + slack for each in found)
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (5, "5"), (1234.5, "1,234"), (123.45, "123.5"), (1.234, "1.23"), (0.01234, "0.0123")],
)
def test_numbers_have_three_digits_or_are_whole(value: float, text: str) -> None:
    assert number(value) == text


def test_an_even_beat_survives_the_file(tmp_path: Path) -> None:
    measured = result(arrival={"kind": "poisson", "rate": 2, "burstiness": "inf"})
    save_result(measured, tmp_path / "a.json")
    assert load_result(tmp_path / "a.json").config["arrival"]["burstiness"] == "inf"
