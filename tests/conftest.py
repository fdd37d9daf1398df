"""What every test run needs before Ray is imported anywhere."""

from __future__ import annotations

import os
import tempfile

from cluster import ray_cluster

ray_cluster.use_local_ray()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# A second instead of half a minute in which a stopped router stays for load balancers.
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
# State files and Ray's session folders of the tests; a short path, since Ray puts sockets there.
os.environ["MANTA_STATE"] = tempfile.mkdtemp(prefix="mt-")
