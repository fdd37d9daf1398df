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
from dataclasses import dataclass, field

import aiohttp

from cache_store.events import FrameReader, Hello, Load, Message, ProtocolError
from cache_store.stream import Apply, Follower, LoadReport, NeedSnapshot, Replace
from router.index import PrefixIndex
from router.ledger import Ledger, OwnLoad
from workers.messages import EVENTS_PATH, SECRET_HEADER, SNAPSHOT_PATH, ReplicaInfo

logger = logging.getLogger(__name__)

_RECONNECT_FIRST_S = 0.05
_RECONNECT_MOST_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 30.0


@dataclass
class ReplicaEntry:
    """What this router knows of one replica."""

    info: ReplicaInfo
    follower: Follower = field(default_factory=Follower)
    hello: Hello | None = None
    load: Load | None = None
    own_at_load: OwnLoad = field(default_factory=OwnLoad)
    """What this router had open there when `load` came."""
    heard_at: float = 0.0
    connected: bool = False
    task: asyncio.Task[None] | None = None
    snapshots: int = 0
    """Snapshots taken because deltas were lost."""

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
        self._secret = secret
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._clock = clock
        self._entries: dict[str, ReplicaEntry] = {}
        self._session: aiohttp.ClientSession | None = None

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

    def update(self, infos: Sequence[ReplicaInfo]) -> None:
        """Take over the set of replicas that exist, from Serve."""
        named = {info.id: info for info in infos}
        for replica in [r for r, e in self._entries.items() if named.get(r) != e.info]:
            self._remove(replica)
        for replica, info in named.items():
            if replica not in self._entries:
                entry = ReplicaEntry(info)
                self._entries[replica] = entry
                entry.task = asyncio.create_task(self._follow(entry))
        self._on_change()

    def suspect(self, replica: str) -> None:
        """A request could not reach the replica: nothing new goes there until it is heard again."""
        entry = self._entries.get(replica)
        if entry is not None and entry.connected:
            # The stream may still be open. A new one starts with a snapshot, which is what makes the index exact again.
            if entry.task is not None:
                entry.task.cancel()
            self._disconnected(entry)
            entry.task = asyncio.create_task(self._follow(entry, _RECONNECT_FIRST_S))

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for replica in list(self._entries):
            self._remove(replica)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _remove(self, replica: str) -> None:
        entry = self._entries.pop(replica)
        if entry.task is not None:
            entry.task.cancel()
        self._index.drop(replica)
        self._ledger.forget(replica)

    async def _follow(self, entry: ReplicaEntry, after_s: float = 0.0) -> None:
        """Keep the replica's stream open, until cancelled."""
        await asyncio.sleep(after_s)
        pause = _RECONNECT_FIRST_S
        while True:
            odd = True
            try:
                await self._read_stream(entry)
                odd = False
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                odd = False
                logger.info("event stream of %s: %s", entry.info.id, error or type(error).__name__)
            except ProtocolError as error:
                logger.warning("event stream of %s is not understood: %s", entry.info.id, error)
            except Exception:
                logger.exception("event stream of %s can't be followed", entry.info.id)
            # What was odd will be again: it must not be tried 20 times a second.
            fresh = entry.connected and not odd
            pause = _RECONNECT_FIRST_S if fresh else min(2 * pause, _RECONNECT_MOST_S)
            self._disconnected(entry)
            await asyncio.sleep(pause)

    def _disconnected(self, entry: ReplicaEntry) -> None:
        # A stream may break before its load report, which is what makes a replica count as connected.
        self._index.drop(entry.info.id)
        if entry.connected:
            entry.connected = False
            self._on_change()

    async def _read_stream(self, entry: ReplicaEntry) -> None:
        entry.follower = Follower()
        reader = FrameReader()
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=2 * self._heartbeat_timeout_s
        )
        async with self.ask(entry, EVENTS_PATH, timeout) as answer:
            answer.raise_for_status()
            async for data in answer.content.iter_any():
                for message in reader.feed(data):
                    await self._take(entry, message)
                entry.heard_at = self._clock()

    async def _take(self, entry: ReplicaEntry, message: Message) -> None:
        if isinstance(message, Hello):
            # Ports are used again: what listens there now may be another replica.
            if message.holder != entry.info.id:
                raise ProtocolError(f"{entry.info.address} is {message.holder} now")
            entry.hello = message
        needs_snapshot = self._apply(entry, message)
        while needs_snapshot:
            entry.snapshots += 1
            needs_snapshot = await self._repair(entry)

    async def _repair(self, entry: ReplicaEntry) -> bool:
        """Take a snapshot because deltas were lost. Returns whether another one is needed."""
        needs_snapshot = False
        timeout = aiohttp.ClientTimeout(total=_SNAPSHOT_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        async with self.ask(entry, SNAPSHOT_PATH, timeout) as answer:
            answer.raise_for_status()
            for repair in FrameReader().feed(await answer.read()):
                if not isinstance(repair, Hello):
                    needs_snapshot |= self._apply(entry, repair)
                elif repair != entry.hello:
                    raise ProtocolError(f"the snapshot is of another life of {repair.holder}")
        return needs_snapshot

    def _apply(self, entry: ReplicaEntry, message: Message) -> bool:
        """Returns whether a snapshot is needed."""
        holder, needs_snapshot = entry.info.id, False
        for update in entry.follower.feed(message):
            match update:
                case Replace(tier, keys):
                    self._index.replace(holder, tier, keys)
                case Apply(tier, added, removed, cleared):
                    self._index.apply(holder, tier, added, removed, cleared)
                case NeedSnapshot():
                    needs_snapshot = True
                case LoadReport(load):
                    before = entry.load if self.state(entry) == "ready" else None
                    if not load.waiting and not load.prefill_tokens:
                        # What was decided before the report before this one has reached the replica.
                        self._ledger.prefilled(holder, entry.own_at_load.last_chosen)
                    entry.load, entry.own_at_load = load, self._ledger.load(holder)
                    entry.connected, entry.heard_at = True, self._clock()
                    # Requests wait for a replica to come, or for one to have fewer of them, be they of other routers.
                    if before is None or load.draining or load.requests < before.requests:
                        self._on_change()
        return needs_snapshot

    def ask(
        self,
        entry: ReplicaEntry,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.client._RequestContextManager:
        """GET a path of a replica, with the cluster's secret."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={SECRET_HEADER: self._secret}, connector=aiohttp.TCPConnector(limit=0)
            )
        return self._session.get(f"http://{entry.info.address}{path}", timeout=timeout, headers=headers)
