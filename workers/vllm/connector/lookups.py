"""Hashing and asking, away from the scheduler's thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from cache_store.events import ChunkKey
from cache_store.wire import Found, Source
from workers.prompt_keys import KeyChain
from workers.vllm.connector.metadata import RequestId
from workers.vllm.connector.request_state import LookupWanted
from workers.vllm.connector.store import LookupStore

logger = logging.getLogger(__name__)

_CHUNKS_AT_ONCE = 16
"""Between pieces of this size the scheduler gets the interpreter."""


class Keys(NamedTuple):
    """The next keys of a request; None when its tokens can't be hashed."""

    request: RequestId
    namespace: bytes
    keys: list[ChunkKey] | None


class Answer(NamedTuple):
    """To a look-up; `found` is None when the store could not be asked."""

    request: RequestId
    serial: int
    found: Found | None


class Lookups:
    """A thread that computes chunk keys and asks the store for them, in the order it is told.

    All methods but `close` return at once and may be called from one thread only. `results` fills from other threads:
    whatever is taken from its left end has happened in that order, keys before the look-ups that need them.
    """

    def __init__(self, store: LookupStore, workers: int, limit_s: float = 1.0) -> None:
        self.results: deque[Keys | Answer] = deque()
        self._store = store
        self._workers = workers
        self._limit_s = limit_s
        self._chains: dict[RequestId, KeyChain] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="manta-lookups", daemon=True)
        self._thread.start()

    def begin(self, request: RequestId, make_chain: Callable[[], KeyChain]) -> None:
        self._jobs.put(lambda: self._begin(request, make_chain))

    def hash(self, request: RequestId, tokens: Sequence[int], first: int, end: int) -> None:
        """The next keys, of `tokens[first:end]`. Nothing may change `tokens` there until the keys have come."""
        self._jobs.put(lambda: self._hash(request, tokens, first, end))

    def ask(self, wanted: LookupWanted) -> None:
        self._jobs.put(lambda: self._ask(wanted))

    def release(self, lease: int) -> None:
        self._jobs.put(lambda: self._store.release(lease))

    def forget(self, request: RequestId) -> None:
        self._jobs.put(lambda: self._forget(request))

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a look-up of chunks failed")

    def _begin(self, request: RequestId, make_chain: Callable[[], KeyChain]) -> None:
        self._chains[request] = make_chain()

    def _hash(self, request: RequestId, tokens: Sequence[int], first: int, end: int) -> None:
        chain = self._chains.get(request)
        if chain is None:
            return
        step = chain.chunk_tokens * _CHUNKS_AT_ONCE
        keys: list[ChunkKey] = []
        try:
            for start in range(first, end, step):
                keys += chain.extend(tokens[start : min(start + step, end)])
        except (ValueError, TypeError) as error:
            logger.warning("request %s can't be shared: %s", request, error)
            self.results.append(Keys(request, chain.namespace, None))
        else:
            self.results.append(Keys(request, chain.namespace, keys))

    def _ask(self, wanted: LookupWanted) -> None:
        chain = self._chains.get(wanted.request)
        if chain is None or len(chain.keys) < wanted.end:
            self.results.append(Answer(wanted.request, wanted.serial, None))
            return
        keys = b"".join(chain.keys[wanted.first : wanted.end])
        try:
            sources = behind(wanted.sources, wanted.first)
            future = self._store.lookup(keys, self._workers, sources, limit_s=self._limit_s)
        except Exception:
            self.results.append(Answer(wanted.request, wanted.serial, None))
            raise
        future.add_done_callback(lambda done: self._jobs.put(lambda: self._answered(wanted, done)))

    def _answered(self, wanted: LookupWanted, future: Future[Found]) -> None:
        found = future.result() if future.exception() is None else None
        if wanted.request in self._chains:
            self.results.append(Answer(wanted.request, wanted.serial, found))
        elif found is not None and found.lease:
            # Nobody may look at the results for long: the engine may be idle.
            self._store.release(found.lease)

    def _forget(self, request: RequestId) -> None:
        self._chains.pop(request, None)


def behind(sources: Iterable[Source], first: int) -> tuple[Source, ...]:
    """Sources counted from chunk number `first` of the prompt on, where a look-up's keys begin."""
    shifted = []
    for source in sources:
        start = max(source.first, first)
        count = source.first + source.count - start
        if count > 0:
            shifted.append(Source(source.node, start - first, count))
    return tuple(shifted)
