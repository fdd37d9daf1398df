"""The configuration's reference: it is current, and what it says of a change is what `cluster.app` makes of one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from cluster.config_docs import RULES, Effect, Row, markdown, tables

pytestmark = pytest.mark.usefixtures("no_cluster")

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
ROWS = [row for table in tables() for row in table.rows]
DEPLOYED = [row for row in ROWS if row.effect not in ("start", "deploy")]

BASE: dict[str, Any] = {
    "model": {"path": "org/model"},
    "engine": {"kind": "vllm", "device": "cpu"},
    "pools": [{"autoscaling": {"min_replicas": 1, "max_replicas": 4}}],
    "router": {"tenants": {"a": {"api_keys": ["key-of-a"]}}},
}
"""A cluster in which every section is there."""

CHANGED: dict[str, Any] = {
    "name": "other",
    "model.path": "org/other",
    "model.name": "other",
    "model.adapters": {"public": "/adapters/one"},
    "engine.kind": "sim",
    "engine.device": "cuda",
    "engine.args": {"max-model-len": 1024},
    "engine.env": {"OMP_NUM_THREADS": "2"},
    "engine.sim.block_tokens": 64,
    "engine.sim.decode_slowdown": 0.5,
    "pools.role": "decode",
    "pools.args": {"max-model-len": 1024},
    "pools.autoscaling": None,
    "pools.resources.gpus": 0,
    "pools.resources.custom": {"fast": 1.0},
    "router.tenants": {"b": {"api_keys": ["key-of-b"]}},
    "router.tenants.api_keys": ["another-key"],
    "router.admin_key": "admin",
    "router.policy.kind": "round_robin",
    "router.policy.options": {"depth": 2},
    "cache.chunk_tokens": 512,
    "cache.share": "on",
    "cache.load_when": "always",
    "cache.every_node": True,
    "cache.ttl_s": 60.0,
    "cache.quota_mib": {"a": 64},
    "cache.default_quota_mib": 64,
    "cache.dram.mib": 64,
    "cache.dram.eviction": "lru",
    "cache.disk.path": "/var/cache/manta",
    "cache.disk.eviction": "s3fifo",
    "cache.disk.admission": "always",
    "cache.disk.mib": 8192,
    "cache.remote.uri": "s3://bucket/prefix",
    "cache.remote.admission": "always",
    "cache.save_mib_in_flight": 512,
    "cache.staging_mib": 128,
    "transfer.kind": "off",
    "transfer.backends": ["UCX", "POSIX"],
    "transfer.buffer": "cpu",
    "router.prefill.when": "always",
    "router.prefill.min_tokens": 1024,
    "router.prefill.on_no_prefill": "reject",
    "router.prefill.save": False,
    "router.prefill.soft_roles": False,
    "http.route_prefix": "/other",
    "placement.use_roles": True,
    "placement.max_replicas_per_node": 1,
    "placement.max_routers_per_node": 1,
}
"""Another valid value of fields that are no plain numbers; a number is raised by one."""


def base(row: Row) -> dict[str, Any]:
    """A simulated engine's fields matter to a cluster that has one, and options to a policy of one's own."""
    data = copy.deepcopy(BASE)
    if row.path == "router.policy.options":
        data["router"]["policy"] = {"kind": "package.module:Class"}
    if row.path.startswith("engine.sim."):
        data["engine"]["kind"] = "sim"
    if row.path.startswith("transfer."):
        data["transfer"] = {"kind": "nixl"}
    return data


def changed(row: Row) -> dict[str, Any]:
    data = base(row)
    *sections, name = row.path.split(".")
    at: Any = data
    for section in sections:
        at = at.setdefault(section, {})
        at = at[0] if section == "pools" else at["a"] if section == "tenants" else at
    if row.path in CHANGED:
        at[name] = CHANGED[row.path]
    else:
        at[name] = float(at.get(name, row.default)) + 1
    return data


def parts(data: dict[str, Any]) -> dict[str, Any]:
    """What Serve compares of the application: by kind of change, in what differs from the base."""
    from cluster.app import build

    router = build(data)._bound_deployment
    pool = router.init_args[1]._bound_deployment
    options = pool._deployment_config
    return {
        "application": router.init_args[0]["app"],
        "router": (
            router.version,
            router.ray_actor_options,
            router._replica_config.max_replicas_per_node,
        ),
        "pool": (
            pool.name,
            pool.version,
            pool.ray_actor_options,
            pool._replica_config.placement_group_bundles,
            pool._replica_config.max_replicas_per_node,
        ),
        "counts": (router.num_replicas, options.num_replicas, options.autoscaling_config),
        "live": router.user_config,
    }


def observed(before: dict[str, Any], after: dict[str, Any]) -> Effect:
    differs = {kind for kind in before if before[kind] != after[kind]}
    assert differs, "the change reaches nothing that is deployed"
    if "application" in differs:
        return "application"
    if {"router", "pool"} <= differs:
        return "both"
    if "router" in differs:
        return "routers"
    if "pool" in differs:
        return "replicas"
    return "scales" if "counts" in differs else "live"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one in the environment, building an application asks no Ray for it.
    monkeypatch.setenv("MANTA_SECRET", "a-secret-for-this-test")


def test_the_committed_reference_is_the_generated_one() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), (
        "run: python -m cluster.config_docs > docs/configuration.md"
    )


@pytest.mark.parametrize("row", DEPLOYED, ids=lambda row: row.path)
def test_a_change_costs_what_the_reference_says(row: Row) -> None:
    assert observed(parts(base(row)), parts(changed(row))) == row.effect


def test_another_pool_restarts_the_routers_that_must_know_it_and_no_other_pool() -> None:
    more = copy.deepcopy(BASE)
    more["pools"].append({"role": "decode"})
    assert observed(parts(BASE), parts(more)) == "routers"


def test_the_first_prefill_pool_restarts_the_replicas_that_are_to_fetch_from_it() -> None:
    more = copy.deepcopy(BASE)
    more["pools"].append({"role": "prefill"})
    assert observed(parts(BASE), parts(more)) == "both"


def test_an_unchanged_configuration_changes_nothing() -> None:
    assert parts(BASE) == parts(copy.deepcopy(BASE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_every_field_says_what_it_means(row: Row) -> None:
    assert row.description.strip()


def test_every_rule_is_about_something_that_exists() -> None:
    known = {row.path for row in ROWS} | {table.path for table in tables()}
    assert set(RULES) <= known | {path.partition(".")[0] for path in known}
