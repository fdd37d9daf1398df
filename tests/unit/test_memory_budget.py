"""How much of the object store chunks may take, and what is said when it is too small."""

from __future__ import annotations

import pytest

from cache_store.memory_budget import MOST, SHARE, dram_budget, shared_memory_bytes
from cache_store.node_errors import CacheSetupError

MIB = 1 << 20


def test_without_a_number_it_is_a_share_of_the_object_store() -> None:
    assert dram_budget(0, 1000 * MIB, 2000 * MIB) == int(SHARE * 1000 * MIB)


def test_a_number_that_fits_is_taken() -> None:
    assert dram_budget(500 * MIB, 1000 * MIB, 2000 * MIB) == 500 * MIB
    assert dram_budget(int(MOST * 1000) * MIB, 1000 * MIB, 2000 * MIB) == int(MOST * 1000) * MIB


def test_a_budget_larger_than_the_object_store_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        CacheSetupError, match=r"cache\.dram\.mib is 950 .* has 1000 MiB; needed: at most 900"
    ):
        dram_budget(950 * MIB, 1000 * MIB, 2000 * MIB)


def test_an_object_store_larger_than_shared_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(CacheSetupError, match=r"object store has 1000 MiB and /dev/shm only 64 MiB"):
        dram_budget(0, 1000 * MIB, 64 * MIB)


def test_the_size_of_shared_memory_is_that_of_its_file_system() -> None:
    assert shared_memory_bytes() > 0
