"""vLLM's KV events in our words, and a reader that loses none of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from workers.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from workers.vllm import events as vllm_events
from workers.vllm.events import EventReader, read_extra_keys, translate

IMAGE = ["d41d8cd98f00b204", 0]
DIGEST = b"\x01" * 32
ADAPTER = "polite@0123456789abcdef"


def stored(**fields: Any) -> dict[str, Any]:
    """As vLLM 0.32 publishes it."""
    return {
        "type": "BlockStored",
        "block_hashes": [b"a", b"b"],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
    } | fields


# Translation.


def test_stored_blocks_keep_their_tokens_and_their_parent() -> None:
    assert translate(stored(parent_block_hash=b"p")) == BlocksStored(
        hashes=[b"a", b"b"], parent=b"p", tokens=[1, 2, 3, 4], block_tokens=2
    )


def test_removed_and_cleared_blocks() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU", "group_idx": 0}
    assert translate(removed) == BlocksRemoved([b"a"])
    assert translate({"type": "AllBlocksCleared"}) == BlocksCleared()


def test_fields_of_later_versions_are_ignored() -> None:
    assert translate(stored(colour="green", nested={"a": [1]})) == translate(stored())


def test_fields_that_earlier_versions_lack_have_defaults() -> None:
    needed = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
    event = {name: value for name, value in stored().items() if name in needed}
    assert translate(event) == translate(stored())


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"medium": "STORAGE"},
        {"locality": "REMOTE"},
        {"group_idx": 1},
        {"type": "SomethingNew"},
    ],
    ids=str,
)
def test_what_is_not_in_the_engines_own_blocks_is_left_out(fields: dict[str, Any]) -> None:
    assert translate(stored(**fields)) is None


def test_blocks_removed_from_another_medium_or_group_stay() -> None:
    for elsewhere in ({"medium": "CPU"}, {"medium": "GPU", "group_idx": 2}):
        assert translate({"type": "BlockRemoved", "block_hashes": [b"a"], **elsewhere}) is None


def test_another_medium_that_is_cleared_clears_nothing_here() -> None:
    assert translate({"type": "AllBlocksCleared", "medium": "CPU"}) is None


def test_an_adapter_comes_by_the_name_that_carries_its_content() -> None:
    event = translate(stored(lora_name=ADAPTER, lora_id=1, extra_keys=[[ADAPTER], [ADAPTER]]))
    assert isinstance(event, BlocksStored)
    assert (event.adapter, event.salt, event.shareable) == (ADAPTER, "", None)


def test_a_salt_comes_with_the_first_block_of_a_sequence() -> None:
    event = translate(stored(extra_keys=[["tenant"], None]))
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.shareable) == ("tenant", None)


@pytest.mark.parametrize(
    ("extra_keys", "adapter", "at_start", "expected"),
    [
        (None, "", True, ("", None)),
        ([], "", True, ("", None)),
        ([None, None], "", True, ("", None)),
        ([[], []], "", True, ("", None)),
        ([["salt"], None], "", True, ("salt", None)),
        ([[ADAPTER, "salt"], [ADAPTER]], ADAPTER, True, ("salt", None)),
        ([[ADAPTER, ADAPTER], [ADAPTER]], ADAPTER, True, (ADAPTER, None)),
        ([[ADAPTER], [ADAPTER]], ADAPTER, False, ("", None)),
        ([None, [IMAGE], None], "", True, ("", 1)),
        ([["salt"], None, [IMAGE], [IMAGE]], "", True, ("salt", 2)),
        ([[ADAPTER], [ADAPTER, IMAGE]], ADAPTER, False, ("", 1)),
        ([[IMAGE, "salt"]], "", True, ("", 0)),
        ([["salt"], [DIGEST]], "", True, ("salt", 1)),
        ([["salt", DIGEST]], "", True, ("", 0)),
        ([[DIGEST]], "", True, ("", 0)),
        ([None, ["a string further on"]], "", True, ("", 1)),
        ([["not at the start"]], "", False, ("", 0)),
        ([["unknown adapter"]], "", False, ("", 0)),
        ([[{"kind": "of later"}]], "", True, ("", 0)),
    ],
    ids=str,
)
def test_only_salt_and_adapter_leave_a_block_shareable(
    extra_keys: Any, adapter: str, at_start: bool, expected: tuple[str, int | None]
) -> None:
    assert read_extra_keys(extra_keys, adapter, at_start) == expected


# Reading.


class FakePublisher:
    """vLLM's publisher, except that batches can get lost on their way."""

    def __init__(self, folder: Path) -> None:
        context = zmq.asyncio.Context.instance()
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self.batches: list[bytes] = []
        self.kept = 0
        """Number of the first batch that a replay can still give."""
        self.replays: list[int] = []
        """First numbers that were asked for."""
        self._answering = asyncio.create_task(self._answer())

    async def subscribed(self) -> None:
        assert (await self._pub.recv())[:1] == b"\x01"

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        self.batches.append(msgspec.msgpack.encode([0.0, list(events), 0]))
        if not lost:
            await self.send(len(self.batches) - 1)

    async def send(self, number: int) -> None:
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), self.batches[number]])

    async def _answer(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            for number in range(max(first, self.kept), len(self.batches)):
                frames = [client, empty, number.to_bytes(8, "big"), self.batches[number]]
                await self._router.send_multipart(frames)
            await self._router.send_multipart([client, empty, (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)


class Read:
    """A reader at work, and what it gave."""

    def __init__(self, publisher: FakePublisher) -> None:
        self.events: list[KVEvent] = []
        self._new = asyncio.Event()
        self.reader = EventReader(publisher.endpoint, publisher.replay_endpoint, self._take)
        self.task = asyncio.create_task(self.reader.run())

    def _take(self, events: Sequence[KVEvent]) -> None:
        self.events += events
        self._new.set()

    async def until(self, count: int) -> list[KVEvent]:
        async with asyncio.timeout(10):
            while len(self.events) < count:
                self._new.clear()
                await self._new.wait()
        return self.events


def removed(number: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number]}


def removals(*numbers: int) -> list[KVEvent]:
    return [BlocksRemoved([number]) for number in numbers]


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[FakePublisher]:
    publisher = FakePublisher(tmp_path)
    yield publisher
    await publisher.close()


@pytest.fixture
async def follow(publisher: FakePublisher) -> AsyncIterator[Callable[[], Read]]:
    reads: list[Read] = []

    def start() -> Read:
        reads.append(Read(publisher))
        return reads[-1]

    yield start
    for read in reads:
        read.task.cancel()
        await asyncio.gather(read.task, return_exceptions=True)


async def test_batches_come_in_order(publisher: FakePublisher, follow: Callable[[], Read]) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(1), removed(2))
    await publisher.publish(removed(3))
    assert await read.until(3) == removals(1, 2, 3)
    assert read.reader.lost == 0


async def test_what_was_published_before_is_replayed_once(
    publisher: FakePublisher, follow: Callable[[], Read]
) -> None:
    await publisher.publish(removed(1))
    await publisher.publish(removed(2))
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(3))
    assert await read.until(3) == removals(1, 2, 3)


async def test_a_gap_is_filled_from_the_replay(publisher: FakePublisher, follow: Callable[[], Read]) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(0))
    await read.until(1)
    await publisher.publish(removed(1), lost=True)
    await publisher.publish(removed(2), lost=True)
    await publisher.publish(removed(3))
    assert await read.until(4) == removals(0, 1, 2, 3)
    assert publisher.replays[-1] == 1
    assert read.reader.lost == 0


async def test_a_gap_that_can_not_be_filled_empties_the_cache_first(
    publisher: FakePublisher, follow: Callable[[], Read]
) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(0))
    await read.until(1)
    for number in (1, 2):
        await publisher.publish(removed(number), lost=True)
    publisher.kept = 2
    await publisher.publish(removed(3))
    assert await read.until(3) == [*removals(0), BlocksCleared(), *removals(3)]
    assert read.reader.lost == 2
    await publisher.publish(removed(4))
    assert (await read.until(4))[-1:] == removals(4)


async def test_a_batch_that_comes_twice_counts_once(
    publisher: FakePublisher, follow: Callable[[], Read]
) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(0))
    await publisher.send(0)
    await publisher.publish(removed(1))
    assert await read.until(2) == removals(0, 1)


async def test_a_replay_that_never_answers_empties_the_cache(
    publisher: FakePublisher, follow: Callable[[], Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(removed(0))
    await read.until(1)
    monkeypatch.setattr(vllm_events, "_REPLAY_TIMEOUT_S", 0.05)
    publisher._answering.cancel()
    await publisher.publish(removed(1), lost=True)
    await publisher.publish(removed(2))
    assert await read.until(3) == [*removals(0), BlocksCleared(), *removals(2)]


async def test_what_does_not_concern_the_engines_blocks_is_passed_over(
    publisher: FakePublisher, follow: Callable[[], Read]
) -> None:
    read = follow()
    await publisher.subscribed()
    await publisher.publish(stored(medium="CPU"))
    await publisher.publish({"type": "SomethingNew"}, removed(1))
    assert await read.until(1) == removals(1)
