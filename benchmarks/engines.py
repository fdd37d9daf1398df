"""Real engines for benchmarks: SmolLM2 on one core each, all alike but for their KV connector."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_process import VOCABULARY
from benchmarks.harness import cpu_seconds
from benchmarks.line_process import LineProcess, python_path
from benchmarks.store_nodes import wait_until
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace

MODEL = "SmolLM2-135M-Instruct"
CHUNK_TOKENS = 256
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 4096
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2 in bfloat16: layers, key and value, KV heads, head size, bytes."""
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Answer(NamedTuple):
    ttft_s: float
    seconds: float
    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed, as the engine says."""


class Turns(NamedTuple):
    ttfts_s: list[float]
    answered: int
    """Tokens of answers."""
    cached: int
    """Tokens of prompts that were not computed."""
    prompted: int
    seconds: float


class Engine:
    """One engine process. Made by `engines`."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    def run(
        self, prompt: Sequence[int], max_tokens: int = 1, params: Mapping[str, Any] | None = None
    ) -> Answer:
        found = self._ask("run", prompt=list(prompt), max_tokens=max_tokens, params=params)
        return Answer(found["ttft_s"], found["seconds"], tuple(found["tokens"]), found["cached"])

    def talk(
        self,
        conversations: Sequence[int],
        history: int,
        turn: int,
        max_tokens: int,
        concurrency: int,
        seconds: float,
    ) -> Turns:
        """See `benchmarks.engine_process.Asked.talk`."""
        found = self._ask(
            "talk", conversations=list(conversations), history=history, turn=turn, max_tokens=max_tokens,
            concurrency=concurrency, seconds=seconds, timeout_s=600.0,
        )  # fmt: skip
        turns = found["turns"]
        answered, cached, prompted = (
            sum(map(count, turns))
            for count in (
                lambda turn: len(turn["tokens"]),
                lambda turn: turn["cached"],
                lambda turn: turn["prompt"],
            )
        )
        return Turns([turn["ttft_s"] for turn in turns], answered, cached, prompted, found["seconds"])

    def forget(self) -> None:
        """All KV that the engine has itself. Waits for blocks that a connector still reads."""
        wait_until(lambda: bool(self._ask("forget")), "an engine without KV")

    def metrics(self, prefix: str) -> dict[str, float]:
        return dict(self._ask("metrics", prefix=prefix))

    def loaded_tokens(self) -> dict[str, int]:
        """By tier, from Manta's store."""
        found = self.metrics("manta_kv_loaded_tokens_total")
        return {name.partition("tier=")[2].rstrip("}"): int(value) for name, value in found.items()}

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def _ask(self, what: str, timeout_s: float = REQUEST_TIMEOUT_S, **about: Any) -> Any:
        return self._process.ask({"do": what} | about, timeout_s)


class Wanted(NamedTuple):
    """An engine to start."""

    connector: Mapping[str, Any] | None = None
    """vLLM's kv-transfer-config."""
    core: int = 0
    """Which of this process's cores, counted around."""
    room_tokens: int = 16_384
    """Of the engine's own KV."""
    path: tuple[Path, ...] = ()
    """Folders of further packages."""


@contextmanager
def engines(model: Path, wanted: Iterable[Wanted]) -> Iterator[list[Engine]]:
    """Started side by side; ready when this enters."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_process(model, each, cores[each.core % len(cores)])) for each in wanted
        ]
        for process in processes:
            process.wait_ready(START_TIMEOUT_S)
        yield [Engine(process) for process in processes]


def _process(model: Path, wanted: Wanted, core: int) -> LineProcess:
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max-model-len": CONTEXT_TOKENS,
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": wanted.room_tokens * KV_BYTES_PER_TOKEN,
        "enforce-eager": True,
        "distributed-executor-backend": "uni",
    }
    if wanted.connector is not None:
        arguments["kv-transfer-config"] = dict(wanted.connector)
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine_process",
        str(model),
        str(core),
        json.dumps(arguments),
    ]
    path = python_path(*wanted.path)
    return LineProcess(command, ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(core), "PYTHONPATH": path})


def manta_connector(
    socket: str, name: str, model: Path, report: Path, load_when: str = "always"
) -> dict[str, Any]:
    """`report`: where the engine writes its identity, for `prompt_keys`."""
    from workers.vllm.identity import weights_of
    from workers.vllm.transfer_config import transfer_config

    settings = {
        "socket": socket,
        "engine": name,
        "model": weights_of(str(model), None),
        "chunk_tokens": CHUNK_TOKENS,
        "share": "on",
        "load_when": load_when,
        "report": str(report),
    }
    return transfer_config({}, settings)


def engine_digest(report: Path) -> bytes:
    """Of an engine's identity. Raises RuntimeError for one that shares no KV."""
    from workers.vllm.connector.engine_report import read_report

    found = read_report(report)
    if found is None or not found.sharing:
        raise RuntimeError(f"the engine shares no KV: {found.reason if found else 'no report'}")
    return bytes.fromhex(found.identity)


def prompt_keys(report: Path, prompt: Sequence[int]) -> list[ChunkKey]:
    """Under which an engine's KV of a prompt is in the store."""
    return chunk_keys(namespace(engine_digest(report)), list(prompt), CHUNK_TOKENS)


def new_prompt(tokens: int, draw: random.Random) -> list[int]:
    return draw.choices(VOCABULARY, k=tokens)
