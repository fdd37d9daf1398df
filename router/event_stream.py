"""Following one holder's event stream: what it holds goes into the index, for as long as the stream is wanted.

When a stream breaks, the holder's chunks leave the index at once, and it is opened again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import aiohttp

from cache_store.event_endpoint import EVENTS_PATH, SECRET_HEADER, SNAPSHOT_PATH
from cache_store.events import FrameReader, Hello, Load, Message, ProtocolError
from cache_store.stream import Apply, Follower, LoadReport, NeedSnapshot, Replace
from router.index import PrefixIndex

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S = 0.05
_RECONNECT_MOST_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 30.0


class Session:
    """HTTP to replicas and cache actors, with the cluster's secret. Made inside the loop, on first use."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    def request(
        self,
        method: str,
        address: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={SECRET_HEADER: self._secret}, connector=aiohttp.TCPConnector(limit=0)
            )
        url = f"http://{address}{path}"
        return self._session.request(method, url, timeout=timeout, headers=headers, data=data)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class EventStream:
    """One holder's stream. Call order: `open`, `close`; `reopen` any time between."""

    def __init__(
        self,
        holder: str,
        address: str,
        index: PrefixIndex,
        session: Session,
        silence_s: Callable[[], float],
        *,
        on_heard: Callable[[], None],
        on_load: Callable[[Load, bool], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`silence_s`: a stream that brings nothing for so long is opened anew. `on_heard` follows every piece of the
        stream, `on_load` every load report, with whether it is the stream's first, `on_lost` the end of a stream that
        had brought one."""
        self.holder = holder
        self.address = address
        self.hello: Hello | None = None
        self.snapshots = 0
        """Snapshots taken because deltas were lost."""
        self.connected = False
        """Whether this stream, since it was last opened, has brought the holder's state."""
        self._index = index
        self._session = session
        self._silence_s = silence_s
        self._on_heard, self._on_load, self._on_lost = on_heard, on_load, on_lost
        self._follower = Follower()
        self.task: asyncio.Task[None] | None = None

    def open(self, after_s: float = 0.0) -> None:
        self.task = asyncio.create_task(self._follow(after_s))

    def reopen(self, after_s: float = 0.0) -> None:
        """Give the stream up and start anew: what comes first is a snapshot, which makes the index exact again."""
        if self.task is not None:
            self.task.cancel()
        self._lost()
        self.open(after_s)

    def close(self) -> asyncio.Task[None] | None:
        """The holder is no longer wanted: it leaves the index. Returns what ends soon, to be awaited."""
        if self.task is not None:
            self.task.cancel()
        self._index.drop(self.holder)
        return self.task

    async def _follow(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        pause = RECONNECT_FIRST_S
        while True:
            odd = True
            try:
                await self._read()
                odd = False
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                odd = False
                logger.info("event stream of %s: %s", self.holder, str(error) or type(error).__name__)
            except ProtocolError as error:
                logger.warning("event stream of %s is not understood: %s", self.holder, error)
            except Exception:
                logger.exception("event stream of %s can't be followed", self.holder)
            # What was odd will be again: it must not be tried 20 times a second.
            fresh = self.connected and not odd
            pause = RECONNECT_FIRST_S if fresh else min(2 * pause, _RECONNECT_MOST_S)
            self._lost()
            await asyncio.sleep(pause)

    def _lost(self) -> None:
        # A stream may break before its load report; what it brought by then leaves the index too.
        self._index.drop(self.holder)
        if self.connected:
            self.connected = False
            self._on_lost()

    async def _read(self) -> None:
        self._follower = Follower()
        reader = FrameReader()
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._silence_s()
        )
        async with self._session.request("GET", self.address, EVENTS_PATH, timeout) as answer:
            answer.raise_for_status()
            async for data in answer.content.iter_any():
                for message in reader.feed(data):
                    await self._take(message)
                self._on_heard()

    async def _take(self, message: Message) -> None:
        if isinstance(message, Hello):
            # Ports are used again: what listens there now may be another holder.
            if message.holder != self.holder:
                raise ProtocolError(f"{self.address} is {message.holder} now")
            self.hello = message
        needs_snapshot = self._apply(message)
        while needs_snapshot:
            self.snapshots += 1
            needs_snapshot = await self._repair()

    async def _repair(self) -> bool:
        """Take a snapshot because deltas were lost. Returns whether another one is needed."""
        needs_snapshot = False
        timeout = aiohttp.ClientTimeout(total=_SNAPSHOT_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        async with self._session.request("GET", self.address, SNAPSHOT_PATH, timeout) as answer:
            answer.raise_for_status()
            for repair in FrameReader().feed(await answer.read()):
                if not isinstance(repair, Hello):
                    needs_snapshot |= self._apply(repair)
                elif repair != self.hello:
                    raise ProtocolError(f"the snapshot is of another life of {repair.holder}")
        return needs_snapshot

    def _apply(self, message: Message) -> bool:
        """Returns whether a snapshot is needed."""
        needs_snapshot = False
        for update in self._follower.feed(message):
            match update:
                case Replace(tier, keys):
                    self._index.replace(self.holder, tier, keys)
                case Apply(tier, added, removed, cleared):
                    self._index.apply(self.holder, tier, added, removed, cleared)
                case NeedSnapshot():
                    needs_snapshot = True
                case LoadReport(load):
                    first, self.connected = not self.connected, True
                    self._on_load(load, first)
        return needs_snapshot
