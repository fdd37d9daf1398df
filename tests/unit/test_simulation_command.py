"""`manta simulate` as it is typed: output, JSON, page, sweeps, and what it says of wrong input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.simulation.config import SimulationConfig, simulation_config

ROOT = Path(__file__).parents[2]
ROW = {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]}


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def trace(folder: Path, *rows: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def many(folder: Path) -> Path:
    return trace(
        folder,
        *(
            ROW | {"timestamp": 500 * n, "input_length": 1500, "hash_ids": [0, 1 + n % 5, 100 + n]}
            for n in range(40)
        ),
    )


def config(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_trace_is_shown_with_a_column_for_each_policy(tmp_path: Path) -> None:
    result = simulate("--trace", many(tmp_path), "--policy", "predicted_ttft", "--policy", "round_robin")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["predicted_ttft", "round_robin"]
    rows = {line[:24].strip(): line[24:].split("  ") for line in lines[1:]}
    for name in ("hit ratio", "TTFT, p99", "ITL, p90", "busiest/mean, p99", "GPU-seconds", "answered"):
        assert len([cell for cell in rows[name] if cell.strip()]) == 2, name


def test_json_has_the_same_figures_for_a_program(tmp_path: Path) -> None:
    path = many(tmp_path)
    result = simulate("--trace", path, "--policy", "least_loaded", "--json")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)
    assert run["policy"] == "least_loaded"
    assert run["answered"] == run["requests"] == 40
    assert 0 < run["hit"] <= run["ceiling"] < 1
    assert simulate("--trace", path, "--policy", "least_loaded", "--json").stdout == result.stdout


def test_a_page_loads_nothing_from_elsewhere_and_runs_no_script(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = simulate(
        "--trace", many(tmp_path), "--policy", "round_robin", "--policy", "session", "--html", page
    )
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=|href=", text)
    assert not re.search(r"https?://", text)
    body = text.partition("<body>")[2].partition("</body>")[0]
    assert ET.fromstring(f"<body>{body}</body>").findall(".//svg"), "plots"
    for word in ("round_robin", "session", "TTFT", "hit ratio", "replicas_per_node"):
        assert word in text


def test_a_sweep_answers_how_much_memory_a_trace_needs(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    small = config(tmp_path, "replicas: 2\nblocks: 8\npolicy: {kind: round_robin}\ntime_scale: 20\n")
    sweep = ("--sweep", "dram=1GiB,0", "--sweep", "disk=0,1TiB")
    path = many(tmp_path)
    result = simulate("--trace", path, "--config", small, *sweep, "--html", page)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][:4] == ["dram", "disk", "hit", "ratio"]
    assert [line[:4] for line in lines[2:]] == [
        ["0", "B", "0", "B"], ["0", "B", "1", "TiB"], ["1", "GiB", "0", "B"], ["1", "GiB", "1", "TiB"],
    ]  # fmt: skip
    assert "Hit ratio by dram" in page.read_text()
    runs = json.loads(simulate("--trace", path, "--config", small, *sweep, "--json").stdout)
    assert [(run["dram"], run["disk"]) for run in runs] == [(0, 0), (0, 2**40), (2**30, 0), (2**30, 2**40)]
    assert runs[0]["hit"] < runs[2]["hit"], "memory helps"


def test_loads_can_be_made_instead_of_read(tmp_path: Path) -> None:
    shared = config(
        tmp_path, "load: {kind: shared-prefix, groups: 3, users: 2, requests: 30, output_tokens: 5}"
    )
    assert simulate("--config", shared).exit_code == 0
    agents = config(tmp_path, "load: {kind: agentic, sessions: 2, turns: 3, output_tokens: 5}")
    result = simulate("--config", agents, "--json")
    assert json.loads(result.stdout)[0]["answered"] == 6


def test_measured_times_are_read_beside_the_configuration(tmp_path: Path) -> None:
    measured = tmp_path / "measured.jsonl"
    measured.write_text('{"kind": "decode", "streams": 1, "seconds": 3.0}\n')
    path = config(tmp_path, "measured: measured.jsonl")
    (run,) = json.loads(simulate("--trace", trace(tmp_path, ROW), "--config", path, "--json").stdout)
    assert run["itl"]["mean"] > 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("nonsense", "malformed"),
        (ROW | {"colour": "red"}, "colour"),
        ({"timestamp": 0, "input_length": 5}, "missing required field `output_length`"),
        (ROW | {"timestamp": 100, "hash_ids": [1]}, "1 hash_ids for an input_length of 1000; needed: one for each 512"),
        (ROW | {"timestamp": 100, "input_length": -3}, "input_length is -3; needed: 1 token or more"),
        (ROW | {"timestamp": 100, "output_length": -1}, "output_length is -1; needed: 0 tokens or more"),
        (ROW | {"timestamp": -1}, "timestamp is -1; needed"),
        (ROW | {"timestamp": 50}, "timestamp is 50 behind a row with 100; needed: rows in order of time"),
        (ROW | {"timestamp": "soon"}, "Expected `float`, got `str`"),
        (ROW | {"timestamp": 200, "hash_ids": [-1, 2]}, "hash_ids go from -1 to 2; needed"),
        (ROW | {"timestamp": 200, "hash_ids": [7, 7]}, "hash_ids has 7 twice; needed: each once"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, row: Any, says: str) -> None:
    path = trace(tmp_path, ROW, ROW | {"timestamp": 100}, row)
    result = simulate("--trace", path)
    assert result.exit_code == 1
    assert f"{path}:3: " in result.output
    assert says in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("replica: 3", "replica: no such setting"),
        ("replicas: -3", "replicas: found -3; input should be greater than or equal to 1"),
        ("tiers: {dram: much}", "tiers.dram: found 'much'; needed: a size"),
        ("engine: {prefill_token_s: .nan}", "engine.prefill_token_s"),
        ("policy: {kind: best}", "policy: kind is 'best'; needed"),
        ("replicas: 2\nfailures: [{replica: 2, at_s: 1}]", "failures.0.replica is 2; needed: below 2"),
        ("failures: [{replica: 0, at_s: 5, back_s: 5}]", "back_s is 5; needed: later than at_s = 5"),
        ("autoscaling: {max_replicas: 4}", "replicas is 8; needed: from autoscaling.min_replicas = 1"),
        ("load: {kind: tides}", "tides"),
        ("- 1", "found list; needed: a mapping"),
        ("a: [", ":"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_needed(tmp_path: Path, text: str, says: str) -> None:
    path = config(tmp_path, text)
    result = simulate("--trace", trace(tmp_path, ROW), "--config", path)
    assert result.exit_code == 1
    assert str(path) in result.output
    assert says in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "found nothing to simulate; needed: --trace FILE"),
        (("--trace", "no/such"), "no/such: can't be read"),
        (("--config", "no/such"), "no/such: can't be read"),
        (("--sweep", "dram"), "--sweep: found 'dram'; needed: NAME=VALUE"),
        (
            ("--sweep", "hope=1"),
            "needed: NAME=VALUE,VALUE,... with one of dram, disk, remote, replicas, blocks",
        ),
        (("--sweep", "dram=1,x"), "--sweep: dram: found 'x'; needed: a size"),
        (("--sweep", "dram=1", "--sweep", "dram=2"), "dram is given twice"),
        (("--sweep", "replicas=0"), "--sweep: replicas is 0"),
        (("--policy", "best"), "kind is 'best'; needed"),
        (("--policy", "no.such:Class"), "No module named 'no'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments: tuple[str, ...], says: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 1
    assert says in result.output.replace("\n", " ")


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    result = simulate("--trace", trace(tmp_path))
    assert result.exit_code == 1
    assert "found no rows; needed: a JSON object per line with timestamp" in result.output


def test_what_the_page_about_it_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    configs = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^manta simulate (.*)$", page, re.MULTILINE)
    rows, measured = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(configs) == 3
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(rows)
    (tmp_path / "measured.jsonl").write_text(measured)
    for text in configs:
        found = simulation_config(yaml.safe_load(text))
        assert found.model_dump(exclude={"tiers", "autoscaling", "prefill_pool", "failures", "load"}) == (
            SimulationConfig().model_dump(
                exclude={"tiers", "autoscaling", "prefill_pool", "failures", "load"}
            )
        )
        (tmp_path / "sim.yaml").write_text(text + "measured: measured.jsonl\n")
        for command in commands:
            result = simulate(*shlex.split(command))
            assert result.exit_code == 0, result.output


def test_other_commands_do_not_wait_for_numpy() -> None:
    program = "import sys, cluster.cli; print('numpy' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == "False"
