"""Cores of one's own: leases never overlap, and end with their holder however it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import cores
from workers.cores import CoreLease, lease_cores, running_on, split_cores

HOLDS = """
import sys
from pathlib import Path
from workers.cores import lease_cores
lease = lease_cores(int(sys.argv[2]), Path(sys.argv[1]), {0, 1, 2, 3})
print(*lease.cores, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leases() -> Iterator[list[CoreLease]]:
    """Releases what a test puts in."""
    taken: list[CoreLease] = []
    yield taken
    for lease in taken:
        lease.release()


def test_two_leases_never_overlap(tmp_path: Path, leases: list[CoreLease]) -> None:
    for count in (2, 1, 3):
        leases.append(lease_cores(count, tmp_path, set(range(8))))
    assert [len(lease.cores) for lease in leases] == [2, 1, 3]
    assert len({core for lease in leases for core in lease.cores}) == 6


def test_a_released_core_can_be_leased_again(tmp_path: Path, leases: list[CoreLease]) -> None:
    first = lease_cores(2, tmp_path, {4, 7})
    first.release()
    first.release()
    leases.append(lease_cores(2, tmp_path, {4, 7}))
    assert set(leases[0].cores) == {4, 7}


def test_another_process_holds_its_cores_until_it_is_killed(tmp_path: Path, leases: list[CoreLease]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path), "3"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None
            theirs = set(map(int, holder.stdout.readline().split()))
            assert len(theirs) == 3
            leases.append(lease_cores(1, tmp_path, {0, 1, 2, 3}))
            assert set(leases[0].cores) == {0, 1, 2, 3} - theirs
        finally:
            holder.kill()
    leases.append(lease_cores(3, tmp_path, {0, 1, 2, 3}))
    assert set(leases[1].cores) == theirs


def test_too_few_free_cores_are_shared_with_a_warning(
    tmp_path: Path, leases: list[CoreLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not caplog: engines and Ray in the same test process set up logging for themselves.
    said: list[str] = []
    monkeypatch.setattr(cores.logger, "warning", lambda text, *values: said.append(text % values))
    leases.append(lease_cores(1, tmp_path, {0, 1}))
    assert said == []
    leases.append(lease_cores(2, tmp_path, {0, 1}))
    assert sorted(leases[1].cores) == [0, 1]
    assert len(said) == 1
    assert "2 cores asked for, 1 of 2 are free" in said[0]
    leases.append(lease_cores(3, tmp_path, {0, 1}))
    assert len(leases[2].cores) == 3
    assert set(leases[2].cores) <= {0, 1}


def test_a_lease_of_shared_cores_frees_only_its_own(tmp_path: Path, leases: list[CoreLease]) -> None:
    leases.append(lease_cores(1, tmp_path, {0, 1}))
    lease_cores(2, tmp_path, {0, 1}).release()
    leases.append(lease_cores(1, tmp_path, {0, 1}))
    assert leases[0].cores != leases[1].cores


def test_the_cores_of_a_holder_that_leaves_are_waited_for(tmp_path: Path, leases: list[CoreLease]) -> None:
    first = lease_cores(1, tmp_path, {0, 1})
    leases.append(lease_cores(1, tmp_path, {0, 1}))
    first.leave()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease_cores, 1, tmp_path, {0, 1}, leaving_s=60)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        first.release()
        leases.append(waiting.result(timeout=30))
    assert leases[1].cores == first.cores != leases[0].cores


def test_a_holder_that_leaves_for_too_long_or_stays_after_all_is_not_waited_for(
    tmp_path: Path, leases: list[CoreLease]
) -> None:
    leases.append(lease_cores(1, tmp_path, {3}))
    leases[0].leave()
    leases.append(lease_cores(1, tmp_path, {3}, leaving_s=0.1))
    leases[0].leave(False)
    began = time.monotonic()
    leases.append(lease_cores(1, tmp_path, {3}, leaving_s=600))
    assert time.monotonic() - began < 300
    assert [lease.cores for lease in leases] == [(3,)] * 3


@given(st.integers(1, 16), st.integers(1, 8))
def test_every_rank_gets_cores_and_no_two_share_while_there_are_enough(count: int, ranks: int) -> None:
    cores = tuple(range(100, 100 + count))
    groups = split_cores(cores, ranks)
    assert len(groups) == ranks
    assert all(groups)
    assert {core for group in groups for core in group} <= set(cores)
    if count >= ranks:
        assert len({core for group in groups for core in group}) == sum(map(len, groups))
        assert {len(group) for group in groups} == {count // ranks}


def test_what_starts_on_given_cores_stays_there_and_the_starter_does_not() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    seen: list[set[int]] = []
    ask = "import os; print(*os.sched_getaffinity(0))"
    with running_on((core,)):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    thread.join()
    assert seen == [{core}]
    assert child.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == before


def test_without_cores_anything_may_run_anywhere() -> None:
    before = os.sched_getaffinity(0)
    with running_on(()):
        assert os.sched_getaffinity(0) == before
