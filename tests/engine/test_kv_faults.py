"""Whatever becomes of KV on its way, answers are the cold ones token for token, and nothing is left behind.

One engine computes and saves. Another, with little room of its own and short limits, is asked for the same while the
store does what stores do on bad days.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from cache_store.chunk import Header, checksum
from cache_store.node_store import LoadResult
from tests.engine.served import CHUNK, CHUNKS, PART_BYTES, PROMPT, Answer, Served, eventually, serving
from tests.engine.store_thread import Load
from tests.engine.tiered_store import TieredStore
from workers.messages import Plan

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

WHOLE = CHUNKS * CHUNK
LOAD_LIMIT_S = 4.0
BLOCKS = 150
"""Of the second engine: room for two of the long prompts and a half."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    store = TieredStore(CHUNK, tmp_path_factory.mktemp("disk"), mib=8)
    yield store
    store.check()
    store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def first(vllm_environment: None, tiny_model: Path, store: TieredStore) -> AsyncIterator[Served]:
    async with serving(tiny_model, store) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(first: Served, tiny_model: Path, store: TieredStore) -> AsyncIterator[Served]:
    limits = {"load_limit_s": LOAD_LIMIT_S}
    async with serving(tiny_model, store, connector=limits, **{"num-gpu-blocks-override": BLOCKS}) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def cold(first: Served, second: Served, store: TieredStore) -> AsyncIterator[Answer]:
    """The prompt, computed by the first engine: its chunks are in memory and on disk, and the second knows nothing.

    Afterwards nothing is left of what the test did.
    """
    await first.forget()
    await second.forget()
    await asyncio.to_thread(store.clear)
    answer = await first.complete(PROMPT)
    assert answer.cached["computed"] == len(PROMPT)
    await first.saved(PROMPT)
    await eventually(lambda: set(first.keys(PROMPT)) <= store.on_disk)
    yield answer
    store.behave()
    await first.forget()
    await second.forget()
    await asyncio.to_thread(store.check)


def found(**tokens: int) -> dict[str, int]:
    """Where the prompt's tokens were, as the header says; those not named were computed."""
    tiers = dict.fromkeys(("hbm", "dram", "peer", "disk", "remote"), 0) | tokens
    return tiers | {"computed": len(PROMPT) - sum(tokens.values())}


async def grown(second: Served, before: Mapping[str, int], *expected: Mapping[str, int]) -> None:
    """What the engine counts of loads grows by so much, or by the other, and by nothing else."""
    more: dict[str, int] = {}

    async def so_much() -> bool:
        after = await second.counts()
        change = {name: after[name] - before.get(name, 0) for name in after if name.startswith("load")}
        more.clear()
        more.update({name: count for name, count in change.items() if count})
        return more in expected

    with suppress(TimeoutError):
        await eventually(so_much)
    assert more in expected


def loads(tier: str, chunks: int, failure: str = "") -> dict[str, int]:
    """Counts of so many chunks that were loaded, and of the one behind them that was not."""
    failed = {f"load_failures {failure}": 1} if failure else {}
    if not chunks:
        return failed
    return failed | {
        f"loaded_tokens {tier}": chunks * CHUNK,
        f"loaded_bytes {tier}": chunks * PART_BYTES,
    }


# Where nothing is wrong.


@pytest.mark.parametrize("tier", ["dram", "disk"])
async def test_a_prefix_is_loaded_and_not_computed(
    second: Served, cold: Answer, store: TieredStore, tier: str
) -> None:
    if tier == "disk":
        store.forget_memory()
    counts, stats = await second.counts(), store.call(store.store.stats)
    answer = await second.complete(PROMPT)
    assert answer == Answer(cold.tokens, found(**{tier: WHOLE}))
    await grown(second, counts, loads(tier, CHUNKS))
    read = store.call(store.store.stats).counters
    assert read.loaded_bytes[tier] - stats.counters.loaded_bytes[tier] == CHUNKS * PART_BYTES
    again = await second.complete(PROMPT)
    assert again == Answer(cold.tokens, found(hbm=WHOLE))


# Chunks that are gone, or not what they were.


async def test_a_chunk_that_is_deleted_between_look_up_and_load_is_computed(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    fourth = second.keys(PROMPT)[3]

    async def delete(load: Load) -> LoadResult:
        assert store.store.evict([fourth]) == 1
        return await load(fourth)

    store.on_load(fourth, delete)
    counts = await second.counts()
    answer = await second.complete(PROMPT)
    assert answer == Answer(cold.tokens, found(dram=3 * CHUNK))
    await grown(second, counts, loads("dram", 3, "missing"))


async def test_a_chunk_that_has_to_make_room_once_its_lease_has_run_out_is_computed(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    """Leases are what keeps chunks between look-up and load: with them the same pressure changes nothing."""
    keys = second.keys(PROMPT)
    header, payload = store.part(keys[0])
    budget = store.call(store.store.stats).tiers["dram"].capacity

    async def press(load: Load) -> LoadResult:
        for number in range(2 * budget // PART_BYTES):
            other = msgspec.structs.replace(header, key=number.to_bytes(32, "big"))
            assert await store.store.save(other, memoryview(payload)) == "stored"
        return await load(keys[3])

    async def let_go_and_press(load: Load) -> LoadResult:
        for lease in list(store.store._leases._leases):
            store.store.release(lease)
        store.store.evict(keys, ("disk",))
        return await press(load)

    store.on_load(keys[3], press)
    answer = await second.complete(PROMPT)
    assert answer == Answer(cold.tokens, found(dram=WHOLE))
    await second.forget()
    store.behave()
    store.on_load(keys[3], let_go_and_press)
    answer = await second.complete(PROMPT)
    assert answer.tokens == cold.tokens
    assert answer.cached["dram"] <= 3 * CHUNK
    assert store.call(store.store.stats).counters.evicted["dram"] > 0


async def test_a_plan_that_speaks_of_chunks_that_are_evicted_since_costs_time_alone(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    store.clear()
    answer = await second.complete(PROMPT, plan=Plan(skip_save=CHUNKS))
    assert answer == Answer(cold.tokens, found())


@pytest.mark.parametrize("plan", [None, Plan(skip_save=CHUNKS)], ids=["no plan", "a plan"])
@pytest.mark.parametrize("chunk", [0, 3, CHUNKS - 1])
async def test_a_bit_that_flips_in_memory_is_noticed_and_its_chunk_computed(
    second: Served, cold: Answer, store: TieredStore, chunk: int, plan: Plan | None
) -> None:
    """It flips after the checksum was made, as one would in the engine that saves, in the store, or on the way."""
    key = second.keys(PROMPT)[chunk]
    store.flip(key, at=chunk * 1000 + 77, mask=0x10)
    counts, stats = await second.counts(), store.call(store.store.stats)
    answer = await second.complete(PROMPT, plan=plan)
    assert answer == Answer(cold.tokens, found(dram=chunk * CHUNK))
    await grown(second, counts, loads("dram", chunk, "checksum"))
    assert store.call(store.store.stats).counters.corrupt["dram"] == stats.counters.corrupt["dram"] + 1
    # What was computed is saved in its place, though the plan said that all is there.
    await eventually(lambda: key in store.in_memory)
    header, payload = store.part(key)
    assert checksum(payload) == header.checksum


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the payload": lambda file, other: _flip(file, -5000),
    "a bit of the header": lambda file, other: _flip(file, 40),
    "cut off": lambda file, other: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file, other: os.truncate(file, 0),
    "another chunk's": lambda file, other: file.write_bytes(other.read_bytes()),
    "no chunk at all": lambda file, other: file.write_text("all of my thesis"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_file_that_is_not_what_was_written_is_noticed_and_its_chunk_computed(
    second: Served, cold: Answer, store: TieredStore, damage: Callable[[Path, Path], object]
) -> None:
    keys, identity = second.keys(PROMPT), second.engine.info.identity.digest()
    store.forget_memory()
    damage(store.file(identity, keys[4]), store.file(identity, keys[5]))
    counts, stats = await second.counts(), store.call(store.store.stats)
    removed = store.disk.removed.total()
    answer = await second.complete(PROMPT)
    assert answer == Answer(cold.tokens, found(disk=4 * CHUNK))
    # The load may come when the file was found out already.
    await grown(second, counts, loads("disk", 4, "corrupt"), loads("disk", 4, "missing"))
    assert store.call(store.store.stats).counters.corrupt["disk"] == stats.counters.corrupt["disk"] + 1
    assert store.disk.removed.total() == removed + 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"identity": bytes(32)}, "mismatch"),
        ({"dtype": "bfloat16/0"}, "layout"),
        ({"shape": (CHUNK, 4, 4)}, "layout"),
        ({"version": 2}, "version"),
        ({"nbytes": PART_BYTES // 2}, "layout"),
    ],
    ids=["of another engine", "another type", "another shape", "another format", "half as long"],
)
async def test_a_sound_part_of_something_else_is_not_used_though_it_has_the_key(
    second: Served, cold: Answer, store: TieredStore, change: dict[str, Any], why: str
) -> None:
    keys = second.keys(PROMPT)
    parts = [store.part(key) for key in keys]
    store.clear()
    header, payload = parts[0]
    other: Header = msgspec.structs.replace(header, **change)
    payload = payload[: other.nbytes]
    assert store.put(msgspec.structs.replace(other, checksum=checksum(payload)), payload) == "stored"
    for header, payload in parts[1:]:
        assert store.put(header, payload) == "stored"
    counts = await second.counts()
    answer = await second.complete(PROMPT)
    assert answer == Answer(cold.tokens, found())
    await grown(second, counts, loads("dram", 0, why))


async def test_a_chunk_of_which_a_rank_s_part_is_missing_is_none(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    keys = second.keys(PROMPT)
    header, payload = store.part(keys[0])
    store.clear()
    assert store.put(msgspec.structs.replace(header, world_size=2), payload) == "stored"
    assert await second.complete(PROMPT) == Answer(cold.tokens, found())


@pytest.mark.parametrize(("chunk", "at"), [(0, 3), (3, PART_BYTES // 2 + 3), (CHUNKS - 1, PART_BYTES - 1)])
async def test_these_tests_would_notice_a_wrong_byte_that_the_checksum_hides(
    second: Served, cold: Answer, store: TieredStore, chunk: int, at: int
) -> None:
    """One byte, the high one of a float, in KV whose checksum is made to match: loaded, and the answer is another."""
    store.flip(second.keys(PROMPT)[chunk], at, mask=0x40, honest=False)
    answer = await second.complete(PROMPT)
    assert answer.cached == found(dram=WHOLE)
    assert answer.tokens != cold.tokens
    await second.forget()
    store.clear()


# A store that hangs or dies.


async def test_a_store_that_hangs_amid_a_load_holds_up_neither_that_request_nor_another(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    keys, awake = second.keys(PROMPT), threading.Event()

    async def hang(load: Load) -> LoadResult:
        while store.store.counters.loads["loaded"] < before + CHUNKS - 1:  # noqa: ASYNC110 - a plain count
            await asyncio.sleep(0.001)
        awake.wait(120)
        return LoadResult("late", 0, None)

    before = store.call(store.store.stats).counters.loads["loaded"]
    store.on_load(keys[2], hang)
    counts = await second.counts()
    try:
        answer = await second.complete(PROMPT)
        assert answer == Answer(cold.tokens, found(dram=2 * CHUNK))
        await grown(second, counts, loads("dram", 2, "late"))
        other = await second.complete([token + 1 for token in PROMPT])
        assert other.cached["computed"] == len(PROMPT)
        assert not awake.is_set()
    finally:
        awake.set()
    store.behave()
    await second.forget()
    await eventually(lambda: store.call(store.server.stats).connections == 4)
    assert await second.complete(PROMPT) == Answer(cold.tokens, found(dram=WHOLE))


async def test_a_store_that_dies_amid_a_load_and_comes_back_with_its_disk_is_used_again(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    counts, before = await second.counts(), store.call(store.store.stats).counters.loads["loaded"]
    with store.hold_load_of(second.keys(PROMPT)[2]) as hold:
        asking = asyncio.create_task(second.complete(PROMPT))
        await asyncio.to_thread(hold.waiting.wait)
        await eventually(
            lambda: store.call(store.store.stats).counters.loads["loaded"] >= before + CHUNKS - 1
        )
        await asyncio.to_thread(store.die_and_restart)
        answer = await asking
    assert answer == Answer(cold.tokens, found(dram=2 * CHUNK))
    await grown(second, counts, loads("dram", 2, "unavailable"))
    await eventually(lambda: store.call(store.server.stats).connections == 4)
    await second.forget()
    store.forget_memory()
    assert await second.complete(PROMPT) == Answer(cold.tokens, found(disk=WHOLE))


# Requests that come, go and meet.


async def test_a_client_that_leaves_amid_a_load_leaves_nothing_behind(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    counts, leave = await second.counts(), asyncio.Event()
    with store.hold_load_of(second.keys(PROMPT)[2]) as hold:
        asking = asyncio.create_task(second.ask_and_leave(PROMPT, leave))
        await asyncio.to_thread(hold.waiting.wait)
        leave.set()
        await asking
        # All of its blocks, while the store still works on its load, and not because that took too long.
        await eventually(second.engine._llm.reset_prefix_cache)
        assert not store.nothing_open()
        assert not any("late" in name for name in await second.counts() - counts)
    await second.forget()
    assert await second.complete(PROMPT) == Answer(cold.tokens, found(dram=WHOLE))


async def test_requests_that_want_the_same_chunks_read_them_once(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    store.forget_memory()
    stats = store.call(store.store.stats).counters
    answers = await asyncio.gather(second.complete(PROMPT), second.complete(PROMPT))
    assert [answer.tokens for answer in answers] == [cold.tokens] * 2
    assert [answer.cached["computed"] for answer in answers] == [2, 2]
    after = store.call(store.store.stats).counters
    assert after.moved["disk"] - stats.moved["disk"] == CHUNKS
    # Both may wait for the same part, which then came from the disk for both.
    from_disk = after.loaded_bytes["disk"] - stats.loaded_bytes["disk"]
    assert CHUNKS * PART_BYTES <= from_disk <= 2 * CHUNKS * PART_BYTES


async def test_a_chunk_that_is_saved_twice_is_kept_once(
    second: Served, cold: Answer, store: TieredStore
) -> None:
    counts, stats = await second.counts(), store.call(store.store.stats)
    store.answer_nothing()
    assert await second.complete(PROMPT) == Answer(cold.tokens, found())

    async def saved() -> bool:
        after = await second.counts()
        # What else is saved is of the answer's tokens.
        return after["saved_chunks present"] - counts["saved_chunks present"] == CHUNKS

    await eventually(saved)
    await second.forget()
    after = store.call(store.store.stats)
    assert after.tiers["dram"].bytes == stats.tiers["dram"].bytes
    assert after.counters.saves["present"] - stats.counters.saves["present"] == CHUNKS


async def test_requests_that_are_preempted_while_they_load_and_save_answer_alike(
    first: Served, second: Served, cold: Answer, store: TieredStore
) -> None:
    """Six prompts fit into the engine's room, and their answers do not."""
    prompts = [[(at * (shift + 3)) % 400 + 3 for at in range(2 * CHUNK + 200)] for shift in range(6)]
    expected = [
        answer.tokens
        for answer in await asyncio.gather(*(first.complete(prompt, max_tokens=250) for prompt in prompts))
    ]
    for prompt in prompts:
        await first.saved(prompt)
    counts = await second.counts()
    answers = await asyncio.gather(*(second.complete(prompt, max_tokens=250) for prompt in prompts))
    assert [answer.tokens for answer in answers] == expected
    after = await second.counts()
    assert after["vllm:num_preemptions"] > counts["vllm:num_preemptions"]
    assert after["loaded_tokens dram"] - counts["loaded_tokens dram"] >= 6 * 2 * CHUNK


async def test_tenants_share_with_themselves_alone(first: Served, second: Served, cold: Answer) -> None:
    assert (await first.complete(PROMPT, salt="blue")).cached == found()
    await first.saved(PROMPT, salt="blue")
    assert await second.complete(PROMPT, salt="red") == Answer(cold.tokens, found())
    assert await second.complete(PROMPT, salt="blue") == Answer(cold.tokens, found(dram=WHOLE))
