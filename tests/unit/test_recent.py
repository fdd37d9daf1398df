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


def test_the_oldest_make_room() -> None:
    recent, _ = make(most=2)
    for first in (1, 2, 3):
        recent.add("a", chain(first, 0))
    assert len(recent) == 2
    assert recent.leading(chain(1, 0)) == {}
    assert recent.leading(chain(3, 0)) == {"a": 2}


prompts = st.lists(st.integers(0, 2), max_size=5)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), prompts, st.floats(0, 1)), max_size=30),
    prompts,
    st.integers(1, 8),
)
def test_it_knows_the_longest_prefix_of_each_replica(
    events: list[tuple[str, list[int], float]], asked: list[int], most: int
) -> None:
    recent, time = make(keep_s=2.0, most=most)
    added: list[tuple[float, str, list[ChunkKey]]] = []
    for replica, prompt, passed in events:
        time[0] += passed
        recent.add(replica, chain(*prompt))
        added += [(time[0], replica, chain(*prompt))] if prompt else []
        recent.check_integrity()
    keys = chain(*asked)
    expected: dict[str, int] = {}
    for at, replica, prefix in added[-most:]:
        if at + 2.0 > time[0] and keys[:1] == prefix[:1] != []:
            shared = sum(mine == theirs for mine, theirs in zip(keys, prefix, strict=False))
            expected[replica] = max(shared, expected.get(replica, 0))
    assert recent.leading(keys) == expected
    recent.check_integrity()
