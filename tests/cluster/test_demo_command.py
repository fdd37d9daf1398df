"""`manta demo` from start to end, on simulated replicas and on the real model."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.commands import Commands
from tests.cluster.deployed import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LOCAL_CPU = Path(__file__).parents[2] / "cluster" / "configs" / "local-cpu.yaml"
SIM = {
    "name": "manta",
    "engine": {"kind": "sim", "sim": {"prefill_tokens_per_s": 3000, "decode_tokens_per_s": 200}},
    "pools": [{"role": "unified", "replicas": 2}],
    "cache": {"chunk_tokens": 64},
}
REQUESTS = 15
ROW = re.compile(r"\w+ +[123] +[A-Z] +\d+ +\d+ +\d+ ms")
HIT_RATIO = re.compile(r"Hit ratio: (\d+)% with prefix affinity, (\d+)% with round robin")
TTFT = re.compile(r"TTFT \(median\): ([\d,]+) ms for a new prefix, ([\d,]+) ms for a repeated one")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Commands]]:
    made: list[Commands] = []

    def make(config: dict[str, Any]) -> Commands:
        made.append(Commands(tmp_path / "state", tmp_path, config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check_output(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert len(ROW.findall(done.stdout)) == 2 * REQUESTS, done.stdout
    affinity, round_robin = map(int, found(HIT_RATIO, done.stdout))
    assert affinity > round_robin + 10
    new, repeated = (int(number.replace(",", "")) for number in found(TTFT, done.stdout))
    assert repeated < new / 2


def found(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.search(text)
    assert match is not None, text
    return match.groups()


def test_the_demo_measures_both_policies_and_leaves_nothing(demo: Callable[..., Commands]) -> None:
    commands = demo(SIM)
    check_output(commands.run("demo", "--config", str(commands.config), timeout=240))
    assert commands.left() == []
    assert commands.run("status").returncode == 3


def test_a_kept_demo_goes_on_with_the_configured_policy(demo: Callable[..., Commands]) -> None:
    commands = demo(SIM)
    done = commands.run("demo", "--keep", "--config", str(commands.config), timeout=240)
    check_output(done)
    assert f"curl {commands.endpoint}/v1/chat/completions" in done.stdout
    assert "manta down" in done.stdout
    prompt = {"model": "sim", "prompt": "the same again " * 100, "max_tokens": 1}
    answers = [httpx.post(f"{commands.endpoint}/v1/completions", json=prompt, timeout=60) for _ in range(4)]
    assert len({answer.headers["x-manta-replica"] for answer in answers}) == 1

    second = commands.run("demo", "--config", str(commands.config))
    assert second.returncode == 1
    assert f"manta runs already at {commands.endpoint}" in second.stderr
    assert commands.run("down").returncode == 0
    assert commands.left() == []


def test_ctrl_c_in_the_middle_of_the_chats_leaves_nothing(demo: Callable[..., Commands]) -> None:
    slow = SIM | {"engine": {"kind": "sim", "sim": {"prefill_tokens_per_s": 100}}}
    commands = demo(slow)
    process = commands.start("demo", "--config", str(commands.config))

    def busy() -> bool:
        assert process.poll() is None, process.communicate()
        commands.known()
        try:
            return bool(httpx.get(f"{commands.endpoint}/admin/replicas", timeout=2).json()["open_requests"])
        except (httpx.HTTPError, ValueError):
            return False

    wait_for("a chat", busy, 120)
    process.send_signal(signal.SIGINT)
    done = commands.ended(process)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert commands.left() == []


def test_an_engine_that_refuses_is_shown_and_the_demo_fails(demo: Callable[..., Commands]) -> None:
    short = SIM | {"engine": {"kind": "sim", "sim": {"max_model_len": 256}}}
    commands = demo(short)
    done = commands.run("demo", "--config", str(commands.config), timeout=240)
    assert done.returncode == 1
    assert "the demo broke off" in done.stderr
    assert "answered 400" in done.stderr
    assert "256" in done.stderr
    assert commands.left() == []


@pytest.mark.long
@pytest.mark.engine
def test_the_demo_with_the_real_model(demo: Callable[..., Commands]) -> None:
    commands = demo(yaml.safe_load(LOCAL_CPU.read_text()))
    check_output(commands.run("demo", "--config", str(commands.config), timeout=600))
    assert commands.left() == []
