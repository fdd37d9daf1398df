"""Who serves: the replicas that Serve names, and what each of them says on its event stream.

Serve says which replicas exist (`update`); a stream says whether one is alive, what it holds and how busy it is. A
replica counts as live while its stream is open and heard. When the stream breaks, its chunks leave the index at once,
and the directory tries to connect again for as long as Serve names the replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from cache_store.events import Hello, Load
from router.event_stream import RECONNECT_FIRST_S, EventStream, Session
from router.index import PrefixIndex
from router.ledger import Ledger, OwnLoad
from workers.messages import ReplicaInfo


@dataclass
class ReplicaEntry:
    """What this router knows of one replica."""

    info: ReplicaInfo
    stream: EventStream
    load: Load | None = None
    own_at_load: OwnLoad = field(default_factory=OwnLoad)
    """What this router had open there when `load` came."""
    heard_at: float = 0.0

    @property
    def hello(self) -> Hello | None:
        return self.stream.hello

    @property
    def connected(self) -> bool:
        return self.stream.connected

    def state(self, now: float, heartbeat_timeout_s: float) -> str:
        """`starting`, `ready`, `draining` or `lost`."""
        if self.load is not None and self.load.draining:
            return "draining"
        if self.connected and self.load is not None and now - self.heard_at <= heartbeat_timeout_s:
            return "ready"
        return "starting" if self.hello is None else "lost"


class Directory:
    """Replicas by id. All methods belong to one event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        ledger: Ledger,
        secret: str,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._clock = clock
        self._entries: dict[str, ReplicaEntry] = {}
        self._session = Session(secret)

    def __iter__(self) -> Iterator[ReplicaEntry]:
        return iter(self._entries.values())

    def get(self, replica: str) -> ReplicaEntry | None:
        return self._entries.get(replica)

    def set_heartbeat_timeout(self, seconds: float) -> None:
        self._heartbeat_timeout_s = seconds

    def state(self, entry: ReplicaEntry) -> str:
        return entry.state(self._clock(), self._heartbeat_timeout_s)

    def ready(self) -> list[ReplicaEntry]:
        """Replicas that may get new requests."""
        now = self._clock()
        return [e for e in self._entries.values() if e.state(now, self._heartbeat_timeout_s) == "ready"]

    def reachable(self) -> list[ReplicaEntry]:
        """Replicas that are ready, or drain and can still be asked for what they hold."""
        return [e for e in self._entries.values() if self.state(e) in ("ready", "draining") and e.connected]

    def update(self, infos: Sequence[ReplicaInfo]) -> None:
        """Take over the set of replicas that exist, from Serve."""
        named = {info.id: info for info in infos}
        for replica in [r for r, e in self._entries.items() if named.get(r) != e.info]:
            self._remove(replica)
        for replica, info in named.items():
            if replica not in self._entries:
                self._entries[replica] = self._entry(info)
                self._entries[replica].stream.open()
        self._on_change()

    def _entry(self, info: ReplicaInfo) -> ReplicaEntry:
        # The stream's callbacks know their entry, which needs the stream.
        def heard() -> None:
            entry.heard_at = self._clock()

        stream = EventStream(
            info.id, info.address, self._index, self._session, lambda: 2 * self._heartbeat_timeout_s,
            on_heard=heard, on_load=lambda load, first: self._take_load(entry, load, first), on_lost=self._on_change,
        )  # fmt: skip
        entry = ReplicaEntry(info, stream)
        return entry

    def _take_load(self, entry: ReplicaEntry, load: Load, first: bool) -> None:
        replica = entry.info.id
        before = entry.load if not first and self.state(entry) == "ready" else None
        if not load.waiting and not load.prefill_tokens:
            # What was decided before the report before this one has reached the replica.
            self._ledger.prefilled(replica, entry.own_at_load.last_chosen)
        entry.load, entry.own_at_load = load, self._ledger.load(replica)
        entry.heard_at = self._clock()
        # Requests wait for a replica to come, or for one to have fewer of them, be they of other routers.
        if before is None or load.draining or load.requests < before.requests:
            self._on_change()

    def suspect(self, replica: str) -> None:
        """A request could not reach the replica: nothing new goes there until it is heard again."""
        entry = self._entries.get(replica)
        if entry is not None and entry.connected:
            # The stream may still be open; a new one starts with a snapshot.
            entry.stream.reopen(RECONNECT_FIRST_S)

    async def close(self) -> None:
        tasks = [self._remove(replica) for replica in list(self._entries)]
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        await self._session.close()

    def _remove(self, replica: str) -> asyncio.Task[None] | None:
        task = self._entries.pop(replica).stream.close()
        self._ledger.forget(replica)
        return task

    def ask(
        self,
        entry: ReplicaEntry,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
    ) -> aiohttp.client._RequestContextManager:
        """Ask a replica, with the cluster's secret."""
        return self._session.request(method, entry.info.address, path, timeout, headers)
