"""Which replicas hand over to which: settled when they appear, and said once."""

from __future__ import annotations

from typing import Any

import pytest

from router import pairing as pairing_module
from router.pairing import Pairing
from workers.messages import KVLayout, ReplicaInfo, Role, Transfer


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged. Not caplog: engines and Ray in the same test process set up logging for themselves."""
    lines: list[str] = []
    monkeypatch.setattr(pairing_module.logger, "error", lambda text, *values: lines.append(text % values))
    return lines


def replica(name: str, role: Role, **layout: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "model": "m", "engine": "e", "kv_dtype": "f", "layers": 1, "kv_heads": 4, "head_size": 1, "block_tokens": 16,
        "layout": "l", "platform": "cpu",
    }  # fmt: skip
    transfer = Transfer("nixl", f"engine-of-{name}", KVLayout(**fields | layout))
    return ReplicaInfo(name, role, "node", "h:1", ("m",), transfer=transfer)


def test_replicas_that_fit_are_a_pair_in_either_direction() -> None:
    pairing = Pairing()
    pairing.update([replica("p", "prefill"), replica("d", "decode")])
    assert pairing.can("p", "d")
    assert pairing.can("d", "p")
    assert not pairing.can("p", "p")
    assert pairing.refusals == []


def test_those_that_do_not_are_refused_when_they_appear_with_both_layouts(
    said: list[str],
) -> None:
    pairing = Pairing()
    replicas = [replica("p", "prefill", tensor_parallel=3), replica("d0", "decode", tensor_parallel=2),
                replica("d1", "decode", tensor_parallel=2)]  # fmt: skip
    pairing.update(replicas)
    pairing.update(replicas)
    assert not pairing.can("p", "d0")
    assert not pairing.can("p", "d1")
    (line,) = said
    for size in (2, 3):
        assert f"tensor_parallel={size}" in line
    assert len(pairing.refusals) == 1


def test_a_replica_without_a_way_for_kv_is_in_no_pair() -> None:
    pairing = Pairing()
    pairing.update([replica("p", "prefill"), ReplicaInfo("d", "decode", "node", "h:1", ("m",))])
    assert not pairing.can("p", "d")
    assert not pairing.can("p", "unheard of")


def test_one_that_left_is_in_none_any_more_and_another_of_its_kind_is_looked_at_anew(
    said: list[str],
) -> None:
    pairing = Pairing()
    odd = replica("p", "prefill", layers=2)
    pairing.update([odd, replica("d", "decode")])
    pairing.update([replica("d", "decode")])
    assert (pairing.refusals, pairing.can("p", "d")) == ([], False)
    said.clear()
    pairing.update([odd, replica("d", "decode")])
    assert len(said) == 1
