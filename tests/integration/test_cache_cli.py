"""`manta cache` against a router with caches, as a person and as a script meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from click.testing import Result
from typer.testing import CliRunner

from cache_store.events import ChunkKey
from cluster.cli import app
from tests.integration.cluster_caches import CachedCluster, running_with_caches
from tests.integration.in_process import CHUNK_TOKENS, DEADLINE_S, MODEL, running, words

ROOT = Path(__file__).parents[2]
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(1, 9)]
LONG = words(4 * CHUNK_TOKENS + 10, "long")
ADMIN_KEY = "open sesame"


class Running:
    """A cluster with caches whose loop runs in another thread, so that a command may block this one."""

    def __init__(self, portal: BlockingPortal, cached: CachedCluster) -> None:
        self._portal = portal
        self.cached = cached
        self.url = cached.cluster.router.url

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._portal.call(function, *args)

    def save(self, keys: list[ChunkKey], node: int = 0) -> None:
        self.call(self.cached.caches[node].save, keys)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts a cluster with caches of the nodes aa00 and bb00; it ends with the test."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())

        def make(replicas: int = 1, **options: Any) -> Running:
            manager = running_with_caches(replicas, **options)
            return Running(portal, stack.enter_context(portal.wrap_async_context_manager(manager)))

        yield make


@pytest.fixture
def here(start: Callable[..., Running]) -> Running:
    return start()


def manta(*arguments: str, endpoint: str | Running = "", stdin: str | None = None, code: int = 0) -> Result:
    url = endpoint.url if isinstance(endpoint, Running) else endpoint
    command = ["cache", *arguments, *(["--endpoint", url] if url else [])]
    result = CliRunner().invoke(app, command, input=stdin, env={"COLUMNS": "160"})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_stats_are_a_table_of_nodes_and_tiers_with_totals(here: Running) -> None:
    here.save(KEYS[:3])
    here.save(KEYS[:1], node=1)
    rows = [line.split() for line in manta("stats", endpoint=here).stdout.splitlines()]
    assert ["aa00", "dram", "3", "3.0", "KiB", "1.0", "MiB", "0%", "0", "0", "B", "0"] in rows
    assert ["all", "dram", "4", "4.0", "KiB", "2.0", "MiB", "0%", "0", "0", "B", "0"] in rows
    assert ["all", "remote", "3", "3.0", "KiB", "no", "limit", "0", "0", "B", "0"] in rows
    whole = json.loads(manta("stats", "--json", endpoint=here).stdout)
    assert whole["totals"]["tiers"]["dram"]["chunks"] == 4


def test_chunks_are_listed(here: Running) -> None:
    here.save(KEYS[:3])
    listed = manta("ls", "--limit", "2", endpoint=here).stdout
    assert listed.count("aa00") == 2
    assert "dram,disk,remote" in listed
    assert "there are more" in listed
    assert "aa00" not in manta("ls", "--node", "bb", endpoint=here).stdout
    whole = json.loads(manta("ls", "--json", endpoint=here).stdout)
    assert {chunk["key"] for chunk in whole["chunks"]} == {key.hex() for key in KEYS[:3]}


def test_a_prompt_is_found_by_its_text_its_body_or_its_keys(here: Running, tmp_path: Path) -> None:
    warmed = tmp_path / "one.txt"
    warmed.write_text(LONG)
    here.call(here.cached.begin_saving)
    manta("warm", str(warmed), endpoint=here)
    shown = manta("lookup", LONG, endpoint=here).stdout
    tokens = 4 * CHUNK_TOKENS
    assert f"{tokens} of {tokens + 10} prompt tokens are held" in shown
    assert shown.count("replica-0") == shown.count("aa00") // 3 == 4
    body = json.dumps({"prompt": LONG, "model": MODEL})
    (tmp_path / "body.json").write_text(body)
    for arguments, stdin in (
        ([LONG, "--model", MODEL], None),
        (["--body", str(tmp_path / "body.json")], None),
        (["--body", "-"], body),
    ):
        found = json.loads(manta("lookup", *arguments, "--json", endpoint=here, stdin=stdin).stdout)
        assert found["engines"][0]["covered_tokens"] == tokens
    keys = [chunk["key"] for chunk in found["engines"][0]["chunks"]]
    assert "aa00" in manta("lookup", "--key", keys[0], "--key", keys[1], endpoint=here).stdout
    short = manta("lookup", "short", endpoint=here).stdout
    assert f"0 of 2 prompt tokens are held: the prompt has no whole chunk of {CHUNK_TOKENS} tokens" in short
    # As a message it is another prompt.
    assert "0 of" in manta("lookup", LONG, "--chat", endpoint=here).stdout


def test_what_is_pinned_is_not_evicted_until_it_is_unpinned(here: Running) -> None:
    here.save(KEYS[:3])
    one = ("--key", KEYS[0].hex())
    assert "aa00: 1 of 1 chunks pinned" in manta("pin", *one, endpoint=here).stdout
    assert "aa00: 0 of 1 chunks evicted" in manta("evict", *one, endpoint=here).stdout
    assert "aa00: 2 evicted" in manta("evict", "--all", "--yes", endpoint=here).stdout
    assert "bb00: 0 of 1 chunks unpinned" in manta("unpin", *one, endpoint=here).stdout
    assert json.loads(manta("evict", *one, "--json", endpoint=here).stdout)["nodes"] == {"aa00": 1, "bb00": 0}


def test_all_is_evicted_only_after_a_yes(here: Running) -> None:
    here.save(KEYS[:3])
    store = here.cached.caches[0].store
    for answer in ("n\n", ""):
        asked = manta("evict", "--all", endpoint=here, stdin=answer, code=1)
        assert f"of {here.url}?" in asked.stderr
        assert len(store.ls(10)) == 3
    assert "aa00: 3 evicted" in manta("evict", "--all", endpoint=here, stdin="y\n").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lookup"], "say which chunks"),
        (["lookup", "text", "--key", "0a"], "by one of these only"),
        (["evict", "text", "--all"], "by one of these only"),
        (["pin", "--key", "0a"], "answered 400"),
        (["lookup", "text", "--tenant", "red"], "There are none: leave it out."),
        (["lookup", "text", "--model", "none"], "The model `none` does not exist"),
        (["lookup", "--body", "nowhere.json"], "nowhere.json: can't be read: No such file"),
        (["warm", "nowhere.txt"], "nowhere.txt: can't be read: No such file"),
        (["ls", "--node", "cc"], "There are: aa00, bb00."),
    ],
)
def test_what_can_not_be_asked_is_one_message(here: Running, arguments: list[str], said: str) -> None:
    failed = manta(*arguments, endpoint=here, code=1)
    assert said in failed.stderr
    assert failed.stdout == ""


def test_a_node_that_does_not_answer_is_named_beside_what_the_others_told(here: Running) -> None:
    here.save(KEYS[:3])
    here.call(here.cached.caches[1].stop_answering)
    for arguments in (["stats"], ["ls"], ["lookup", "--key", KEYS[0].hex()], ["pin", "--key", KEYS[0].hex()]):
        partial = manta(*arguments, endpoint=here, code=1)
        assert "aa00" in partial.stdout
        assert "node bb00: cache-bb00 did not answer" in partial.stderr


def test_the_admin_key_comes_from_the_configuration_or_the_environment(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = start(router={"admin_key": ADMIN_KEY})
    assert "admin key" in manta("stats", endpoint=locked, code=1).stderr
    host, port = locked.url.removeprefix("http://").split(":")
    config = tmp_path / "my.yaml"
    config.write_text(
        f"engine: {{kind: sim}}\nhttp: {{host: {host}, port: {port}}}\nrouter: {{admin_key: {ADMIN_KEY}}}\n"
    )
    assert "aa00" in manta("stats", "--config", str(config)).stdout
    monkeypatch.setenv("MANTA_ADMIN_KEY", ADMIN_KEY)
    assert "aa00" in manta("stats", endpoint=locked).stdout
    file = tmp_path / "prompts.txt"
    file.write_text("a prompt\n")
    assert "1 warmed" in manta("warm", str(file), endpoint=locked).stdout


def test_no_cluster_and_no_endpoint_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path))
    assert "--endpoint or --config" in manta("stats", code=1).stderr
    assert "does not answer" in manta("stats", endpoint="http://127.0.0.1:9", code=1).stderr


def test_a_cluster_without_caches_says_how_to_get_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running(1)) as cluster:
        for arguments in (["stats"], ["lookup", "a"], ["warm", str(file)]):
            failed = manta(*arguments, endpoint=cluster.router.url, code=1)
            assert failed.stderr.count("`cache.share: auto`") == 1


# warm


def test_warming_a_file_of_bodies_computes_and_stores_them_all(here: Running, tmp_path: Path) -> None:
    here.call(here.cached.begin_saving)
    file = tmp_path / "prompts.jsonl"
    bodies = [
        {"model": MODEL, "prompt": words(200, "a"), "max_tokens": 300, "stream": True},
        {"messages": [{"role": "user", "content": words(200, "b")}]},
        {"prompt": list(range(200))},
    ]
    file.write_text("\n".join(map(json.dumps, bodies)))
    told = json.loads(manta("warm", str(file), "--json", endpoint=here).stdout)
    assert (told["prompts"], told["chunks"], told["stored"], told["failed"]) == (3, 9, 9, [])
    assert told["computed"] == told["prompt_tokens"] > 600
    assert len(here.cached.caches[0].store.ls(100)) == 9
    again = manta("warm", str(file), endpoint=here).stdout
    assert "prompts  3 warmed, 0 failed" in again
    assert "chunks   9 stored, 0 not" in again
    assert f"{told['computed']} computed" not in again
    assert "(hbm " in again


def test_lines_that_fail_are_listed_and_the_others_done(here: Running, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "a"}',
        "no json",
        "",
        '{"prompt": "b", "model": "none"}',
        '{"messages": []}',
        '{"prompt": "c"}',
    ]
    file.write_text("\n".join(lines))
    failed = manta("warm", str(file), "--wait", "0", endpoint=here, code=1)
    assert "prompts  2 warmed, 3 failed" in failed.stdout
    told = failed.stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["line 2", "line 4", "line 5"]
    assert "not a JSON object" in told[0]
    assert "404: The model `none` does not exist" in told[1]
    assert "400: Cannot apply chat template" in told[2]


def test_prompts_come_from_the_standard_input_one_a_line(here: Running) -> None:
    told = json.loads(manta("warm", "-", "--wait", "0", "--json", endpoint=here, stdin="one\n\ntwo\n").stdout)
    assert (told["prompts"], told["chunks"], told["stored"]) == (2, 0, 0)
    assert "found no prompts" in manta("warm", "-", endpoint=here, stdin="\n", code=1).stderr


def test_no_more_prompts_are_under_way_than_was_said(start: Callable[..., Running]) -> None:
    slow = start(prefill_tokens_per_s=2000.0)
    (node,) = slow.cached.cluster.nodes
    most = 0
    submit = node.engine.submit

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        generation = submit(*args, **kwargs)
        most = max(most, node.busy)
        return generation

    node.engine.submit = counting  # type: ignore[method-assign]
    prompts = "\n".join(words(50, str(number)) for number in range(12))
    manta("warm", "-", "--wait", "0", "--concurrency", "3", endpoint=slow, stdin=prompts)
    assert 1 < most <= 3


def test_a_busy_cluster_is_asked_again(start: Callable[..., Running]) -> None:
    limits = {"max_requests_per_replica": 1, "max_queue": 0}
    small = start(limits=limits, prefill_tokens_per_s=2000.0)
    prompts = "\n".join(words(50, str(number)) for number in range(3))
    told = manta("warm", "-", "--wait", "0", "--concurrency", "2", endpoint=small, stdin=prompts).stdout
    assert "prompts  3 warmed, 0 failed" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_tells_what_was_done_and_leaves_no_request_behind(
    start: Callable[..., Running], tmp_path: Path, number: signal.Signals
) -> None:
    slow = start(prefill_tokens_per_s=1000.0)
    (node,) = slow.cached.cluster.nodes
    file = tmp_path / "prompts.txt"
    file.write_text("short\n" + "\n".join(words(50_000, str(number)) for number in range(4)))
    command = [sys.executable, "-m", "cluster.cli", "cache", "warm", str(file), "--endpoint", slow.url]
    command += ["--concurrency", "2", "--wait", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        eventually(lambda: len(slow.cached.cluster.core.log) >= 3 and node.busy == 2, 60)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        watchdog.cancel()
        process.kill()
    assert (process.returncode, stderr) == (130, "")
    assert "prompts  1 warmed, 0 failed" in stdout
    eventually(slow.cached.cluster.at_rest)


def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)
