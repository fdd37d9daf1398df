"""Ray Serve LLM's PrefixTree on the workload of `index_workload`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.index_workload import REPLICAS, Workload

_FIRST_CHARACTER = 0x2000
_SURROGATES = range(0xD800, 0xE000)


class RayTree(NamedTuple):
    lookup: Callable[[], Any]
    insert_s: float
    """Seconds per sequence of the background."""


def build(work: Workload) -> RayTree:
    """Raises ImportError where this Ray has no such tree."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    tree = PrefixTree()
    tenants = [f"replica-{number}" for number in range(REPLICAS)]
    tree.add_tenants(tenants, 0.0)
    began = time.perf_counter()
    for number, sequence in enumerate(work.background):
        tree.insert(text(sequence), tenants[number % REPLICAS], float(number))
    insert_s = (time.perf_counter() - began) / len(work.background)
    for replica in range(REPLICAS):
        tree.insert(text(work.held(replica)), tenants[replica], 1e6 + replica)
    prompt = text(work.prompt)
    matched, holders = tree.prefix_match(prompt, tenants)
    assert matched == prompt, f"matched {len(matched)} of {len(prompt)} characters"
    assert holders == tenants[-1:], holders
    return RayTree(lambda: tree.prefix_match(prompt, tenants), insert_s)


def text(tokens: list[int]) -> str:
    """One character a token, a fourth of what a real text has: the tree's time goes by characters."""
    return "".join(map(_character, tokens))


def _character(token: int) -> str:
    code = _FIRST_CHARACTER + token
    return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))
