"""Time to the first token of a prompt that another engine has computed, by where its KV is, beside LMCache."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks import lmcache_peer, peers
from benchmarks.engines import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    Answer,
    Engine,
    Wanted,
    engine_digest,
    engines,
    manta_connector,
    new_prompt,
    prompt_keys,
)
from benchmarks.harness import Report, interleaved, paired_ratio
from benchmarks.scheduler_calls import calls_figure
from benchmarks.store_nodes import CacheNode, cache_nodes, key_of, save, wait_until
from benchmarks.store_workload import payload
from cache_store.chunk_path import part_path
from cache_store.events import ChunkKey

PROMPT_TOKENS = 1568
ROUNDS_PER_PROMPT = 3
LIMITS = {"dram": 1.5, "peer": 2.5, "disk": 3.0}
"""Times the TTFT of a local prefix hit."""
WHERE = {"dram": "memory of its node", "peer": "memory of another node", "disk": "disk of its node"}
FRONT_MIB, BACK_MIB = 128, 512


def ttft_figures(report: Report, model: Path, prompts: int, on_round: Callable[[str], None]) -> None:
    draw = random.Random(5)
    found: dict[str, list[float]] = {}
    cold: list[float] = []
    with ExitStack() as stack:
        on_round("starting the engines")
        manta, theirs = stack.enter_context(systems(model))
        for number in range(prompts):
            prompt = new_prompt(PROMPT_TOKENS, draw)
            on_round(f"prompt {number + 1} of {prompts}, computed")
            cold.append(manta.compute(prompt))
            ways = {name: partial(way, prompt) for name, way in manta.ways.items()}
            if theirs is not None:
                theirs.compute(prompt)
                ways["lmcache"] = partial(theirs.loaded, prompt)
            samples = interleaved(
                ways,
                ROUNDS_PER_PROMPT,
                lambda turn, way: on_round(f"{way}, {turn + 1} of {ROUNDS_PER_PROMPT}"),
            )
            for name, values in samples.items():
                found.setdefault(name, []).extend(values)
        calls_figure(report, "prompts loaded", [manta.reader, manta.writer])
    figures(report, found, cold)


def figures(report: Report, found: dict[str, list[float]], cold: Sequence[float]) -> None:
    """`found`: TTFTs by way, which pair."""
    local, name = found["local"], f"TTFT of {PROMPT_TOKENS} tokens"
    report.add(f"{name}, local prefix hit", _ms(local), "ms", f"computed: {_ms(cold):,.0f} ms")
    for tier, limit in LIMITS.items():
        ratio = paired_ratio(found[tier], local)
        against = (
            f"local prefix hit: {ratio.mean:.2f} x that, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        )
        figure = f"{name} computed by another engine, from the {WHERE[tier]}"
        report.add(figure, _ms(found[tier]), "ms", against, f"< {limit:g} x", ratio.below(limit))
    figure, target = f"{name} computed by another engine, same node, beside LMCache", "< 1 x"
    theirs = found.get("lmcache")
    if theirs is None:
        report.skipped(figure, "x", f"{lmcache_peer.NAME}: {peers.INSTALL}", target)
        return
    ratio = paired_ratio(found["dram"], theirs)
    against = f"{lmcache_peer.NAME}: {_ms(theirs):.3g} ms; 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    report.add(figure, ratio.mean, "x", against, target, ratio.below(1.0))


def _ms(seconds: Sequence[float]) -> float:
    return statistics.fmean(seconds) * 1e3


@contextmanager
def systems(model: Path) -> Iterator[tuple[Manta, LMCache | None]]:
    """Two engines each: of one core each, the first writes and the second reads."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-")))
        front = {
            "share": "on",
            "dram": {"mib": FRONT_MIB, "eviction": "lru"},
            "disk": {"path": str(folder / "disk"), "mib": 2048},
        }
        front_node, back_node = stack.enter_context(
            cache_nodes([front, {"share": "on", "dram": {"mib": BACK_MIB}}], object_store_mib=640)
        )
        report = folder / "report.json"
        wanted = [
            Wanted(manta_connector(node.info.socket, name, model, report), core)
            for core, (name, node) in enumerate((("writer", back_node), ("reader", front_node)))
        ]
        packages = lmcache_peer.folder()
        if packages is not None:
            connector = stack.enter_context(lmcache_peer.server())
            wanted += [Wanted(connector, core, path=(packages,)) for core in (0, 1)]
        started = stack.enter_context(engines(model, wanted))
        theirs = LMCache(*started[2:]) if packages is not None else None
        yield Manta(started[0], started[1], front_node, back_node, folder / "disk", report), theirs


class Manta:
    """Two engines on two nodes. A way to get a prompt's KV brings it to where that way begins, whatever was before."""

    def __init__(
        self, writer: Engine, reader: Engine, front: CacheNode, back: CacheNode, disk: Path, report: Path
    ) -> None:
        """The reader is on the front node, whose disk tier is in `disk`; the writer on the back node."""
        self.writer = writer
        self.reader = reader
        self._front = front
        self._back = back
        self._disk = disk
        self._report = report
        self._fillers = 0
        self.ways: dict[str, Callable[[Sequence[int]], float]] = {
            "local": self.local,
            "dram": self.from_dram,
            "peer": self.from_peer,
            "disk": self.from_disk,
        }

    def compute(self, prompt: Sequence[int]) -> float:
        """TTFT of the writer; its node has the chunks when this returns."""
        answer = self.writer.run(prompt)
        assert not answer.cached, "the prompt is not new"
        self._back.wait_for(self._keys(prompt), "dram")
        return answer.ttft_s

    def local(self, prompt: Sequence[int]) -> float:
        self._bring(prompt)
        return self._hit(prompt, {})

    def from_dram(self, prompt: Sequence[int]) -> float:
        self._bring(prompt)
        self.reader.forget()
        return self._hit(prompt, {"dram": _shared(prompt)})

    def from_peer(self, prompt: Sequence[int]) -> float:
        self.reader.forget()
        self._front.wait_quiet()
        self._front.evict(self._keys(prompt))
        return self._hit(prompt, {"peer": _shared(prompt)})

    def from_disk(self, prompt: Sequence[int]) -> float:
        """The system has no copy of the files in memory either."""
        self._bring(prompt)
        keys = self._keys(prompt)
        self._write(keys)
        self._push_out(keys)
        for key in keys:
            _drop_from_memory(self._disk / str(part_path(self._identity, key, 0)))
        self.reader.forget()
        return self._hit(prompt, {"disk": _shared(prompt)})

    def _hit(self, prompt: Sequence[int], loaded: dict[str, int]) -> float:
        """TTFT, once it is sure that the KV came from where it should."""
        before = self.reader.loaded_tokens()
        answer = self._run(prompt)
        assert answer.cached == _shared(prompt), f"{answer.cached} tokens were not computed"
        expected = {tier: before.get(tier, 0) + tokens for tier, tokens in loaded.items()}
        wait_until(
            lambda: self.reader.loaded_tokens() == before | expected,
            f"tokens loaded: {loaded}, beginning with {before}; now {self.reader.loaded_tokens()}",
        )
        return answer.ttft_s

    def _run(self, prompt: Sequence[int]) -> Answer:
        source = [self._back.id, 0, len(prompt) // CHUNK_TOKENS]
        return self.reader.run(prompt, params={"manta": {"sources": [source]}})

    def _bring(self, prompt: Sequence[int]) -> None:
        """To the reader and to its node's memory."""
        keys = self._keys(prompt)
        if not all("dram" in tiers for tiers in self._front.where(keys)):
            self.reader.forget()
        self._run(prompt)
        self._front.wait_for(keys, "dram")

    def _write(self, keys: Sequence[ChunkKey]) -> None:
        """To disk, which takes what was asked for again."""
        with self._front.client(0, 0, self._identity) as client:

            def written() -> bool:
                found = client.lookup(b"".join(keys), 1, limit_s=10.0).result(10.0)
                client.release(found.lease)
                return all("disk" in tiers for tiers in self._front.where(keys))

            wait_until(written, f"{len(keys)} chunks on disk")
        self._front.wait_quiet()

    def _push_out(self, keys: Sequence[ChunkKey]) -> None:
        """Of memory, by others that are used later."""
        filler = payload(0, CHUNK_BYTES)
        with self._front.client(2, CHUNK_BYTES) as client:
            for _ in range((FRONT_MIB << 20) // CHUNK_BYTES + 1):
                self._fillers += 1
                save(client, key_of(self._fillers), filler)
        wait_until(
            lambda: all(tiers == ("disk",) for tiers in self._front.where(keys)),
            f"{len(keys)} chunks on disk alone",
        )

    def _keys(self, prompt: Sequence[int]) -> list[ChunkKey]:
        return prompt_keys(self._report, prompt)

    @property
    def _identity(self) -> bytes:
        return engine_digest(self._report)


class LMCache:
    """Two engines with one server."""

    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._writer = writer
        self._reader = reader

    def compute(self, prompt: Sequence[int]) -> float:
        """TTFT of the writer; the server has the chunks when this returns."""
        answer = self._writer.run(prompt)
        assert not answer.cached, "the prompt is not new"

        def there() -> bool:
            self._reader.forget()
            return self._reader.run(prompt).cached == _shared(prompt)

        wait_until(there, f"{lmcache_peer.NAME} with the prompt's KV")
        return answer.ttft_s

    def loaded(self, prompt: Sequence[int]) -> float:
        self._reader.forget()
        answer = self._reader.run(prompt)
        assert answer.cached == _shared(prompt), f"{answer.cached} tokens came from {lmcache_peer.NAME}"
        return answer.ttft_s


def _shared(prompt: Sequence[int]) -> int:
    """Tokens in whole chunks: as many as the engine's own blocks hold of these prompts."""
    return len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS


def _drop_from_memory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
