"""Hosts for tests: a lab for each module, hosts for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.hosts.host import Host
from tests.hosts.lab import Lab, why_not


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Without hosts, until some are made. Where a lab can't be, the test is skipped."""
    if reason := why_not():
        pytest.skip(reason)
    with Lab() as lab:
        yield lab


@pytest.fixture
def hosts(lab: Lab) -> Iterator[Callable[..., list[Host]]]:
    """Makes hosts that are removed after the test: `a, b = hosts("a", "b", shm_mib=64)`."""
    made: list[Host] = []

    def make(*names: str, shm_mib: int = 64) -> list[Host]:
        new = lab.make(names, shm_mib)
        made.extend(new)
        return new

    yield make
    for host in made:
        host.remove()
