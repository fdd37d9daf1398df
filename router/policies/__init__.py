"""Rules by which a router picks a replica: one a module, each with what it fails at.

A policy is chosen by `router.policy.kind`: one of `KINDS`, or `package.module:Class` for one of your own.
"""

from __future__ import annotations

from router.choice import Choice, Policy, Prediction, RouteRequest, Score
from router.policies.least_loaded import LeastLoadedPolicy
from router.policies.plugins import KINDS, PolicyError, policy_from
from router.policies.predicted_ttft import PredictedTtftPolicy
from router.policies.prefix_affinity import PrefixAffinityPolicy
from router.policies.round_robin import RoundRobinPolicy
from router.policies.session import SessionPolicy

__all__ = [
    "KINDS",
    "Choice",
    "LeastLoadedPolicy",
    "Policy",
    "PolicyError",
    "PredictedTtftPolicy",
    "Prediction",
    "PrefixAffinityPolicy",
    "RoundRobinPolicy",
    "RouteRequest",
    "Score",
    "SessionPolicy",
    "policy_from",
]
