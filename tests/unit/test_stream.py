"""Publisher, subscription and follower: a router's picture ends equal to the holder's, whatever got lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.events import (
    PROTOCOL_VERSION,
    ChunkKey,
    Delta,
    FrameReader,
    Hello,
    Load,
    Message,
    ProtocolError,
    Snapshot,
    Tier,
    encode_frame,
    pack_keys,
)
from cache_store.stream import (
    Apply,
    Follower,
    LoadReport,
    NeedSnapshot,
    Publisher,
    Replace,
    Subscription,
    Update,
)

LOAD = Load(
    waiting=1, running=2, prefill_tokens=3, kv_used=0.5, prefill_rate=1000.0, decode_rate=10.0, draining=False
)
TIERS: tuple[Tier, ...] = ("hbm", "dram")


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


A, B, C, D = (key(number) for number in range(4))


def publisher(epoch: int = 1, tiers: Iterable[Tier] = TIERS) -> Publisher:
    return Publisher(holder="r", epoch=epoch, identity=bytes(32), chunk_tokens=256, tiers=tuple(tiers))


def read(subscription: Subscription) -> list[Message]:
    """All messages that wait."""
    reader, messages = FrameReader(), []
    while (frame := subscription.take()) is not None:
        messages += reader.feed(frame)
        subscription.check_integrity()
    return messages


class Picture:
    """A router's: a follower, and the tiers that its updates add up to."""

    def __init__(self, max_buffered: int = 100) -> None:
        self.follower = Follower(max_buffered)
        self.tiers: dict[Tier, set[ChunkKey]] = {}
        self.asked = 0
        self.load: Load | None = None

    def feed(self, *messages: Message) -> list[Update]:
        updates = [update for message in messages for update in self.follower.feed(message)]
        self.follower.check_integrity()
        for update in updates:
            match update:
                case Replace(tier, keys):
                    self.tiers[tier] = set(keys)
                case Apply(tier, added, removed, cleared):
                    held = set() if cleared else self.tiers[tier]
                    assert held >= set(removed)
                    assert not held & set(added)
                    self.tiers[tier] = (held - set(removed)) | set(added)
                case NeedSnapshot():
                    self.asked += 1
                case LoadReport(load):
                    self.load = load
        return updates

    def equals(self, holder: Publisher) -> bool:
        return self.tiers == {tier: set(holder.keys(tier)) for tier in self.tiers}


def following(holder: Publisher, max_buffered: int = 100) -> Picture:
    picture = Picture(max_buffered)
    picture.feed(holder.hello, *holder.state())
    return picture


def change(holder: Publisher, tier: Tier, *added: ChunkKey) -> Delta:
    delta = holder.apply(tier, added)
    assert delta is not None
    return delta


def test_deltas_are_numbered_across_tiers() -> None:
    holder = publisher()
    assert [change(holder, "hbm", A).seq, change(holder, "dram", A).seq, holder.seq] == [1, 2, 2]
    assert holder.snapshot() == [Snapshot(2, "hbm", A), Snapshot(2, "dram", A)]


def test_a_delta_says_only_what_changed() -> None:
    holder = publisher()
    assert holder.apply("hbm", [A, B, A]) == Delta(1, "hbm", added=pack_keys([A, B]))
    assert holder.apply("hbm", [B, C], [A, D]) == Delta(2, "hbm", added=C, removed=A)
    assert holder.apply("hbm", [B], [B, C, C]) == Delta(3, "hbm", removed=C)
    assert holder.apply("hbm", [B], cleared=True) == Delta(4, "hbm", added=B, cleared=True)
    assert holder.keys("hbm") == {B}


def test_no_change_is_no_delta() -> None:
    holder = publisher()
    assert holder.apply("hbm", cleared=True) is None
    assert holder.apply("hbm", [], [A]) is None
    change(holder, "hbm", A)
    assert holder.apply("hbm", [A], [A]) is None
    assert holder.seq == 1


def test_a_stream_starts_with_hello_snapshots_and_the_last_load() -> None:
    holder = publisher()
    change(holder, "hbm", A)
    holder.report(LOAD)
    assert read(holder.subscribe(0)) == [
        Hello(PROTOCOL_VERSION, "r", 1, bytes(32), 256),
        Snapshot(1, "hbm", A),
        Snapshot(1, "dram", b""),
        msgspec.structs.replace(LOAD, seq=1),
    ]


def test_a_stream_goes_on_with_what_is_published() -> None:
    holder = publisher()
    one, two = holder.subscribe(10_000), holder.subscribe(10_000)
    assert read(one) == read(two) == [holder.hello, *holder.state()]
    delta = change(holder, "hbm", A)
    holder.report(LOAD)
    assert read(one) == read(two) == [delta, msgspec.structs.replace(LOAD, seq=1)]


def test_a_reader_that_does_not_keep_up_loses_frames_and_then_gets_the_state() -> None:
    holder = publisher()
    frame = len(encode_frame(Delta(1, "hbm", added=A)))
    subscription, picture = holder.subscribe(2 * frame), Picture()
    deltas = [change(holder, "hbm", key(number)) for number in range(10, 15)]
    assert subscription.lost == 3
    messages = read(subscription)
    assert messages == [holder.hello, *publisher().snapshot(), *deltas[:2], *holder.state()]
    picture.feed(*messages, change(holder, "hbm", D))
    assert picture.equals(holder)


def test_a_frame_larger_than_the_buffer_ends_in_the_state_too() -> None:
    holder = publisher()
    subscription = holder.subscribe(1)
    read(subscription)
    change(holder, "hbm", A)
    assert read(subscription) == holder.state()
    assert subscription.lost == 1


def test_a_closed_subscription_gets_nothing_and_is_forgotten() -> None:
    holder = publisher()
    subscription = holder.subscribe(10_000)
    subscription.close()
    subscription.close()
    change(holder, "hbm", A)
    assert read(subscription) == []
    assert holder.subscriptions == 0


async def test_frames_come_as_they_are_published() -> None:
    holder = publisher(tiers=["hbm"])
    frames = holder.subscribe(10_000).frames()
    assert [await anext(frames) for _ in range(2)] == [
        encode_frame(m) for m in (holder.hello, *holder.state())
    ]
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    assert not waiting.done()
    delta = change(holder, "hbm", A)
    async with asyncio.timeout(5):
        assert await waiting == encode_frame(delta)


async def test_a_waiting_reader_gets_the_state_after_a_frame_that_did_not_fit() -> None:
    holder = publisher(tiers=["hbm"])
    subscription = holder.subscribe(1)
    read(subscription)
    waiting = asyncio.ensure_future(anext(subscription.frames()))
    await asyncio.sleep(0)
    change(holder, "hbm", A)
    async with asyncio.timeout(5):
        assert await waiting == encode_frame(holder.snapshot()[0])


async def test_closing_wakes_a_waiting_reader() -> None:
    subscription = publisher().subscribe(10_000)

    async def drain() -> int:
        return len([frame async for frame in subscription.frames()])

    task = asyncio.ensure_future(drain())
    await asyncio.sleep(0)
    subscription.close()
    async with asyncio.timeout(5):
        assert await task == 3


async def test_closing_ends_a_stream_with_frames_still_waiting() -> None:
    subscription = publisher().subscribe(10_000)
    frames = subscription.frames()
    await anext(frames)
    subscription.close()
    assert [frame async for frame in frames] == []


def test_a_follower_passes_on_snapshots_deltas_and_load() -> None:
    holder, follower = publisher(tiers=["hbm"]), Follower()
    assert follower.feed(holder.hello) == []
    assert follower.feed(Snapshot(0, "hbm", A)) == [Replace("hbm", [A])]
    assert follower.feed(Delta(1, "hbm", added=B, removed=A)) == [Apply("hbm", [B], [A], False)]
    assert follower.feed(Delta(2, "hbm", cleared=True)) == [Apply("hbm", [], [], True)]
    assert follower.feed(LOAD) == [LoadReport(LOAD)]


@pytest.mark.parametrize("message", [Delta(1, "hbm"), Snapshot(0, "hbm", b""), LOAD])
def test_nothing_comes_before_hello(message: Message) -> None:
    with pytest.raises(ProtocolError, match="before Hello"):
        Follower().feed(message)


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"version 99.*1"):
        Follower().feed(Hello(99, "r", 1, b"", 256))


def test_keys_cut_short_are_refused_and_change_nothing() -> None:
    holder = publisher()
    picture = following(holder)
    for message in (Delta(1, "hbm", added=b"short"), Snapshot(5, "hbm", b"short")):
        with pytest.raises(ProtocolError, match="5 bytes"):
            picture.feed(message)
    picture.feed(change(holder, "hbm", A))
    assert picture.equals(holder)
    assert picture.asked == 0


def test_a_lost_delta_is_noticed_and_repaired_by_a_snapshot() -> None:
    holder = publisher()
    picture = following(holder)
    change(holder, "hbm", A)
    assert picture.feed(change(holder, "hbm", B)) == [NeedSnapshot()]
    assert picture.feed(change(holder, "dram", C)) == []
    assert not picture.follower.synced
    picture.feed(*holder.snapshot())
    assert picture.follower.synced
    assert picture.equals(holder)
    assert (picture.asked, picture.follower.gaps) == (1, 1)


def test_deltas_that_a_snapshot_includes_are_dropped_and_later_ones_applied() -> None:
    holder = publisher(tiers=["hbm"])
    picture = following(holder)
    change(holder, "hbm", A)
    picture.feed(change(holder, "hbm", B))
    snapshots = holder.snapshot()
    assert picture.feed(change(holder, "hbm", C)) == []
    replace, apply = picture.feed(*snapshots)
    assert isinstance(replace, Replace)
    assert set(replace.keys) == {A, B}
    assert apply == Apply("hbm", [C], [], False)
    assert picture.equals(holder)


def test_deltas_behind_a_snapshot_that_came_ahead_of_them_are_dropped() -> None:
    holder = publisher(tiers=["hbm"])
    picture = following(holder)
    change(holder, "hbm", A)
    picture.feed(change(holder, "hbm", B))
    late = [change(holder, "hbm", C), change(holder, "hbm", D)]
    picture.feed(*holder.snapshot())
    assert picture.feed(*late) == []
    assert picture.equals(holder)


def test_a_snapshot_of_one_tier_does_not_repair_another() -> None:
    holder = publisher()
    picture = following(holder)
    change(holder, "dram", A)
    picture.feed(change(holder, "hbm", B))
    hbm, dram = holder.snapshot()
    picture.feed(hbm)
    assert not picture.follower.synced
    picture.feed(change(holder, "dram", C))
    assert picture.tiers["dram"] == set()
    picture.feed(dram)
    assert picture.equals(holder)


def test_a_snapshot_too_old_for_a_second_loss_is_refused_and_asked_for_again_once() -> None:
    holder = publisher()
    picture = following(holder)
    change(holder, "hbm", A)
    picture.feed(change(holder, "hbm", B))
    old = holder.snapshot()
    change(holder, "hbm", C)
    picture.feed(change(holder, "hbm", D))
    assert picture.feed(*old) == [NeedSnapshot()]
    picture.feed(*holder.snapshot())
    assert picture.equals(holder)
    assert picture.follower.synced


def test_a_snapshot_older_than_what_is_known_changes_nothing() -> None:
    holder = publisher()
    picture = following(holder)
    old = holder.snapshot()
    picture.feed(change(holder, "hbm", A))
    assert picture.feed(*old) == []
    assert picture.equals(holder)


def test_more_deltas_than_may_wait_are_lost_to_a_later_snapshot() -> None:
    holder = publisher()
    picture = following(holder, max_buffered=2)
    change(holder, "hbm", A)
    picture.feed(change(holder, "hbm", B))
    old = holder.snapshot()
    picture.feed(*(change(holder, "hbm", key(number)) for number in range(10, 15)))
    assert picture.feed(*old) == [NeedSnapshot()]
    picture.feed(*holder.snapshot())
    assert picture.equals(holder)


def test_another_epoch_starts_anew() -> None:
    holder = publisher()
    picture = following(holder)
    picture.feed(change(holder, "hbm", A), change(holder, "dram", A))
    reborn = publisher(epoch=2, tiers=["hbm"])
    assert picture.feed(reborn.hello) == [Replace("hbm", []), Replace("dram", [])]
    picture.feed(*reborn.state(), change(reborn, "hbm", B))
    assert picture.tiers == {"hbm": {B}, "dram": set()}
    assert picture.asked == 0


def test_a_reconnect_to_the_same_life_keeps_what_is_known_until_its_snapshots_come() -> None:
    holder = publisher()
    picture = following(holder)
    picture.feed(change(holder, "hbm", A))
    change(holder, "hbm", B)
    assert picture.feed(holder.hello) == []
    picture.feed(*holder.state(), change(holder, "dram", C))
    assert picture.equals(holder)
    assert picture.asked == 0


def mutate(rng: random.Random, holder: Publisher) -> Delta | None:
    keys = [key(number) for number in range(6)]
    return holder.apply(
        rng.choice(TIERS),
        rng.sample(keys, rng.randint(0, 3)),
        rng.sample(keys, rng.randint(0, 3)),
        cleared=rng.random() < 0.1,
    )


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(deadline=None)
def test_with_losses_repairs_late_snapshots_and_restarts_the_picture_ends_equal(seed: int, most: int) -> None:
    """Snapshots are taken when asked for, and come tier by tier after any number of further deltas."""
    rng, holder = random.Random(seed), publisher()
    picture, repairs, heard = following(holder, max_buffered=most), [], 0
    for _ in range(60):
        action = rng.random()
        if action < 0.03:
            holder, repairs, heard = publisher(epoch=rng.getrandbits(60)), [], 0
            picture.feed(holder.hello, *holder.state())
        elif action < 0.4 and repairs:
            heard = max(heard, repairs[0].seq)
            picture.feed(repairs.pop(0))
        else:
            delta = mutate(rng, holder)
            if delta is not None and rng.random() < 0.8:
                asked, heard = picture.asked, delta.seq
                picture.feed(delta)
                repairs += holder.snapshot() if picture.asked > asked else []
        if picture.follower.synced and heard == holder.seq:
            assert picture.equals(holder)
    while (delta := mutate(rng, holder)) is None:
        pass
    for message in (*repairs, delta, *holder.snapshot()):
        picture.feed(message)
    assert picture.follower.synced
    assert picture.equals(holder)


@given(st.integers(0, 2**32), st.integers(0, 400))
@settings(deadline=None)
def test_a_slow_reader_of_any_small_buffer_ends_equal_without_asking(seed: int, max_bytes: int) -> None:
    rng, holder, picture = random.Random(seed), publisher(), Picture()
    subscription, reader = holder.subscribe(max_bytes), FrameReader()
    for _ in range(80):
        if rng.random() < 0.6:
            mutate(rng, holder)
        elif rng.random() < 0.2:
            holder.report(LOAD)
        elif (frame := subscription.take()) is not None:
            picture.feed(*reader.feed(frame))
        subscription.check_integrity()
    picture.feed(*read(subscription))
    assert picture.equals(holder)
    assert set(picture.tiers) == set(TIERS)
    assert picture.asked == 0


def test_a_lost_delta_is_noticed_by_the_next_load_report() -> None:
    publisher = Publisher(holder="r", epoch=1, identity=b"i" * 32, chunk_tokens=64, tiers=("hbm",))
    follower = Follower()
    for message in (publisher.hello, *publisher.snapshot()):
        follower.feed(message)
    publisher.apply("hbm", added=[ChunkKey(b"k" * 32)])
    publisher.report(Load(0, 0, 0, 0.0, 0.0, 0.0))
    (load,) = (message for message in publisher.state() if isinstance(message, Load))

    updates = follower.feed(load)
    assert NeedSnapshot() in updates
    assert follower.gaps == 1
    assert NeedSnapshot() not in follower.feed(load)
    (snapshot,) = publisher.snapshot()
    assert follower.feed(snapshot) == [Replace("hbm", [ChunkKey(b"k" * 32)])]
    assert follower.synced
