"""What checkov finds in manifests and Dockerfile that is meant so: where, and why. Anything else is an error."""

from __future__ import annotations

from typing import NamedTuple


class Accepted(NamedTuple):
    where: str
    """Pattern of the resources that it is accepted for."""
    reason: str


RAY = r"Deployment\.manta\.(head|router|unified|decode|prefill)"
PREPULL = r"DaemonSet\.manta\.manta-prepull"
ANY = r"\w+\.manta\.[a-z-]+"

ACCEPTED = {
    "CKV_K8S_8": Accepted(
        PREPULL, "Liveness: the pod that holds an image on its node does nothing that could fail."
    ),
    "CKV_K8S_9": Accepted(PREPULL, "Readiness: nobody waits for that pod, and nothing is sent to it."),
    "CKV_K8S_15": Accepted(
        ANY,
        "Pull policy Always: tags are not moved, and a registry that is down should not keep a pod from starting.",
    ),
    "CKV_K8S_22": Accepted(
        RAY,
        "Read-only root: Ray, vLLM and the cache keep sockets in /tmp, which must be sticky, and an emptyDir is not. "
        "All other containers are read-only.",
    ),
    "CKV_K8S_35": Accepted(
        ANY,
        "Secrets as files: Ray, Manta, Redis and the hub's client read theirs from the environment, each only its own.",
    ),
    "CKV_K8S_43": Accepted(
        ANY,
        "Digests: an image's digest is known where it is built; `digest` beside `newTag` is the operator's to fill in.",
    ),
    "CKV_DOCKER_2": Accepted(
        "/Dockerfile.*", "HEALTHCHECK: Kubernetes asks by probes, and does not look at this instruction."
    ),
    "CKV_DOCKER_7": Accepted(
        "/Dockerfile.*",
        "Version of the base image: it is in the argument's default, which checkov does not read.",
    ),
}
"""Check -> where it is accepted and why."""
