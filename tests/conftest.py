"""What every test run needs before Ray is imported anywhere."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from cluster import ray_cluster

ray_cluster.use_local_ray()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# A second instead of half a minute in which a stopped router stays for load balancers.
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
# State files and Ray's session folders of the tests; a short path, since Ray puts sockets there.
os.environ["MANTA_STATE"] = tempfile.mkdtemp(prefix="mt-")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that is connected to no Ray, whatever ran before in this one."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)


class LogLines(logging.Handler):
    """What was logged, as people read it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def tier_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What tiers of the store log about their health.

    Not caplog: engines and Ray in the same test process set up logging for themselves, and switch off loggers.
    """
    logger, handler = logging.getLogger("cache_store.tier_health"), LogLines()
    before = logger.level
    monkeypatch.setattr(logger, "disabled", False)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Ray's logs are worth something only where a test has failed."""
    if exitstatus == 0:
        shutil.rmtree(os.environ["MANTA_STATE"], ignore_errors=True)
    else:
        print(f"\nlogs of Ray are in {os.environ['MANTA_STATE']}")
