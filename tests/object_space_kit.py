"""What every `ObjectSpace` does: each implementation is put through these."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache_store.object_space import ObjectSpace

NBYTES = 300_000


def payload(seed: int = 1, nbytes: int = NBYTES) -> bytearray:
    return bytearray((seed + i * 7) % 256 for i in range(nbytes))


def holds_a_copy(space: ObjectSpace) -> None:
    data = payload()
    held = space.put(memoryview(data))
    expected, data[:] = bytes(data), bytes(len(data))
    assert held.nbytes == len(expected)
    assert (held.view.format, held.view.nbytes, held.view.readonly) == ("B", len(expected), True)
    assert held.view == expected
    held.free()


def puts_what_is_read_only(space: ObjectSpace) -> None:
    held = space.put(memoryview(bytes(payload())))
    assert held.view == payload()
    held.free()


def frees_once(space: ObjectSpace) -> None:
    held = space.put(memoryview(payload()))
    held.free()
    with pytest.raises(ValueError, match="twice"):
        held.free()


def keeps_nothing_of_the_payload(space: ObjectSpace) -> None:
    view = memoryview(payload())
    held = space.put(view)
    view.release()
    held.free()


def pulls_a_copy_that_outlives_the_original(space: ObjectSpace) -> None:
    held = space.put(memoryview(payload()))
    pulled = space.pull(held.ref, 10.0)
    held.free()
    assert pulled.view == payload()
    pulled.free()


def nothing_lingers_without_borrowers(space: ObjectSpace) -> None:
    for seed in range(3):
        space.put(memoryview(payload(seed))).free()
    assert space.lingering() == 0


CONTRACT: tuple[Callable[[ObjectSpace], None], ...] = (
    holds_a_copy,
    puts_what_is_read_only,
    frees_once,
    keeps_nothing_of_the_payload,
    pulls_a_copy_that_outlives_the_original,
    nothing_lingers_without_borrowers,
)
