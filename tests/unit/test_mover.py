"""The thread that moves chunks: what it loads, saves and drops, and that everything it was given comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Thread

import msgspec
import pytest

from cache_store.events import ChunkKey
from cache_store.wire import DISK
from tests.unit.connector_kit import ByteBlocks, FakeStore, until
from workers.vllm.connector.copying import Origin
from workers.vllm.connector.metadata import LoadResult, LoadWork, Piece, SaveWork, StepReport
from workers.vllm.connector.mover import Mover

BLOCK_BYTES, CHUNK_BLOCKS, SLOTS = 16, 4, 4
ORIGIN = Origin(identity=bytes(32), rank=1, world_size=2, chunk_tokens=8)


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


@dataclass
class Moved:
    """A mover, and all that it has said so far."""

    store: FakeStore = field(default_factory=lambda: FakeStore(BLOCK_BYTES * CHUNK_BLOCKS, SLOTS))
    blocks: ByteBlocks = field(default_factory=lambda: ByteBlocks(64, BLOCK_BYTES, CHUNK_BLOCKS))
    now: float = 0.0
    received: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    invalid: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)

    def __post_init__(self) -> None:
        for block, content in enumerate(self.blocks.blocks):
            content[:] = random.Random(block).randbytes(BLOCK_BYTES)
        self.mover = Mover(
            self.blocks, SLOTS, self.store, ORIGIN, load_limit_s=5.0, hold_s=1.0, clock=lambda: self.now
        )
        self.mover.start()

    def take(self) -> None:
        ended = self.mover.take()
        assert not ended.received & set(self.received)
        self.received += ended.received
        self.sent += ended.sent
        self.invalid |= ended.invalid
        self.report = self.report.aggregate(ended.report)

    def saved(self, count: int) -> list[str]:
        """Outcomes, once there are so many."""

        def told() -> bool:
            self.take()
            return len(self.report.saved) >= count

        until(told)
        return [outcome for _, outcome in self.report.saved]

    def loaded(self, *names: str) -> None:
        def told() -> bool:
            self.take()
            return set(names) <= set(self.received)

        until(told)

    def has_sent(self, name: str) -> bool:
        self.take()
        return name in self.sent

    def save(self, number: int, request: str = "r", first: int | None = None) -> SaveWork:
        """Chunk `number` of blocks from `first` on."""
        first = number * CHUNK_BLOCKS if first is None else first
        blocks = tuple(range(first, first + CHUNK_BLOCKS))
        return SaveWork(request, key(number), bytes(32), blocks, "tenant", 0.5)

    def at_rest(self) -> bool:
        self.mover.check_integrity()
        return self.store.free == SLOTS


@pytest.fixture
def moved() -> Iterator[Moved]:
    moved = Moved()
    yield moved
    moved.blocks.gate.set()
    moved.store.answer()
    until(moved.at_rest)
    moved.mover.close()
    assert not moved.mover._thread.is_alive()


def stored(moved: Moved, count: int) -> None:
    """Chunks 0, 1, ... are in the store."""
    moved.mover.save([moved.save(number) for number in range(count)])
    assert moved.saved(count) == ["stored"] * count
    moved.report = StepReport()


def load(moved: Moved, count: int, request: str = "l", at: int = 32) -> None:
    """Chunks 0, 1, ... to blocks from `at` on."""
    pieces = tuple(
        Piece(key(number), 0, tuple(range(at + number * CHUNK_BLOCKS, at + (number + 1) * CHUNK_BLOCKS)))
        for number in range(count)
    )
    moved.mover.load([LoadWork(request, pieces)])


def test_what_was_saved_is_loaded_into_other_blocks(moved: Moved) -> None:
    stored(moved, 6)
    load(moved, 6)
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (1,) * 6, "")]
    assert moved.report.loaded_bytes == {1: 6 * CHUNK_BLOCKS * BLOCK_BYTES}
    assert moved.invalid == set()
    assert moved.blocks.blocks[32:56] == moved.blocks.blocks[:24]


def test_a_header_says_what_the_payload_is(moved: Moved) -> None:
    moved.mover.save([moved.save(3)])
    moved.saved(1)
    header, payload = moved.store.parts[key(3)]
    assert payload == b"".join(moved.blocks.blocks[12:16])
    assert (header.key, header.parent, header.identity) == (key(3), bytes(32), ORIGIN.identity)
    assert (header.rank, header.world_size, header.tokens) == (1, 2, 8)
    assert (header.dtype, header.shape, header.nbytes) == ("bytes/1", (4, 1, 16), 64)
    assert (header.tenant, header.cost_s) == ("tenant", 0.5)


def test_a_load_of_part_of_a_chunk_leaves_other_blocks_alone(moved: Moved) -> None:
    stored(moved, 1)
    moved.mover.load([LoadWork("l", (Piece(key(0), 2, (40, 41)),))])
    moved.loaded("l")
    assert moved.blocks.writes == [40, 41]
    assert moved.blocks.blocks[40:42] == moved.blocks.blocks[2:4]


def test_a_missing_chunk_makes_its_blocks_and_all_behind_them_invalid(moved: Moved) -> None:
    stored(moved, 4)
    del moved.store.parts[key(1)]
    load(moved, 4)
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (1,), "missing")]
    assert moved.invalid == set(range(36, 48))
    assert moved.blocks.blocks[32:36] == moved.blocks.blocks[:4]


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"identity": bytes([1]) * 32}, "mismatch"),
        ({"key": bytes([9]) * 32}, "mismatch"),
        ({"rank": 0}, "mismatch"),
        ({"checksum": bytes(16)}, "checksum"),
        ({"nbytes": 48}, "length"),
        ({"dtype": "bytes/2"}, "layout"),
        ({"shape": (2, 2, 16)}, "layout"),
    ],
)
def test_what_is_not_the_part_that_was_asked_for_is_never_written(
    moved: Moved, change: dict[str, object], failure: str
) -> None:
    stored(moved, 1)
    header, payload = moved.store.parts[key(0)]
    moved.store.parts[key(0)] = (msgspec.structs.replace(header, **change), payload)
    load(moved, 1)
    moved.loaded("l")
    (result,) = moved.report.loads
    assert result.tiers == ()
    assert result.failure == failure or (failure, result.failure) == ("length", "checksum")
    assert moved.invalid == set(range(32, 36))
    assert moved.blocks.writes == []
    assert moved.store.corrupted == ([] if failure == "layout" else [key(0)])


def test_a_flipped_bit_is_noticed_and_told_to_the_store(moved: Moved) -> None:
    stored(moved, 2)
    header, payload = moved.store.parts[key(1)]
    moved.store.parts[key(1)] = (header, payload[:7] + bytes([payload[7] ^ 4]) + payload[8:])
    moved.store.tier = DISK
    load(moved, 2)
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (DISK,), "checksum")]
    assert moved.store.corrupted == [key(1)]
    assert moved.blocks.writes == [32, 33, 34, 35]


def test_what_was_written_behind_a_piece_that_fails_is_not_counted_as_loaded(moved: Moved) -> None:
    stored(moved, 3)
    del moved.store.parts[key(1)]
    moved.store.held = True
    load(moved, 3)
    until(lambda: len(moved.store.waiting) == 3)
    moved.store.waiting.reverse()
    moved.store.answer(1)
    until(lambda: 40 in moved.blocks.writes)
    moved.store.answer()
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (1,), "missing")]
    assert moved.report.loaded_bytes == {1: CHUNK_BLOCKS * BLOCK_BYTES}
    assert moved.invalid == set(range(36, 44))


def test_a_store_that_vanishes_fails_a_load_at_once(moved: Moved) -> None:
    stored(moved, 3)
    moved.store.held = True
    load(moved, 3)
    until(lambda: len(moved.store.waiting) == 3)
    moved.store.answer(1)
    until(lambda: len(moved.blocks.writes) == CHUNK_BLOCKS)
    moved.store.vanish()
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (1,), "unavailable")]
    load(moved, 1, "again")
    moved.loaded("again")
    moved.mover.save([moved.save(0)])
    assert moved.saved(1) == ["dropped"]


def test_a_load_that_takes_too_long_is_given_up_and_what_comes_late_is_not_written(moved: Moved) -> None:
    stored(moved, 2)
    moved.store.held = True
    load(moved, 2)
    until(lambda: len(moved.store.waiting) == 2)
    moved.now = 5.0
    moved.mover.check_integrity()
    moved.loaded("l")
    assert moved.report.loads == [LoadResult("l", (), "late")]
    moved.store.answer()
    until(moved.at_rest)
    assert moved.blocks.writes == []


def test_a_cancelled_load_ends_at_once_and_writes_nothing_more(moved: Moved) -> None:
    stored(moved, 3)
    moved.store.held = True
    load(moved, 3)
    until(lambda: len(moved.store.waiting) == 3)
    moved.store.answer(1)
    until(lambda: 32 in moved.blocks.writes)
    moved.blocks.writes.clear()
    moved.mover.cancel(["l", "unknown"])
    moved.loaded("l")
    assert moved.report.loaded_bytes == {}
    assert moved.invalid == set(range(32, 44))
    moved.store.answer()
    until(moved.at_rest)
    assert moved.blocks.writes == []
    moved.mover.cancel(["l"])
    moved.mover.check_integrity()
    assert moved.mover.take().received == set()


def test_loads_that_are_longer_than_the_staging_area_take_turns(moved: Moved) -> None:
    stored(moved, 7)
    for number in range(5):
        load(moved, 7, f"l{number}")
    moved.loaded(*(f"l{number}" for number in range(5)))
    assert all(result.tiers == (1,) * 7 for result in moved.report.loads)


def test_saves_leave_slots_for_loads_and_wait_for_theirs(moved: Moved) -> None:
    stored(moved, 1)
    moved.store.held = True
    moved.mover.save([moved.save(number) for number in range(1, 7)])
    until(lambda: len(moved.store.waiting) == SLOTS // 2)
    moved.store.held = False
    load(moved, 1)
    moved.loaded("l")
    assert len(moved.report.saved) == 0
    moved.store.answer()
    assert moved.saved(6) == ["stored"] * 6
    assert moved.report.gathered == {"r": 6}


def test_closing_a_request_waits_for_its_gathers(moved: Moved) -> None:
    moved.blocks.gate.clear()
    moved.mover.save([moved.save(0), moved.save(1), moved.save(2, "other")])
    assert moved.blocks.gathering.wait(10)
    moved.mover.close_requests(["r", "idle"])
    moved.blocks.gate.set()
    until(lambda: moved.has_sent("r"))
    assert moved.report.gathered["r"] == 2
    assert sorted(moved.sent) == ["idle", "r"]


def test_a_closing_request_whose_saves_find_no_slot_lets_go_after_a_while(moved: Moved) -> None:
    moved.store.held = True
    moved.mover.save([moved.save(number) for number in range(5)])
    until(lambda: len(moved.store.waiting) == 2)
    moved.mover.close_requests(["r"])
    moved.mover.check_integrity()
    assert not moved.has_sent("r")
    moved.now = 1.0
    moved.mover.check_integrity()
    until(lambda: moved.has_sent("r"))
    assert moved.report.gathered == {"r": 5}
    assert [outcome for _, outcome in moved.report.saved] == ["dropped"] * 3


def test_preempted_blocks_are_not_read_once_the_engine_goes_on(moved: Moved) -> None:
    moved.blocks.gate.clear()
    moved.mover.save([moved.save(0), moved.save(1), moved.save(2, "other")])
    assert moved.blocks.gathering.wait(10)
    waiting = Thread(target=moved.mover.drop_saves, args=(["r"],))
    waiting.start()
    assert waiting.is_alive(), "a copy of these blocks is under way"
    before = bytes(moved.blocks.blocks[0])
    moved.blocks.gate.set()
    waiting.join(10)
    moved.blocks.blocks[0][:] = bytes(BLOCK_BYTES)
    moved.blocks.blocks[4][:] = bytes(BLOCK_BYTES)
    assert sorted(moved.saved(3)) == ["dropped", "stored", "stored"]
    assert moved.store.parts.keys() == {key(0), key(2)}
    assert moved.store.parts[key(0)][1].startswith(before)


def test_dropping_saves_of_nobody_returns_at_once(moved: Moved) -> None:
    moved.mover.drop_saves(["r"])


def test_two_slots_are_needed() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Mover(ByteBlocks(4, 16, 4), 1, FakeStore(), ORIGIN)


def test_every_load_and_save_ends_whatever_the_store_does() -> None:
    for seed in range(20):
        moved, chance = Moved(), random.Random(seed)
        stored(moved, 6)
        moved.store.held = True
        names, saves = [], 0
        for step in range(40):
            roll = chance.random()
            if roll < 0.3:
                names.append(f"l{step}")
                load(moved, chance.randint(1, 6), names[-1])
            elif roll < 0.5:
                moved.mover.save([moved.save(chance.randrange(8), f"s{step}") for _ in range(3)])
                saves += 3
            elif roll < 0.6:
                moved.mover.cancel(chance.sample(names, min(len(names), 2)))
            elif roll < 0.7:
                moved.mover.drop_saves({f"s{chance.randrange(step + 1)}"})
            elif roll < 0.75:
                moved.store.vanish()
                moved.mover.check_integrity()
                moved.store.alive = True
            else:
                moved.store.answer(min(len(moved.store.waiting), chance.randint(0, 3)))
        moved.store.held = False
        moved.store.answer()
        moved.loaded(*names)
        moved.saved(saves)
        assert sum(moved.report.gathered.values()) == saves + 6 - 6
        until(moved.at_rest)
        moved.mover.close()
