"""Who serves: the replicas that Serve names, and what each of them says on its event stream.

Serve says which replicas exist (`update`); a stream says whether one is alive, what it holds and how busy it is. A
replica counts as live while its stream is open and heard. When the stream breaks, its chunks leave the index at once,
and the directory tries to connect again for as long as Serve names the replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from cache_store.events import Hello, Load
from router.event_stream import RECONNECT_FIRST_S, EventStream, Session
from router.index import PrefixIndex
from router.ledger import Ledger
from router.others_load import NO_OTHERS, OthersLoad
from router.recent import RecentPrefixes
from workers.messages import ReplicaInfo

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""A router that starts waits no longer for what the replicas hold."""


@dataclass
class ReplicaEntry:
    """What this router knows of one replica."""

    info: ReplicaInfo
    stream: EventStream
    load: Load | None = None
    others: OthersLoad = NO_OTHERS
    """The part of `load` that is not this router's; that part stands in its ledger."""
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
        recent: RecentPrefixes,
        secret: str,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._recent = recent
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._clock = clock
        self._entries: dict[str, ReplicaEntry] = {}
        self._session = Session(secret)
        self.settled = asyncio.Event()
        """Set once what the replicas hold that Serve named first is known, or was waited for long enough. A router
        that decided before would compute what is there."""
        self.unheard = 0
        """Replicas for which it was not waited longer."""
        self.version = 0
        """Counts what makes other replicas ready: those that come, go, drain, or are heard again. Silence does not."""
        self._complete = False
        self._settling: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[ReplicaEntry]:
        return iter(self._entries.values())

    def get(self, replica: str) -> ReplicaEntry | None:
        return self._entries.get(replica)

    def set_heartbeat_timeout(self, seconds: float) -> None:
        self._heartbeat_timeout_s = seconds

    def state(self, entry: ReplicaEntry) -> str:
        return entry.state(self._clock(), self._heartbeat_timeout_s)

    def ready(self) -> list[ReplicaEntry]:
        """Replicas that may get new requests; none before the directory has settled."""
        if not self.settled.is_set():
            return []
        now = self._clock()
        return [e for e in self._entries.values() if e.state(now, self._heartbeat_timeout_s) == "ready"]

    def reachable(self) -> list[ReplicaEntry]:
        """Replicas that are ready, or drain and can still be asked for what they hold."""
        return [e for e in self._entries.values() if self.state(e) in ("ready", "draining") and e.connected]

    def update(self, infos: Sequence[ReplicaInfo], complete: bool = True) -> None:
        """Take over the set of replicas that exist, from Serve. Not `complete`: more will be named at once."""
        named = {info.id: info for info in infos}
        for replica in [r for r, e in self._entries.items() if named.get(r) != e.info]:
            self._remove(replica)
        for replica, info in named.items():
            if replica not in self._entries:
                self._entries[replica] = self._entry(info)
                self._entries[replica].stream.open()
        self._complete = complete
        self._settle_when_known()
        self._changed()

    def _settle_when_known(self) -> None:
        if self.settled.is_set() or not self._entries:
            return
        if self._complete and all(entry.connected for entry in self._entries.values()):
            self._settle()
        elif self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        missing = [replica for replica, entry in self._entries.items() if not entry.connected]
        self.unheard = len(missing)
        if missing:
            logger.warning("deciding without knowing what %s hold: not heard within %g s", missing, SETTLE_S)
        self.settled.set()
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._on_change()

    def _entry(self, info: ReplicaInfo) -> ReplicaEntry:
        # The stream's callbacks know their entry, which needs the stream.
        def heard() -> None:
            entry.heard_at = self._clock()

        stream = EventStream(
            info.id, info.address, self._index, self._session, lambda: 2 * self._heartbeat_timeout_s,
            on_heard=heard, on_load=lambda load, first: self._take_load(entry, load, first), on_lost=self._changed,
        )  # fmt: skip
        entry = ReplicaEntry(info, stream)
        return entry

    def _take_load(self, entry: ReplicaEntry, load: Load, first: bool) -> None:
        before = entry.load if not first and self.state(entry) == "ready" else None
        own = load.share(self._ledger.router)
        self._ledger.reported(entry.info.id, own)
        entry.load, entry.others = load, OthersLoad.of(load, own)
        entry.heard_at = self._clock()
        if first:
            # A new stream, and perhaps a new life of the replica.
            self._recent.forget(entry.info.id)
            self._settle_when_known()
        self._recent.reported(entry.info.id)
        # Requests wait for a replica to come, or for one to have fewer of them, be they of other routers.
        if before is None or load.draining:
            self._changed()
        elif load.http_requests < before.http_requests:
            self._on_change()

    def suspect(self, replica: str) -> None:
        """A request could not reach the replica: nothing new goes there until it is heard again."""
        entry = self._entries.get(replica)
        if entry is not None and entry.connected:
            # The stream may still be open; a new one starts with a snapshot.
            entry.stream.reopen(RECONNECT_FIRST_S)

    async def close(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        tasks = [self._remove(replica) for replica in list(self._entries)]
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        await self._session.close()

    def _remove(self, replica: str) -> asyncio.Task[None] | None:
        task = self._entries.pop(replica).stream.close()
        self._ledger.forget(replica)
        self._recent.forget(replica)
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
