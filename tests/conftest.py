"""What every test run needs before Ray is imported anywhere."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from cluster import ray_cluster

ray_cluster.use_local_ray()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# A second instead of half a minute in which a stopped router stays for load balancers.
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
# State files and Ray's session folders of the tests; a short path, since Ray puts sockets there.
os.environ["MANTA_STATE"] = tempfile.mkdtemp(prefix="mt-")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Ray's logs are worth something only where a test has failed."""
    if exitstatus == 0:
        shutil.rmtree(os.environ["MANTA_STATE"], ignore_errors=True)
    else:
        print(f"\nlogs of Ray are in {os.environ['MANTA_STATE']}")
