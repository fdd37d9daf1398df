"""The deciding half of the connector against requests as vLLM has them: what is keyed, asked, saved, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.keys import chunk_keys, namespace
from cache_store.wire import DISK, Source
from tests.unit.connector_kit import FakeStore, until
from workers.vllm.connector.counts import CALLS_AT_ONCE
from workers.vllm.connector.metadata import LoadResult, StepReport, StepWork
from workers.vllm.connector.scheduler_half import SchedulerHalf
from workers.vllm.connector.settings import Settings, SettingsError, read_settings

CHUNK, BLOCK = 8, 4
IDENTITY = bytes(range(32))
ADAPTER = f"sql@{'ab' * 16}"
SETTINGS = Settings(socket="s", engine="e", model="m", chunk_tokens=CHUNK, load_when="always")


@dataclass
class FakeRequest:
    """The attributes of vLLM's `Request` that the connector reads."""

    request_id: str = "r"
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(33)))
    cache_salt: str | None = None
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_is_token_ids: list[bool] | None = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids or range(33))
        self.all_token_ids = list(self.prompt_token_ids or [0] * 33)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Half:
    store: FakeStore = field(default_factory=FakeStore)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.half = SchedulerHalf(SETTINGS, IDENTITY, BLOCK, 1, self.store, clock=lambda: self.now)

    def match(self, request: FakeRequest, local: int = 0) -> int:
        """Asked again until it is known."""

        def known() -> tuple[int] | None:
            found = self.half.match(request, local)
            return None if found is None else (found,)

        return until(known)[0]  # type: ignore[no-any-return]

    def step(self, *running: FakeRequest, preempted: tuple[str, ...] = (), **blocks: list[int]) -> StepWork:
        new = [SimpleNamespace(req_id=n, block_ids=(b,), num_computed_tokens=0) for n, b in blocks.items()]
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.half.step(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={request.request_id: 1 for request in running},
                total_num_scheduled_tokens=len(running),
                preempted_req_ids=set(preempted),
            )
        )

    def saves(self, request: FakeRequest, count: int) -> list[bytes]:
        """Keys that steps want saved, once there are so many."""
        keys: list[bytes] = []

        def wanted() -> bool:
            keys.extend(save.key for save in self.step(request).saves)
            return len(keys) >= count

        until(wanted)
        return keys

    def at_rest(self) -> bool:
        self.half.output(None, (), (), set())
        self.half.check_integrity()
        return self.half.at_rest and not self.store.leases


@pytest.fixture
def half() -> Iterator[Half]:
    half = Half()
    yield half
    half.half.close()
    assert half.store.closed


def keys_of(tokens: list[int], adapter: str = "", salt: str = "") -> list[bytes]:
    return list(chunk_keys(namespace(IDENTITY, adapter, salt), tokens, CHUNK))


def put(half: Half, keys: list[bytes]) -> None:
    half.store.parts.update(dict.fromkeys(keys))  # type: ignore[arg-type]


def test_the_store_is_asked_for_the_keys_that_routers_compute(half: Half) -> None:
    request = FakeRequest(lora_request=SimpleNamespace(lora_name=ADAPTER), cache_salt="tenant")
    expected = keys_of(list(range(33)), ADAPTER, "tenant")
    put(half, expected[:3])
    assert half.match(request) == 24
    assert half.store.asked == expected
    half.half.finished(request, aborted=True)
    until(half.at_rest)


def test_no_call_waits_for_a_store_that_is_silent(half: Half) -> None:
    half.store.held = True
    request = FakeRequest()
    half.half.new_request(request)
    assert half.half.match(request, 0) is None
    half.now = 1.0
    assert half.half.match(request, 0) == 0
    assert half.half.counts.take()["lookups"] == {"late": 1}
    assert not half.half.finished(request, aborted=False)
    until(lambda: half.store.waiting)
    half.store.answer()
    until(half.at_rest)


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=20, length=5))]}, 2),
        ({"prompt_is_token_ids": [True] * 9 + [False] * 24}, 1),
        ({"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=0, length=5))]}, 0),
        ({"prompt_token_ids": None}, 0),
        ({"resumable": True}, 0),
        ({"lora_request": SimpleNamespace(lora_name="without content")}, 0),
    ],
)
def test_nothing_is_shared_from_where_tokens_do_not_say_what_stands_there(
    half: Half, changes: dict[str, Any], chunks: int
) -> None:
    request = FakeRequest(**changes)
    put(half, keys_of(list(range(33))))
    assert half.match(request) == chunks * CHUNK
    assert len(half.store.asked) == chunks
    half.half.allocated(request, range(99), 0)
    half.store.parts.clear()
    half.step(r=list(range(20)))
    request.num_computed_tokens = 33
    assert half.half.finished(request, aborted=False) is False or chunks


@pytest.mark.parametrize(
    "changes", [{"skip_reading_prefix_cache": True}, {"kv_transfer_params": {"do_remote_prefill": True}}]
)
def test_some_requests_load_nothing_here_and_still_are_saved(half: Half, changes: dict[str, Any]) -> None:
    request = FakeRequest(**changes)
    assert half.match(request) == 0
    assert half.store.asked == []
    half.step(r=list(range(20)))
    request.num_computed_tokens = 16
    assert half.saves(request, 2) == keys_of(list(range(16)))


def test_only_confirmed_tokens_are_saved(half: Half) -> None:
    request = FakeRequest(prompt_token_ids=list(range(6)))
    half.half.new_request(request)
    half.step(r=list(range(20)))
    # Two guesses stand behind the prompt and one step more is under way: none of its KV is settled.
    request.num_computed_tokens, request.num_in_flight_tokens = 12, 6
    assert half.step(request).saves == []
    request.num_in_flight_tokens = 0
    assert half.step(request).saves == [], "the tokens behind the prompt are not known"
    request.all_token_ids += [100, 101, 102]
    assert half.saves(request, 1) == keys_of([*range(6), 100, 101])
    request.num_computed_tokens = 9
    assert half.step(request).saves == []


def test_a_failed_load_is_counted_and_not_tried_again(half: Half) -> None:
    request = FakeRequest(kv_transfer_params={"manta": {"id": "tag"}})
    put(half, keys_of(list(range(33))))
    half.store.tier = DISK
    assert half.match(request) == 32
    half.half.allocated(request, range(50, 58), 32)
    (load,) = half.step().loads
    assert [piece.blocks for piece in load.pieces] == [(50, 51), (52, 53), (54, 55), (56, 57)]
    report = StepReport(loads=[LoadResult("r", (DISK,), "checksum")], loaded_bytes={DISK: 64})
    half.half.output(report, ["r"], (), {52, 53, 54, 55, 56, 57})
    assert half.match(request) == 0
    half.step(r=list(range(20)))
    counts = half.half.counts.take()
    assert counts["loaded_tokens"] == {"disk": 8}
    assert counts["loaded_bytes"] == {"disk": 64}
    assert counts["load_failures"] == {"checksum": 1}
    assert counts["admissions"] == {"tag": {"r": [0, [0, 0, 0, 8, 0], 0]}}
    until(lambda: not half.store.leases)


def test_the_plan_s_hints_reach_the_store_and_the_saves(half: Half) -> None:
    hints = {"id": "t", "tenant": "blue", "sources": [["node", 0, 2]], "skip_save": 3}
    request = FakeRequest(kv_transfer_params={"manta": hints})
    asked: list[Any] = []
    lookup = half.store.lookup
    half.store.lookup = lambda *args, **kwargs: asked.append(args) or lookup(*args, **kwargs)  # type: ignore
    assert half.match(request) == 0
    assert asked[0][2] == (Source("node", 0, 2),)
    half.step(r=list(range(20)))
    request.num_computed_tokens = 33
    (save,) = until(lambda: half.step(request).saves)
    assert (save.tenant, save.key) == ("blue", keys_of(list(range(33)))[3])


@pytest.mark.parametrize("hints", [7, "x", {"sources": 3}, {"skip_save": "many"}, {"tenant": None}])
def test_hints_that_are_none_are_ignored(half: Half, hints: object) -> None:
    put(half, keys_of(list(range(33))))
    assert half.match(FakeRequest(kv_transfer_params={"manta": hints})) == 32


def test_a_preempted_request_is_saved_from_its_new_blocks(half: Half) -> None:
    request = FakeRequest()
    half.half.new_request(request)
    half.step(r=list(range(20)))
    request.num_computed_tokens = 8
    assert half.saves(request, 1)
    request.num_computed_tokens = 0
    assert half.step(preempted=("r",)).preempted == {"r"}
    half.half.output(StepReport(gathered={"r": 1}), (), (), set())
    half.step(request, r=list(range(40, 60)))
    request.num_computed_tokens = 16
    (save,) = half.step(request).saves
    assert save.blocks == (42, 43)


def test_blocks_of_a_finished_request_are_held_until_they_were_read(half: Half) -> None:
    request = FakeRequest()
    half.half.new_request(request)
    half.step(r=list(range(20)))
    request.num_computed_tokens = 32
    assert half.half.finished(request, aborted=False)
    closing: set[str] = set()
    saves = []

    def sent() -> bool:
        work = half.step()
        saves.extend(work.saves)
        closing.update(work.closing)
        return bool(closing)

    until(sent)
    assert [save.blocks for save in saves] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    half.half.output(StepReport(gathered={"r": 4}), (), ["r"], set())
    until(half.at_rest)


def test_after_a_reset_nothing_from_before_is_found(half: Half) -> None:
    put(half, keys_of(list(range(33))))
    assert half.match(FakeRequest("before")) == 32
    half.half.reset()
    assert half.match(FakeRequest("after")) == 0


def test_the_time_in_calls_is_told_in_lots(half: Half) -> None:
    told: list[float] = []
    for number in range(3 * CALLS_AT_ONCE):
        with half.half.counts.timed():
            half.half.new_request(FakeRequest(f"r{number}"))
        told += half.half.counts.take().get("calls", [])
        assert len(told) % CALLS_AT_ONCE == 0
    assert len(told) == 3 * CALLS_AT_ONCE
    assert min(told) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"chunk_tokens": 0}, "chunk_tokens"), ({"share": "maybe"}, "share"), ({"sokcet": "x"}, "sokcet")],
)
def test_settings_that_are_wrong_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings({"socket": "s", "engine": "e", "model": "m", "chunk_tokens": 8} | change)
