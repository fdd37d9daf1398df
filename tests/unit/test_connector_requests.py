"""The connector's scheduler half as plain state: what is asked, loaded, saved and let go of, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from cache_store.events import ChunkKey
from cache_store.wire import DISK, DRAM, PEER, Found
from workers.vllm.connector.metadata import LoadResult, LoadWork, Piece
from workers.vllm.connector.request_state import Admission, Facts, Geometry, LookupWanted
from workers.vllm.connector.requests import RequestTable

CHUNK, BLOCK = 8, 2
SIZE = CHUNK // BLOCK
NAMESPACE = bytes(32)


def all_of(tiers: bytes, bytes_per_chunk: int, seconds: Sequence[float], local: int) -> int:
    return len(tiers)


def make_table(workers: int = 1, worth: object = all_of) -> RequestTable:
    return RequestTable(Geometry(CHUNK, BLOCK), workers, worth)  # type: ignore[arg-type]


def key(prompt: int, chunk: int) -> ChunkKey:
    return ChunkKey(bytes([prompt, chunk]) * 16)


def give_keys(table: RequestTable, prompt: int = 0) -> None:
    for wanted in table.take_hashes():
        keys = [key(prompt, chunk) for chunk in range(wanted.first, wanted.end)]
        table.keys_known(wanted.request, NAMESPACE, keys)


def answer(table: RequestTable, tiers: Sequence[int], lease: int = 7, now: float = 0.0) -> LookupWanted:
    """Answers the one look-up that is wanted: `tiers` of its chunks, none for the others."""
    (wanted,) = table.take_lookups()
    found = (bytes(tiers) + bytes(wanted.end))[: wanted.end - wanted.first]
    table.answered(wanted.request, wanted.serial, Found(wanted.serial, found, 100, lease), now)
    return wanted


def with_request(tokens: int = 33, facts: Facts | None = None, workers: int = 1) -> RequestTable:
    table = make_table(workers)
    table.add("r", facts or Facts(tag="t"), tokens)
    give_keys(table)
    return table


def loading(
    table: RequestTable, tokens: int = 33, local: int = 0, tiers: Sequence[int] = (DRAM,) * 4
) -> LoadWork:
    """The request loads what there is, into blocks 100, 101, ..."""
    assert table.ask("r", local, tokens, 0.0) is None
    answer(table, tiers)
    external = table.ask("r", local, tokens, 0.0)
    assert external
    table.admitted("r", external, range(100, 100 + (local + external) // BLOCK))
    (work,) = table.take_loads()
    return work


def test_a_look_up_is_waited_for_and_then_answers() -> None:
    table = with_request()
    assert table.ask("r", 0, 33, 0.0) is None
    assert table.ask("r", 0, 33, 0.5) is None
    assert answer(table, [DRAM, DISK, 0, DRAM]) == LookupWanted("r", 1, 0, 4, ())
    assert table.ask("r", 0, 33, 0.6) == 2 * CHUNK


def test_a_look_up_that_takes_too_long_is_a_miss_and_its_lease_is_let_go() -> None:
    table = with_request()
    assert table.ask("r", 0, 33, 0.0) is None
    assert table.ask("r", 0, 33, 1.0) == 0
    assert table.timed_out == 1
    answer(table, [DRAM], lease=9)
    assert table.take_leases() == [9]
    assert table.ask("r", 0, 33, 50.0) == 0, "until it is preempted"


def test_a_store_that_is_not_there_is_a_miss_and_nothing_is_known_to_be_in_it() -> None:
    table = with_request()
    table.known.add(key(5, 5))
    table.ask("r", 0, 33, 0.0)
    (wanted,) = table.take_lookups()
    table.answered("r", wanted.serial, None, 0.0)
    assert table.ask("r", 0, 33, 0.0) == 0
    assert key(5, 5) not in table.known


@pytest.mark.parametrize(
    ("tokens", "local", "external"),
    [
        (33, 0, 32),
        (32, 0, 30),
        (31, 0, 24),
        (33, 8, 24),
        (33, 12, 20),
        (33, 30, 2),
        (33, 32, 0),
        (9, 0, 8),
        (8, 0, 6),
    ],
)
def test_a_hit_begins_where_the_engine_s_own_ends_and_leaves_a_token_to_compute(
    tokens: int, local: int, external: int
) -> None:
    table = with_request(tokens)
    if external:
        work = loading(table, tokens, local)
        blocks = [block for piece in work.pieces for block in piece.blocks]
        assert blocks == list(range(100 + local // BLOCK, 100 + (local + external) // BLOCK))
        for piece in work.pieces:
            first_token = (piece.blocks[0] - 100) * BLOCK
            assert piece.key == key(0, first_token // CHUNK)
            assert piece.first == first_token % CHUNK // BLOCK
    else:
        assert table.ask("r", local, tokens, 0.0) == 0
        assert table.take_lookups() == []


def test_only_what_the_engine_lacks_is_looked_up() -> None:
    table = with_request()
    table.ask("r", 17, 33, 0.0)
    (wanted,) = table.take_lookups()
    assert (wanted.first, wanted.end) == (2, 4)


def test_blocks_that_the_engine_lost_meanwhile_are_looked_up_again() -> None:
    table = with_request()
    table.ask("r", 16, 33, 0.0)
    answer(table, [DRAM, DRAM], lease=4)
    assert table.ask("r", 16, 33, 0.0) == 16
    assert table.ask("r", 0, 33, 0.0) is None
    assert table.take_leases() == [4]
    assert answer(table, [DRAM] * 4).first == 0
    assert table.ask("r", 0, 33, 0.0) == 32


def test_blocks_that_the_engine_has_won_meanwhile_shorten_the_load() -> None:
    table = with_request()
    table.ask("r", 0, 33, 0.0)
    answer(table, [DRAM] * 4)
    assert table.ask("r", 20, 33, 0.0) == 12


def test_what_was_found_long_ago_is_looked_up_again() -> None:
    table = with_request()
    table.ask("r", 0, 33, 0.0)
    answer(table, [DRAM] * 4, lease=4)
    assert table.ask("r", 0, 33, 29.0) == 32
    assert table.ask("r", 0, 33, 30.0) is None
    assert table.take_leases() == [4]


def test_chunks_that_compute_faster_are_not_loaded() -> None:
    asked: list[tuple[bytes, int]] = []

    def two_at_most(tiers: bytes, bytes_per_chunk: int, seconds: Sequence[float], local: int) -> int:
        asked.append((tiers, local))
        return min(len(tiers), 2)

    table = make_table(worth=two_at_most)
    table.add("r", Facts(), 33)
    give_keys(table)
    table.ask("r", 10, 33, 0.0)
    answer(table, [DRAM, DISK, PEER])
    assert table.ask("r", 10, 33, 0.0) == 24 - 10
    assert asked == [(bytes([DRAM, DISK, PEER]), 2)]


def test_an_admission_without_a_load_lets_the_lease_go() -> None:
    table = with_request()
    table.ask("r", 0, 33, 0.0)
    answer(table, [DRAM], lease=3)
    table.admitted("r", 0, ())
    assert table.take_leases() == [3]


def test_a_load_tells_what_it_loaded_from_where() -> None:
    table = with_request(workers=2)
    loading(table, tiers=[DRAM, DISK, DISK])
    table.loaded(LoadResult("r", (DRAM, DISK, DRAM), ""))
    table.loaded(LoadResult("r", (DRAM, DRAM, DISK), ""))
    assert table.load_done("r") == {DRAM: 8, DISK: 16}
    table.admitted("r", 0, ())
    table.scheduled("r", 24)
    assert table.take_admissions() == [Admission("t", "r", 0, (0, 8, 0, 16, 0), 0)]
    assert table.take_leases() == [7]


def test_a_load_that_failed_is_never_claimed_again() -> None:
    table = with_request()
    loading(table)
    table.loaded(LoadResult("r", (DRAM,), "missing"))
    table.invalid({104, 105})
    assert table.load_done("r") == {DRAM: 8}
    assert table.ask("r", 0, 33, 0.0) == 0
    assert table.take_lookups() == []
    table.preempted("r")
    assert table.ask("r", 0, 33, 99.0) == 0
    table.scheduled("r", 8)
    assert table.take_admissions() == [Admission("t", "r", 0, (0, 8, 0, 0, 0), 0)]


@pytest.mark.parametrize("skip_save", [0, 1, 3], ids="plan said {}".format)
def test_what_could_not_be_loaded_is_saved_once_it_is_computed(skip_save: int) -> None:
    table = with_request(facts=Facts(skip_save=skip_save))
    loading(table)
    table.invalid({104, 105})
    table.load_done("r")
    table.set_blocks("r", range(20), more=False)
    table.computed("r", 32)
    assert saved_chunks(table) == [1, 2, 3]


def test_tokens_of_another_connector_are_told_apart() -> None:
    table = with_request()
    table.ask("r", 8, 33, 0.0)
    answer(table, [])
    assert table.ask("r", 8, 33, 0.0) == 0
    table.admitted("r", 0, ())
    table.scheduled("r", 32)
    assert table.take_admissions() == [Admission("t", "r", 8, (0,) * 5, 24)]


def saved_chunks(table: RequestTable) -> list[int]:
    return [save.key[1] for save in table.take_saves(0.0)]


def test_a_chunk_is_saved_when_its_tokens_are_settled_and_once() -> None:
    table = with_request(17)
    table.set_blocks("r", range(8), more=False)
    table.computed("r", 7)
    assert saved_chunks(table) == []
    table.computed("r", 8)
    (save,) = table.take_saves(0.25)
    assert (save.key, save.parent, save.blocks, save.cost_s) == (key(0, 0), NAMESPACE, (0, 1, 2, 3), 0.25)
    table.computed("r", 16)
    table.set_blocks("r", range(8, 16), more=True)
    (save,) = table.take_saves(0.0)
    assert (save.key, save.parent, save.blocks) == (key(0, 1), key(0, 0), (4, 5, 6, 7))
    table.computed("r", 31)
    assert saved_chunks(table) == [], "the key of what was generated is not known yet"
    give_keys(table)
    assert saved_chunks(table) == [2]
    table.computed("r", 31)
    assert saved_chunks(table) == []


def test_chunks_that_the_cluster_has_are_not_saved() -> None:
    table = with_request(facts=Facts(skip_save=1))
    table.set_blocks("r", range(20), more=False)
    table.ask("r", 0, 33, 0.0)
    answer(table, [0, DISK, 0, 0])
    table.computed("r", 32)
    assert saved_chunks(table) == [2, 3]
    table.add("s", Facts(), 33)
    give_keys(table)
    table.set_blocks("s", range(20, 40), more=False)
    table.computed("s", 32)
    assert saved_chunks(table) == [0], "what another request is saving is as good as there"


def test_a_save_that_was_dropped_may_be_tried_by_another_request() -> None:
    table = with_request()
    table.set_blocks("r", range(20), more=False)
    table.computed("r", 8)
    assert saved_chunks(table) == [0]
    table.saved(key(0, 0), there=False)
    table.preempted("r")
    table.set_blocks("r", range(40, 60), more=False)
    table.computed("r", 8)
    assert saved_chunks(table) == [0]


def test_nothing_is_shared_behind_the_shareable_prefix() -> None:
    table = with_request(33, Facts(shareable=20))
    table.set_blocks("r", range(20), more=False)
    table.ask("r", 0, 33, 0.0)
    wanted = answer(table, [DRAM] * 4)
    assert wanted.end == 2
    assert table.ask("r", 0, 33, 0.0) == 16
    table.computed("r", 33)
    assert len(saved_chunks(table)) <= 2
    assert table.take_hashes() == []


def test_tokens_that_can_t_be_hashed_are_not_shared() -> None:
    table = make_table()
    table.add("r", Facts(), 33)
    table.keys_failed("r")
    table.set_blocks("r", range(20), more=False)
    table.computed("r", 33)
    assert table.ask("r", 0, 33, 0.0) == 0
    assert saved_chunks(table) == []
    assert not table.finished("r", 33)


def test_blocks_are_held_until_every_worker_has_read_them() -> None:
    table = with_request(workers=2)
    table.set_blocks("r", range(20), more=False)
    assert table.finished("r", 16)
    assert table.take_closing() == set(), "its saves were not even sent"
    assert saved_chunks(table) == [0, 1]
    assert table.take_closing() == {"r"}
    assert table.take_closing() == set()
    table.gathered("r", 4)
    table.closed("r")
    assert "r" not in table
    assert table.take_forgotten() == ["r"]


def test_blocks_that_nobody_reads_any_more_are_not_held() -> None:
    table = with_request()
    table.set_blocks("r", range(20), more=False)
    table.computed("r", 16)
    assert saved_chunks(table) == [0, 1]
    table.gathered("r", 2)
    assert not table.finished("r", 23)
    assert "r" not in table


def test_what_an_aborted_request_had_not_saved_is_not_saved() -> None:
    table = with_request()
    table.set_blocks("r", range(20), more=False)
    table.computed("r", 16)
    assert not table.finished("r", 0)
    assert saved_chunks(table) == []


def test_a_request_aborted_while_it_looks_up_leaves_no_lease() -> None:
    table = with_request()
    table.ask("r", 0, 33, 0.0)
    assert not table.finished("r", 0)
    answer(table, [DRAM], lease=5)
    assert table.take_leases() == [5]


def test_a_request_aborted_while_it_loads_is_over_when_the_load_is() -> None:
    table = with_request()
    loading(table)
    assert not table.finished("r", 0), "the engine keeps the blocks of a load itself"
    assert table.take_cancelled() == {"r"}
    table.invalid(set(range(100, 116)))
    assert table.load_done("r") == {}
    assert table.take_leases() == [7]
    assert len(table) == 0


def test_a_request_that_was_preempted_looks_up_what_it_has_generated_too() -> None:
    table = with_request(17)
    table.ask("r", 0, 17, 0.0)
    answer(table, [])
    assert table.ask("r", 0, 17, 0.0) == 0
    table.admitted("r", 0, ())
    table.preempted("r")
    assert table.ask("r", 0, 33, 9.0) is None
    give_keys(table)
    assert answer(table, [DRAM] * 4).end == 4
    assert table.ask("r", 0, 33, 9.0) == 32


class Engine(RuleBasedStateMachine):
    """A scheduler, two workers and a store that do what they may, in any order."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(workers=2)
        self.now = 0.0
        self.count = 0
        self.tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.running: set[str] = set()
        self.failed: set[str] = set()
        self.loads: dict[str, tuple[Piece, ...]] = {}
        self.unread: dict[str, int] = {}
        self.held: set[str] = set()
        self.closing: set[str] = set()
        self.lookups: list[LookupWanted] = []
        self.lease = 0
        self.leased: set[int] = set()
        self.next_block = 0

    def blocks(self, count: int) -> range:
        self.next_block += count
        return range(self.next_block - count, self.next_block)

    def after(self) -> None:
        for index, name in enumerate(self.tokens):
            for wanted in [w for w in self.table._hashes if w.request == name]:
                self.table._hashes.remove(wanted)
                keys = [key(index % 3, chunk) for chunk in range(wanted.first, wanted.end)]
                self.table.keys_known(name, NAMESPACE, keys)
        self.lookups += self.table.take_lookups()
        for lease in self.table.take_leases():
            self.leased.remove(lease)

    @rule(target=requests, tokens=st.integers(1, 40), shareable=st.sampled_from([None, None, 0, 19]))
    def arrive(self, tokens: int, shareable: int | None) -> str:
        name = f"r{self.count}"
        self.count += 1
        self.tokens[name], self.computed[name] = tokens, 0
        self.table.add(name, Facts(shareable=shareable), tokens)
        self.after()
        return name

    @rule(name=requests, local=st.integers(0, 20), hits=st.none() | st.integers(0, 5))
    def schedule(self, name: str, local: int, hits: int | None) -> None:
        """`hits`: chunks that the store says to have at once; None for an answer that comes later."""
        if name not in self.tokens or name in self.running or name in self.loads or name in self.held:
            return
        tokens = self.tokens[name]
        local = min(local, (tokens - 1) // BLOCK) * BLOCK
        external = self.table.ask(name, local, tokens, self.now)
        self.after()
        if external is None and hits is not None:
            wanted = self.lookups.pop()
            self.answer(wanted, bytes([DRAM] * hits + [0] * wanted.end)[: wanted.end - wanted.first])
            external = self.table.ask(name, local, tokens, self.now)
            self.after()
        if external is None:
            return
        assert external >= 0
        assert external % BLOCK == 0
        assert local + external < tokens
        assert not (external and name in self.failed), "a failed load was claimed again"
        self.table.admitted(name, external, self.blocks((local + external) // BLOCK))
        self.after()
        if external:
            (work,) = self.table.take_loads()
            assert sum(len(piece.blocks) for piece in work.pieces) == external // BLOCK
            self.loads[name] = work.pieces
        else:
            self.run(name, local)

    def run(self, name: str, computed: int) -> None:
        self.running.add(name)
        self.computed[name] = computed
        self.table.scheduled(name, computed)
        self.table.set_blocks(name, self.blocks(self.tokens[name] // BLOCK + 1), more=False)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data(), there=st.booleans())
    def store_answers(self, data: st.DataObject, there: bool) -> None:
        wanted = self.lookups.pop(data.draw(st.integers(0, len(self.lookups) - 1)))
        chunks = wanted.end - wanted.first
        tiers = data.draw(st.lists(st.sampled_from([0, DRAM, DRAM, DISK]), min_size=chunks, max_size=chunks))
        self.answer(wanted, bytes(tiers) if there else None)

    def answer(self, wanted: LookupWanted, tiers: bytes | None) -> None:
        found = None
        if tiers is not None:
            self.lease += 1
            self.leased.add(self.lease)
            found = Found(wanted.serial, tiers, 10, self.lease)
        self.table.answered(wanted.request, wanted.serial, found, self.now)
        self.after()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loads)))
        pieces = self.loads.pop(name)
        good = data.draw(st.integers(0, len(pieces)))
        self.table.loaded(LoadResult(name, (DRAM,) * len(pieces), ""))
        self.table.loaded(LoadResult(name, (DRAM,) * good, "missing"))
        self.table.invalid({block for piece in pieces[good:] for block in piece.blocks})
        tokens = self.table.load_done(name)
        assert sum(tokens.values()) == BLOCK * sum(len(piece.blocks) for piece in pieces[:good])
        if good < len(pieces):
            self.failed.add(name)
        self.after()
        if name in self.tokens and (good or pieces[0].blocks[0] % 2):
            self.table.admitted(name, 0, ())
            self.run(name, sum(tokens.values()))
        self.after()

    @rule(name=requests, steps=st.integers(1, 12))
    def compute(self, name: str, steps: int) -> None:
        if name in self.running:
            self.computed[name] += steps
            if self.computed[name] > self.tokens[name]:
                grown = self.computed[name] - self.tokens[name]
                self.tokens[name] += grown
                self.table.set_blocks(name, self.blocks(grown // BLOCK + 1), more=True)
            self.table.computed(name, self.computed[name])
            self.after()

    @rule()
    def step(self) -> None:
        for save in self.table.take_saves(0.0):
            assert save.request in self.running | self.held
            assert len(save.blocks) == SIZE
            self.unread[save.request] = self.unread.get(save.request, 0) + 2
        for name in self.table.take_closing():
            assert name in self.held
            self.closing.add(name)
        assert self.table.take_cancelled() <= self.loads.keys()
        self.table.take_forgotten()

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def worker_reads(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.unread)))
        read = data.draw(st.integers(1, self.unread[name]))
        self.unread[name] -= read
        if not self.unread[name]:
            del self.unread[name]
        self.table.gathered(name, read)

    @rule()
    def workers_let_go(self) -> None:
        for name in sorted(self.closing - self.unread.keys()):
            self.closing.remove(name)
            self.held.remove(name)
            self.table.closed(name)

    @rule(name=requests)
    def preempt(self, name: str) -> None:
        if name in self.running:
            self.running.remove(name)
            self.computed[name] = 0
            self.table.preempted(name)
            self.table.gathered(name, self.unread.pop(name, 0))
            self.after()

    @rule(name=consumes(requests), aborted=st.booleans())
    def finish(self, name: str, aborted: bool) -> None:
        confirmed = self.computed[name] if name in self.running and not aborted else 0
        held = self.table.finished(name, confirmed)
        assert held or name not in self.unread
        self.running.discard(name)
        if held:
            self.held.add(name)
        self.after()
        if not held:
            del self.tokens[name]

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def is_sound(self) -> None:
        self.table.check_integrity()

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        for name in list(self.tokens):
            if name not in self.held and name not in self.loads:
                if self.table.finished(name, 0):
                    self.held.add(name)
            elif name in self.loads:
                self.table.finished(name, 0)
        for name in list(self.loads):
            self.table.load_done(name)
        self.after()
        while self.lookups:
            wanted = self.lookups.pop()
            self.answer(wanted, bytes(wanted.end - wanted.first))
        self.step()
        for name, left in self.unread.items():
            self.table.gathered(name, left)
        self.unread.clear()
        self.workers_let_go()
        self.after()
        self.table.check_integrity()
        assert len(self.table) == 0
        assert self.leased == set()


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
