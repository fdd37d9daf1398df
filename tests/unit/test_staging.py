"""Shared memory between an engine and a cache actor."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.staging import MAX_SLOTS, StagingArea, StagingError

PAGE = mmap.PAGESIZE


def attached(area: StagingArea) -> StagingArea:
    return StagingArea.attach(os.dup(area.fd), area.slots, area.slot_bytes)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.binary(min_size=1, max_size=2 * PAGE))))
def test_both_sides_see_one_memory_and_slots_do_not_overlap(writes: list[tuple[bool, int, bytes]]) -> None:
    ours = StagingArea.create(4, 2 * PAGE)
    sides = (ours, attached(ours))
    expected = [bytearray(2 * PAGE) for _ in range(4)]
    for side, slot, data in writes:
        sides[side].slot(slot)[: len(data)] = data
        expected[slot][: len(data)] = data
        for area in sides:
            assert [bytes(area.slot(i)) for i in range(4)] == expected
    assert bytes(ours.buffer) == b"".join(expected)
    for area in sides:
        area.close()


@pytest.mark.parametrize(("asked", "got"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_slots_are_whole_pages(asked: int, got: int) -> None:
    area = StagingArea.create(2, asked)
    assert area.slot_bytes == len(area.slot(1)) == got
    area.close()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_slot_that_is_not_there_is_an_error(index: int) -> None:
    area = StagingArea.create(2, PAGE)
    with pytest.raises(IndexError, match=f"slot {index} of 2"):
        area.slot(index)
    area.close()


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 1), (-1, 1), (MAX_SLOTS + 1, 1), (1, 0), (1, -1)], ids=str
)
def test_no_area_is_made_of_nothing(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="needed"):
        StagingArea.create(slots, slot_bytes)


@pytest.mark.parametrize(
    ("slots", "slot_bytes"),
    [(3, PAGE), (1, PAGE), (2, PAGE + 1), (2**62, 2**62), (-2, -PAGE), (0, PAGE), (2, 0), (MAX_SLOTS + 1, 1)],
    ids=str,
)
def test_an_area_of_another_size_than_said_is_refused(slots: int, slot_bytes: int) -> None:
    area = StagingArea.create(2, PAGE)
    before = open_descriptors()
    with pytest.raises(StagingError):
        StagingArea.attach(os.dup(area.fd), slots, slot_bytes)
    assert open_descriptors() == before
    area.close()


def test_an_area_cannot_be_shrunk_under_the_other_side() -> None:
    area = StagingArea.create(2, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(area.fd, PAGE)
    area.close()


def unsealed(folder: Path) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * PAGE)
    return fd


def a_file(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(2 * PAGE))
    return os.open(folder / "file", os.O_RDWR)


def a_pipe(folder: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def read_only(folder: Path) -> int:
    area = StagingArea.create(2, PAGE)
    fd = os.open(f"/proc/self/fd/{area.fd}", os.O_RDONLY)
    area.close()
    return fd


@pytest.mark.parametrize("make", [unsealed, a_file, a_pipe, read_only])
def test_what_is_not_sealed_writable_memory_is_refused(make: Callable[[Path], int], tmp_path: Path) -> None:
    fd = make(tmp_path)
    with pytest.raises(StagingError):
        StagingArea.attach(fd, 2, PAGE)
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize(
    "keep", [memoryview, lambda view: view[:3], lambda view: np.frombuffer(view, np.uint8)]
)
def test_a_loan_tells_whether_a_view_of_the_slot_was_kept(keep: Callable[[memoryview], object]) -> None:
    area = StagingArea.create(2, PAGE)
    for nbytes in (None, 5):
        loan = area.lend(1, nbytes)
        assert (len(loan.view), loan.view.readonly) == ((PAGE, False) if nbytes is None else (5, True))
        kept = keep(loan.view)
        assert not loan.end()
        del kept
        assert loan.end()
        with pytest.raises(ValueError, match="released"):
            loan.view[0]
    loan = area.lend(1)
    loan.view[:3] = b"abc"
    area.close()
    assert bytes(loan.view[:3]) == b"abc"
    assert loan.end()


def test_a_view_outlives_its_area() -> None:
    before = open_descriptors()
    ours = StagingArea.create(1, PAGE)
    theirs = attached(ours)
    view = theirs.slot(0)
    theirs.close()
    theirs.close()
    del theirs
    view[:4] = b"late"
    assert bytes(ours.slot(0)[:4]) == b"late"
    ours.close()
    view.release()
    del view
    assert open_descriptors() == before
