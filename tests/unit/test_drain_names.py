"""What `manta drain NAME` means by a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.draining import resolve
from router.errors import ApiError
from workers.messages import ReplicaInfo


def replica(id: str, node: str, address: str) -> ReplicaInfo:
    return ReplicaInfo(id=id, role="unified", node=node, address=address, models=("m",))


REPLICAS = [
    replica("unified-aa1", "f00d", "10.0.0.1:4001"),
    replica("unified-aa2", "f00d", "10.0.0.1:4002"),
    replica("unified-b", "beef", "10.0.0.2:4001"),
    replica("unified-b.1", "beef", "10.0.0.2:4002"),
    replica("prefill-c", "bead", "[fd00::3]:4001"),
]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("unified-aa1", ["unified-aa1"]),
        ("unified-b", ["unified-b"]),
        ("unified-b.", ["unified-b.1"]),
        ("prefill", ["prefill-c"]),
        ("10.0.0.2:4002", ["unified-b.1"]),
        ("f00d", ["unified-aa1", "unified-aa2"]),
        ("f", ["unified-aa1", "unified-aa2"]),
        ("10.0.0.1", ["unified-aa1", "unified-aa2"]),
        ("fd00::3", ["prefill-c"]),
        ("bee", ["unified-b", "unified-b.1"]),
    ],
)
def test_a_name_is_a_replica_or_all_of_a_node(name: str, named: list[str]) -> None:
    assert [info.id for info in resolve(name, REPLICAS)] == named


@pytest.mark.parametrize(
    ("name", "candidates"),
    [("unified-aa", ["unified-aa1", "unified-aa2"]), ("be", ["bead", "beef"])],
)
def test_the_beginning_of_several_names_is_refused_with_all_of_them(name: str, candidates: list[str]) -> None:
    with pytest.raises(ApiError) as refused:
        resolve(name, REPLICAS)
    assert refused.value.status == 409
    assert all(candidate in refused.value.message for candidate in candidates)


@pytest.mark.parametrize("name", ["", "decode-x", "10.0.0.9", "10.0.0", "nified-aa1"])
def test_a_name_of_nothing_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        resolve(name, REPLICAS)
    assert refused.value.status == 404
    assert "unified-aa1" in refused.value.message
    assert "beef (10.0.0.2)" in refused.value.message


def test_without_replicas_the_refusal_says_so() -> None:
    with pytest.raises(ApiError, match="There are no replicas"):
        resolve("unified-aa1", [])


IDS = st.text("ab.-1", min_size=1, max_size=4)


@given(
    st.lists(st.tuples(IDS, st.sampled_from(["n1", "n12", "a", "ab"])), unique_by=lambda each: each[0]), IDS
)
def test_what_a_name_names_is_never_a_guess(there: list[tuple[str, str]], name: str) -> None:
    replicas = [replica(id, node, "10.0.0.1:1") for id, node in there]
    beginnings = {info.id for info in replicas if info.id.startswith(name)}
    beginnings |= {info.node for info in replicas if info.node.startswith(name)}
    whole = {info.id for info in replicas} | {info.node for info in replicas}
    if name not in whole and len(beginnings) != 1:
        with pytest.raises(ApiError) as refused:
            resolve(name, replicas)
        assert refused.value.status == (409 if beginnings else 404)
        return
    found = resolve(name, replicas)
    ids, nodes = {info.id for info in found}, {info.node for info in found}
    assert len(nodes) == 1
    assert len(ids) == 1 or ids == {info.id for info in replicas if info.node in nodes}
    assert name not in {info.id for info in replicas} or ids == {name}
