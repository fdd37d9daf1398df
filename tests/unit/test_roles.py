"""Roles of nodes: what is asked of Ray, and what is said where no node has it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.check_nodes import check_nodes
from cluster.config import ClusterConfig, ConfigError
from cluster.roles import HEAD, ROUTER, SHARE, Node, missing, on_role_nodes, role_resources, wait_for_nodes
from workers.placement import Placement


def config(**placement: Any) -> ClusterConfig:
    pools = [{"role": "decode"}, {"role": "prefill"}]
    return ClusterConfig.parse(
        {"engine": {"kind": "sim"}, "pools": pools, "placement": {"use_roles": True, **placement}}
    )


def node(address: str, *resources: str) -> Node:
    return Node(address, frozenset({"CPU", *resources}))


ROUTERS, DECODE, PREFILL = (
    node("10.0.0.2", "manta_router"),
    node("10.0.0.3", "manta_decode"),
    node("10.0.0.4", "manta_prefill"),
)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_roles_that_are_not_used_ask_for_nothing() -> None:
    off = config(use_roles=False)
    assert role_resources(off) == ()
    assert missing(off, []) == []
    wait_for_nodes(off, lambda: pytest.fail("nobody has to look at the nodes"))


def test_routers_and_every_pool_ask_for_a_resource_of_their_own() -> None:
    assert role_resources(config()) == ("manta_router", "manta_decode", "manta_prefill")
    assert missing(config(), [ROUTERS, PREFILL]) == ["manta_decode"]
    assert missing(config(), [ROUTERS, DECODE, PREFILL]) == []


def test_a_replica_asks_for_a_little_of_its_role_beside_what_it_asked_for() -> None:
    one = Placement({"num_cpus": 1.0, "resources": {"h100": 1.0}}, None, None, {"a": 1})
    assert on_role_nodes(one, "decode") == Placement(
        {"num_cpus": 1.0, "resources": {"h100": 1.0, "manta_decode": SHARE}}, None, None, {"a": 1}
    )
    assert one.ray_actor_options["resources"] == {"h100": 1.0}


def test_of_a_replica_that_spans_nodes_every_part_stays_on_nodes_of_its_role() -> None:
    wide = Placement({"num_cpus": 0.0}, [{"CPU": 1.0}, {"GPU": 1.0}], "PACK", {})
    found = on_role_nodes(wide, "prefill")
    assert found.placement_group_bundles == [
        {"CPU": 1.0, "manta_prefill": SHARE},
        {"GPU": 1.0, "manta_prefill": SHARE},
    ]
    assert found.ray_actor_options == {"num_cpus": 0.0, "resources": {"manta_prefill": SHARE}}


def test_deploying_waits_for_nodes_that_are_still_coming() -> None:
    clock, told = Clock(), list[list[str]]()

    def nodes() -> list[Node]:
        return [ROUTERS, DECODE, PREFILL][: 1 + int(clock.now)]

    wait_for_nodes(config(), nodes, told.append, clock, clock.sleep)
    assert clock.now == 2
    assert told == [["manta_decode", "manta_prefill"]] * 2 + [["manta_prefill"]] * 2


def test_deploying_does_not_wait_for_ever_and_says_what_no_node_has() -> None:
    clock = Clock()
    with pytest.raises(ConfigError) as refused:
        wait_for_nodes(config(nodes_timeout_s=5), lambda: [ROUTERS, PREFILL], clock=clock, sleep=clock.sleep)
    assert 5 <= clock.now < 6
    message = str(refused.value)
    assert "no node offers manta_decode;" in message
    assert "10.0.0.2 (manta_router), 10.0.0.4 (manta_prefill)" in message
    assert """ray start --resources='{"manta_decode": 1}'""" in message


def test_on_a_ray_that_starts_nodes_on_demand_none_are_looked_for() -> None:
    wait_for_nodes(config(nodes_timeout_s=None), lambda: pytest.fail("nobody has to look at the nodes"))


def test_check_names_the_nodes_of_each_role_and_the_roles_without_one() -> None:
    findings = {
        each.subject: each for each in check_nodes(config(), [ROUTERS, DECODE, node("10.0.0.9", HEAD)])
    }
    assert {name: each.level for name, each in findings.items()} == {
        ROUTER: "ok",
        "manta_decode": "ok",
        "manta_prefill": "error",
    }
    assert "10.0.0.3" in findings["manta_decode"].message
    assert '"manta_prefill": 1' in findings["manta_prefill"].message


def test_check_warns_of_a_head_that_runs_more_than_the_head() -> None:
    head = node("10.0.0.1", HEAD, "manta_router")
    levels = {each.subject: each.level for each in check_nodes(config(), [head, DECODE, PREFILL])}
    assert levels["head"] == "warning"
    alone = node("10.0.0.1", HEAD, "manta_router", "manta_decode", "manta_prefill")
    assert {each.level for each in check_nodes(config(), [alone])} == {"ok"}


def test_check_says_when_roles_are_off() -> None:
    (only,) = check_nodes(config(use_roles=False), [ROUTERS])
    assert (only.level, only.subject) == ("ok", "placement")
