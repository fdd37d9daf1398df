"""The contract of an object space, on the heap; on Ray in `tests/cluster/test_ray_objects.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache_store.object_space import HeapSpace, ObjectGone, ObjectSpace
from tests.object_space_kit import CONTRACT, payload


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_the_heap(promise: Callable[[ObjectSpace], None]) -> None:
    promise(HeapSpace())


def test_what_was_freed_is_gone() -> None:
    space = HeapSpace()
    held = space.put(memoryview(payload()))
    held.free()
    with pytest.raises(ObjectGone):
        space.pull(held, 1.0)


def test_what_is_no_object_is_gone() -> None:
    with pytest.raises(ObjectGone):
        HeapSpace().pull("not a ref", 1.0)
