"""Clusters that tests share the shape of."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.in_process import Cluster, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Two fast replicas and a router."""
    async with running(2) as cluster:
        yield cluster
