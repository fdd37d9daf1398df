"""How it comes to be known where a prompt's KV was, and the header that tells it."""

from __future__ import annotations

import asyncio

from workers.admissions import Admissions
from workers.request_record import RequestRecord


def told(tag: str, local: int, loaded: list[int], elsewhere: int = 0, name: str = "r") -> dict[str, object]:
    return {"admissions": {tag: {name: [local, loaded, elsewhere]}}}


async def test_an_admission_is_tokens_by_tier() -> None:
    admissions = Admissions()
    admissions.note(told("t", 512, [0, 1024, 256, 0, 64]))
    admitted = await admissions.take("t")
    assert admitted is not None
    assert admitted.tiers == {"hbm": 512, "dram": 1024, "peer": 256, "disk": 0, "remote": 64}
    assert admitted.cached == 512 + 1024 + 256 + 64
    record = RequestRecord("r")
    record.note_first_output(2000, admitted.cached, admitted.tiers)
    assert record.cached_header == "hbm=512,dram=1024,peer=256,disk=0,remote=64,computed=144"


async def test_another_engine_s_kv_is_named_where_there_is_any() -> None:
    admissions = Admissions()
    admissions.note(told("t", 0, [0] * 5, 99))
    admitted = await admissions.take("t")
    assert admitted is not None
    assert admitted.tiers["nixl"] == 99


async def test_news_that_comes_just_after_the_first_output_is_waited_for() -> None:
    admissions = Admissions()
    taking = asyncio.create_task(admissions.take("t"))
    await asyncio.sleep(0)
    admissions.note(told("t", 1, [0] * 5))
    assert await taking is not None


async def test_nothing_told_is_nothing_known_and_all_cached_tokens_are_the_engine_s_own() -> None:
    assert await Admissions().take("t") is None
    record = RequestRecord("r")
    record.note_first_output(10, 4)
    assert record.cached_header == "hbm=4,computed=6"


async def test_several_sequences_of_one_prompt_count_once_and_several_prompts_add_up() -> None:
    admissions = Admissions()
    admissions.note({"admissions": {"t": {"a": [8, [0] * 5, 0], "b": [0, [0, 8, 0, 0, 0], 0]}}})
    admissions.note(told("t", 99, [0] * 5, name="c"))
    admitted = await admissions.take("t")
    assert admitted is not None
    assert admitted.cached == 8
    record = RequestRecord("r")
    for _ in range(2):
        record.note_first_output(20, admitted.cached, admitted.tiers)
    assert record.cached_header == "hbm=16,dram=0,peer=0,disk=0,remote=0,computed=24"


async def test_requests_that_never_come_to_an_output_are_forgotten() -> None:
    admissions = Admissions()
    for number in range(10_000):
        admissions.note(told(f"t{number}", 1, [0] * 5))
    assert len(admissions._known) < 10_000
    admissions.drop("t9999")
    assert await admissions.take("t9999") is None
