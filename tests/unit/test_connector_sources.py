"""A plan counts a prompt's chunks from its first; a look-up from where it begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.wire import Source
from workers.vllm.connector.lookups import behind

sources = st.lists(
    st.builds(Source, st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 10)), max_size=5
)


@given(sources, st.integers(0, 25))
def test_every_chunk_behind_the_beginning_keeps_its_source_and_no_other_has_one(
    plan: list[Source], first: int
) -> None:
    named = {
        (s.node, chunk - first) for s in plan for chunk in range(s.first, s.first + s.count) if chunk >= first
    }
    shifted = {(s.node, chunk) for s in behind(plan, first) for chunk in range(s.first, s.first + s.count)}
    assert shifted == named
    assert all(source.first >= 0 and source.count > 0 for source in behind(plan, first))
