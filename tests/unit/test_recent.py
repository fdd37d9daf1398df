"""What this router saw computed counts until the replica's own word of it is here, and not much longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import ChunkKey
from router.recent import RecentPrefixes


def chain(*chunks: int) -> list[ChunkKey]:
    """Keys of which each names all before it, as real ones do."""
    return [ChunkKey(bytes(chunks[: end + 1]).ljust(32, b"-")) for end in range(len(chunks))]


def make(keep_s: float = 2.0, most: int = 100) -> tuple[RecentPrefixes, list[float]]:
    time = [0.0]
    return RecentPrefixes(lambda: time[0], keep_s, most), time


def test_each_replica_has_what_it_computed_up_to_where_prompts_part() -> None:
    recent, _ = make()
    recent.add("a", chain(1, 2, 3))
    recent.add("b", chain(1, 9))
    assert recent.leading(chain(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert recent.leading(chain(1, 2, 7)) == {"a": 2, "b": 1}
    assert recent.leading(chain(2, 2)) == {}
    assert recent.leading([]) == {}


def test_a_prefix_is_believed_for_a_while() -> None:
    recent, time = make(keep_s=2.0)
    recent.add("a", chain(1, 2, 3))
    time[0] = 1.5
    recent.add("a", chain(1, 2))
    time[0] = 2.5
    assert recent.leading(chain(1, 2, 3)) == {"a": 2}
    time[0] = 3.5
    assert recent.leading(chain(1, 2, 3)) == {}
    assert len(recent) == 0


def test_a_replica_that_was_heard_twice_is_believed_to_have_what_it_says() -> None:
    recent, _ = make()
    recent.reported("a")
    recent.add("a", chain(1, 2))
    recent.add("b", chain(1))
    recent.reported("a")
    recent.add("a", chain(1))
    assert recent.leading(chain(1, 2)) == {"a": 2, "b": 1}
    recent.reported("a")
    assert recent.leading(chain(1, 2)) == {"a": 1, "b": 1}
    recent.reported("a")
    assert recent.leading(chain(1, 2)) == {"b": 1}


def test_a_replica_that_has_begun_anew_has_nothing() -> None:
    recent, _ = make()
    recent.reported("a")
    recent.add("a", chain(1, 2))
    recent.forget("a")
    recent.forget("a")
    assert (recent.leading(chain(1, 2)), len(recent)) == ({}, 0)
    recent.check_integrity()


def test_the_oldest_of_a_replica_make_room() -> None:
    recent, _ = make(most=2)
    recent.add("b", chain(1))
    for first in (1, 2, 3):
        recent.add("a", chain(first, 0))
    assert len(recent) == 3
    assert recent.leading(chain(1, 0)) == {"b": 1}
    assert recent.leading(chain(3, 0)) == {"a": 2}


prompts = st.lists(st.integers(0, 2), max_size=5)
steps = st.one_of(
    st.tuples(st.sampled_from("abc"), prompts, st.floats(0, 1)),
    st.tuples(st.sampled_from("abc"), st.sampled_from(["reported", "forget"]), st.just(0.0)),
)


@given(st.lists(steps, max_size=40), prompts, st.integers(1, 8))
def test_it_knows_the_longest_prefix_of_each_replica(
    events: list[tuple[str, list[int] | str, float]], asked: list[int], most: int
) -> None:
    recent, time = make(keep_s=2.0, most=most)
    known: dict[str, list[tuple[float, int, list[ChunkKey]]]] = {}
    for replica, what, passed in events:
        time[0] += passed
        mine = known.setdefault(replica, [])
        if isinstance(what, list):
            recent.add(replica, chain(*what))
            mine += [(time[0], 0, chain(*what))] if what else []
            known[replica] = mine[-most:]
        elif what == "reported":
            recent.reported(replica)
            known[replica] = [(at, seen + 1, prefix) for at, seen, prefix in mine if seen == 0]
        else:
            recent.forget(replica)
            known[replica] = []
        recent.check_integrity()
    keys = chain(*asked)
    expected: dict[str, int] = {}
    for replica, prefixes in known.items():
        for at, _, prefix in prefixes:
            if at + 2.0 > time[0] and keys[:1] == prefix[:1] != []:
                shared = sum(mine == theirs for mine, theirs in zip(keys, prefix, strict=False))
                expected[replica] = max(shared, expected.get(replica, 0))
    assert recent.leading(keys) == expected
    recent.check_integrity()
