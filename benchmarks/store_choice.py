"""A case in which loading loses to computing: a short prompt, and a tier slower than the engine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engines import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    Engine,
    Wanted,
    engine_digest,
    engines,
    manta_connector,
    new_prompt,
    prompt_keys,
)
from benchmarks.harness import Report, interval
from benchmarks.slow_tier import SlowStore, slow_store
from cache_store.chunk import verify
from cache_store.client import StoreClient
from cache_store.events import ChunkKey
from cache_store.wire import WIRE_VERSION, Register

PROMPT_TOKENS = CHUNK_TOKENS + 44
BYTES_PER_S = 2e6
"""A chunk takes three seconds, and computing it less than one."""
MEASURED = 2
"""Prompts that are loaded, after which the store knows how slow it is."""
ASKED = 6
"""Prompts that are asked again after that."""
LIMIT_S = 60.0


def choice_figures(report: Report, model: Path, on_round: Callable[[str], None]) -> None:
    draw = random.Random(11)
    with slow_store(BYTES_PER_S) as store:
        identity = store.socket.parent.parent / "report.json"
        connector = manta_connector(str(store.socket), "manta", model, identity, "faster")
        on_round("starting the engine")
        with engines(model, [Wanted(connector, 1)]) as (engine,):
            on_round("computing the prompts")
            given = [new_prompt(PROMPT_TOKENS, draw) for _ in range(MEASURED + ASKED)]
            computed = [engine.run(prompt).ttft_s for prompt in given]
            forget(store, engine, len(given))
            on_round("loading some of them")
            loaded = [load_s(store, identity, prompt) for prompt in given[:MEASURED]]
            on_round("asking again for the others")
            again = [engine.run(prompt) for prompt in given[MEASURED:]]
            tokens = engine.loaded_tokens()
    figures(report, loaded, [answer.ttft_s for answer in again], computed, sum(tokens.values()))


def figures(
    report: Report, loaded: Sequence[float], again: Sequence[float], computed: Sequence[float], tokens: int
) -> None:
    name = f"{CHUNK_TOKENS} of {PROMPT_TOKENS} tokens on a tier of {BYTES_PER_S / 1e6:g} MB/s"
    took = interval(again)
    report.add(
        f"{name}: TTFT", took.mean * 1e3, "ms",
        f"loading alone: {statistics.fmean(loaded) * 1e3:,.0f} ms; computed the first time: "
        f"{statistics.fmean(computed) * 1e3:,.0f} ms",
        "< loading", took.below(min(loaded)),
    )  # fmt: skip
    report.add(f"{name}: tokens loaded", tokens, "tokens", "loading loses", "0", tokens == 0)


def forget(store: SlowStore, engine: Engine, chunks: int) -> None:
    """All that is known is on the slow tier."""
    engine.forget()
    deadline = time.monotonic() + LIMIT_S
    while (there := store.leave_on_slow_tier()) < chunks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{there} of {chunks} chunks were written")
        time.sleep(0.1)


def load_s(store: SlowStore, identity: Path, prompt: Sequence[int]) -> float:
    """Seconds until the prompt's one chunk is verified in shared memory."""
    digest = engine_digest(identity)
    (key,) = prompt_keys(identity, prompt)
    register = Register(WIRE_VERSION, "bench", digest, rank=0, world_size=1, slots=1, slot_bytes=CHUNK_BYTES)
    client = StoreClient(store.socket, register)
    try:
        if not client.wait_alive(LIMIT_S):
            raise TimeoutError("no connection to the slow store")
        return _loaded(client, digest, key)
    finally:
        client.close()


def _loaded(client: StoreClient, digest: bytes, key: ChunkKey) -> float:
    slot = client.take_slot()
    assert slot is not None
    began = time.perf_counter()
    loaded = client.load(key, slot, LIMIT_S).result(LIMIT_S)
    if loaded.header is None:
        raise RuntimeError(f"a chunk did not come: {loaded.outcome}")
    with slot.view[: loaded.header.nbytes] as view:
        verify(loaded.header, view, key=key, identity=digest, rank=0, world_size=1)
    seconds = time.perf_counter() - began
    slot.release()
    return seconds
