"""Both ends of the event stream: a holder publishes what it has, a router follows it.

The messages are those of `cache_store.events`; nothing here opens a socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from cache_store.events import (
    PROTOCOL_VERSION,
    ChunkKey,
    Delta,
    Hello,
    Load,
    Message,
    ProtocolError,
    Snapshot,
    Tier,
    encode_frame,
    pack_keys,
    unpack_keys,
)

MAX_BUFFERED_DELTAS = 10_000


class Publisher:
    """A holder's side: what its tiers hold, and the numbered changes of it. Belongs to one event loop."""

    def __init__(
        self,
        *,
        holder: str,
        epoch: int,
        identity: bytes,
        chunk_tokens: int,
        tiers: Sequence[Tier],
        loses: Callable[[], bool] | None = None,
    ) -> None:
        """`epoch` is random per start of the holder; `tiers` are all that it will ever speak of. `loses` is a fault
        switch: asked before a delta goes out, and where it says so no reader gets that one."""
        self.hello = Hello(PROTOCOL_VERSION, holder, epoch, identity, chunk_tokens)
        self.seq = 0
        """Number of the last delta."""
        self._tiers: dict[Tier, set[ChunkKey]] = {tier: set() for tier in tiers}
        self._loses = loses
        self._load: Load | None = None
        self._subscriptions: set[Subscription] = set()

    def keys(self, tier: Tier) -> frozenset[ChunkKey]:
        return frozenset(self._tiers[tier])

    @property
    def subscriptions(self) -> int:
        return len(self._subscriptions)

    def apply(
        self,
        tier: Tier,
        added: Iterable[ChunkKey] = (),
        removed: Iterable[ChunkKey] = (),
        cleared: bool = False,
    ) -> Delta | None:
        """Change a tier: clear, then remove, then add.

        Publishes and returns the next delta, which says only what really changed; None when nothing did.
        """
        held = self._tiers[tier]
        cleared = cleared and bool(held)
        if cleared:
            held.clear()
        wanted = dict.fromkeys(added)
        gone = [key for key in dict.fromkeys(removed) if key in held and key not in wanted]
        new = [key for key in wanted if key not in held]
        if not (new or gone or cleared):
            return None
        held.difference_update(gone)
        held.update(new)
        self.seq += 1
        delta = Delta(self.seq, tier, pack_keys(new), pack_keys(gone), cleared)
        if self._loses is None or not self._loses():
            self._publish(delta)
        return delta

    def report(self, load: Load) -> None:
        """Publish a load report; a new subscription starts with the last one.

        It carries the number of the last delta, so that a reader notices a lost one also when no other follows.
        """
        self._load = msgspec.structs.replace(load, seq=self.seq)
        self._publish(self._load)

    def snapshot(self) -> list[Snapshot]:
        """One per tier, all as of the last delta."""
        return [Snapshot(self.seq, tier, pack_keys(keys)) for tier, keys in self._tiers.items()]

    def subscribe(self, max_bytes: int) -> Subscription:
        """A stream from now on. `max_bytes` bounds the frames that wait to be read, but for the opening."""
        subscription = Subscription(self, max_bytes)
        self._subscriptions.add(subscription)
        return subscription

    def state(self) -> list[Message]:
        """Snapshots and the last load report: all that a reader has to know, but for the Hello."""
        return [*self.snapshot(), *([self._load] if self._load is not None else [])]

    def forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def _publish(self, message: Message) -> None:
        if self._subscriptions:
            frame = encode_frame(message)
            for subscription in self._subscriptions:
                subscription.offer(frame)


class Subscription:
    """One reader's frames: Hello and the state first, then what is published.

    A reader that does not keep up loses frames: they are dropped until it has read what waits for it, and the
    stream goes on with the state as it then is. The numbers of its snapshots tell the reader that deltas are
    missing before them, also when the lost delta was the last one for a long time.
    """

    def __init__(self, publisher: Publisher, max_bytes: int) -> None:
        self.lost = 0
        """Frames dropped."""
        self._publisher = publisher
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._opening = 0
        """How many of the frames, from the first on, do not count against the limit."""
        self._bytes = 0
        self._behind = False
        self._closed = False
        self._wake = asyncio.Event()
        self._open([publisher.hello, *publisher.state()])

    def _open(self, messages: Sequence[Message]) -> None:
        self._frames.extend(encode_frame(message) for message in messages)
        self._opening = len(self._frames)

    def offer(self, frame: bytes) -> None:
        """Called by the publisher with every frame."""
        if self._behind or self._bytes + len(frame) > self._max_bytes:
            self._behind = True
            self.lost += 1
        else:
            self._frames.append(frame)
            self._bytes += len(frame)
        self._wake.set()

    def take(self) -> bytes | None:
        """The next frame, or None when there is none now."""
        if not self._frames and self._behind:
            self._behind = False
            self._open(self._publisher.state())
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if self._opening:
            self._opening -= 1
        else:
            self._bytes -= len(frame)
        return frame

    async def frames(self) -> AsyncIterator[bytes]:
        """Frames as they come, until `close`; what then still waits is not given out."""
        while not self._closed:
            frame = self.take()
            if frame is not None:
                yield frame
                continue
            self._wake.clear()
            await self._wake.wait()

    def close(self) -> None:
        """End the stream at once. Safe to call twice."""
        self._closed = True
        self._publisher.forget(self)
        self._frames.clear()
        self._bytes = self._opening = 0
        self._behind = False
        self._wake.set()

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        assert self._bytes == sum(len(frame) for frame in list(self._frames)[self._opening :])
        assert self._bytes <= self._max_bytes
        assert 0 <= self._opening <= len(self._frames)


class Replace(NamedTuple):
    """The tier holds these chunks and no others."""

    tier: Tier
    keys: list[ChunkKey]


class Apply(NamedTuple):
    """Change the tier: clear, then remove, then add."""

    tier: Tier
    added: list[ChunkKey]
    removed: list[ChunkKey]
    cleared: bool


class NeedSnapshot(NamedTuple):
    """Deltas were lost. Get snapshots from the holder and feed them; said once until they have come."""


class LoadReport(NamedTuple):
    load: Load


Update = Replace | Apply | NeedSnapshot | LoadReport


class Follower:
    """A router's side: turns one holder's messages into updates of an index.

    Feed it every message of the stream, across reconnects, and the snapshots that it asks for. As long as the
    numbers follow each other deltas pass through. At a gap every tier is out of date: its deltas wait until a
    snapshot comes that includes what was lost. Those that it includes are dropped, the rest is applied.
    """

    def __init__(self, max_buffered: int = MAX_BUFFERED_DELTAS) -> None:
        """`max_buffered` bounds the deltas that wait for a snapshot; one more, and all of them are lost."""
        self.hello: Hello | None = None
        self.gaps = 0
        """Times that deltas were found missing."""
        self._max_buffered = max_buffered
        self._start()

    def _start(self) -> None:
        self._current: dict[Tier, bool] = {}
        """Tiers known, and whether what was said of them includes everything up to `_last`."""
        self._last = 0
        """No delta up to this number is news any more, except for those in `_waiting`."""
        self._required = 0
        """A snapshot for a tier that is not current must include this delta."""
        self._waiting: list[Delta] = []
        self._asked = False
        self._refused = -1
        """Number of the last snapshot that was too old."""

    @property
    def synced(self) -> bool:
        """Whether the updates so far add up to what the holder had at its last message."""
        return bool(self._current) and all(self._current.values())

    def feed(self, message: Message) -> list[Update]:
        """Raises ProtocolError for a version that is not ours, anything before a Hello, or keys cut short."""
        if isinstance(message, Hello):
            return self._on_hello(message)
        if self.hello is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if isinstance(message, Snapshot):
            return self._on_snapshot(message)
        if isinstance(message, Delta):
            return self._on_delta(message)
        return self._on_load(message)

    def _on_load(self, load: Load) -> list[Update]:
        updates: list[Update] = [LoadReport(load)]
        if load.seq > self._last:
            self.gaps += 1
            self._skip_to(load.seq)
        if load.seq and not self._asked and not self.synced:
            self._asked = True
            updates.append(NeedSnapshot())
        return updates

    def _on_hello(self, hello: Hello) -> list[Update]:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"{hello.holder} speaks version {hello.version}; needed: {PROTOCOL_VERSION}")
        known, before = list(self._current), self.hello
        self.hello = hello
        if before is None or (before.holder, before.epoch) == (hello.holder, hello.epoch):
            return []
        self._start()
        return [Replace(tier, []) for tier in known]

    def _on_snapshot(self, snapshot: Snapshot) -> list[Update]:
        tier, keys = snapshot.tier, unpack_keys(snapshot.keys)
        current = self._current.get(tier, False)
        if snapshot.seq < (self._last if current else self._required):
            return [] if current else self._refuse(snapshot)
        if snapshot.seq > self._last:
            self._skip_to(snapshot.seq)
        self._current[tier] = True
        updates: list[Update] = [Replace(tier, keys)]
        updates += [_apply(d) for d in self._waiting if d.tier == tier and d.seq > snapshot.seq]
        self._waiting = [d for d in self._waiting if d.tier != tier]
        if self.synced:
            self._asked = False
        return updates

    def _refuse(self, snapshot: Snapshot) -> list[Update]:
        self._current.setdefault(snapshot.tier, False)
        if snapshot.seq <= self._refused:
            return []
        self._refused = snapshot.seq
        return [NeedSnapshot()]

    def _on_delta(self, delta: Delta) -> list[Update]:
        update = _apply(delta)
        if delta.seq <= self._last:
            return []
        if delta.seq > self._last + 1:
            self.gaps += 1
            self._skip_to(delta.seq - 1)
        self._last = delta.seq
        updates: list[Update] = []
        if self._current.get(delta.tier):
            updates.append(update)
        elif len(self._waiting) < self._max_buffered:
            self._waiting.append(delta)
        else:
            self._skip_to(delta.seq)
        if not self._asked and (self._waiting or not self.synced):
            self._asked = True
            updates.append(NeedSnapshot())
        return updates

    def _skip_to(self, seq: int) -> None:
        """Deltas up to `seq` are lost, or known only as part of a snapshot of another tier."""
        self._current = dict.fromkeys(self._current, False)
        self._waiting = []
        self._required = self._last = seq

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        numbers = [delta.seq for delta in self._waiting]
        assert numbers == sorted(set(numbers))
        assert all(self._required < number <= self._last for number in numbers)
        assert not any(self._current.get(delta.tier) for delta in self._waiting)
        assert len(numbers) <= self._max_buffered


def _apply(delta: Delta) -> Apply:
    return Apply(delta.tier, unpack_keys(delta.added), unpack_keys(delta.removed), delta.cleared)
