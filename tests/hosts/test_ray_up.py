"""A cluster as its operator makes it: `ray up`, `serve deploy`, changes, drains, and the end, on four hosts.

The tests are one story on one cluster, in this order.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.deployed import merged
from tests.hosts.chat_traffic import ANSWERED
from tests.hosts.host import Host, HostError, kill_tree
from tests.hosts.lab import REPOSITORY, Lab, why_not
from tests.hosts.ray_up_hosts import CHAT_KEY, ENVIRONMENT, SHARED, RayUpHosts, left_of_ray, wait_for
from tests.published_addresses import on_this_machine_only, published_addresses

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

TRAFFIC = "tests/hosts/chat_traffic.py"
CLIENTS = 4
ROUTERS, OTHERS = "a", "b"
"""Hosts: replicas run on both, the router on the first."""
SIM: dict[str, Any] = merged(
    SHARED,
    {
        "name": "lab",
        # An answer of the traffic's takes half a second.
        "engine": {"kind": "sim", "sim": {"decode_tokens_per_s": 40}},
        "cache": {"chunk_tokens": 64},
        "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 30, "resources": {"cores": 0}}],
    },
)


def scaled(replicas: int, **changes: Any) -> dict[str, Any]:
    """`SIM` with so many replicas and other sections."""
    pool = SIM["pools"][0] | {"replicas": replicas}
    return merged(SIM | {"pools": [pool]}, changes)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayUpHosts]:
    """Up, with nothing deployed."""
    if reason := why_not():
        pytest.skip(reason)
    with Lab(environment=ENVIRONMENT) as lab:
        hosts = RayUpHosts(lab, {ROUTERS: ["router", "unified"], OTHERS: ["unified"]})
        hosts.up(SIM)
        yield hosts


class Traffic:
    """What streamed chats from the operator's host have come to so far."""

    def __init__(self, cluster: RayUpHosts, stop: str) -> None:
        command = f"python {TRAFFIC} {cluster.endpoint} {CHAT_KEY} {CLIENTS} {stop}"
        self.process = cluster.operator.popen(
            f"rm -f {stop}; cd {REPOSITORY} && exec {command}", stdout=subprocess.PIPE
        )
        self.answered_by: list[str] = []
        self.failures: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def next(self, count: int) -> list[str]:
        """The replicas of so many answers whose requests began from here on."""
        begun = len(self.answered_by) + CLIENTS
        wait_for("more answers", lambda: len(self.answered_by) >= begun + count or self.failures, 120)
        assert self.failures == []
        return self.answered_by[begun:]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, _, rest = line.strip().partition(" ")
            (self.answered_by if kind == ANSWERED else self.failures).append(rest)


@contextmanager
def traffic(cluster: RayUpHosts) -> Iterator[Traffic]:
    """Ends when the last request has ended. Fails the test when one has failed."""
    flow = Traffic(cluster, "/tmp/stop-traffic")
    try:
        yield flow
        cluster.operator.run("touch /tmp/stop-traffic")
        assert flow.process.wait(120) == 0
    finally:
        kill_tree(flow.process)
        flow.process.wait()
        flow.reader.join()
    assert flow.failures == []
    assert flow.answered_by


def hosts_of(cluster: RayUpHosts, deployment: str) -> list[str]:
    """Names of the hosts of its replicas."""
    return sorted(process.host for process in cluster.processes().get(deployment, ()))


def wait_hosts(cluster: RayUpHosts, deployment: str, hosts: list[str]) -> None:
    wait_for(f"{deployment} on {hosts}", lambda: hosts_of(cluster, deployment) == hosts, 180)


def wait_ended(host: Host) -> None:
    """Killed processes take a moment to go."""
    wait_for(f"nothing of Ray on {host.name}", lambda: not left_of_ray(host), 120)


def states(cluster: RayUpHosts) -> dict[str, str]:
    return {each["id"]: each["state"] for each in cluster.admin("/admin/replicas")["replicas"]}


def test_ray_up_joins_all_hosts_and_ray_exec_runs_on_the_head(cluster: RayUpHosts) -> None:
    assert cluster.head.name in cluster.exec("hostname").split()
    for host in cluster.all:
        assert any("raylet" in line for line in left_of_ray(host))


def test_serve_deploy_puts_routers_and_replicas_where_their_roles_are(cluster: RayUpHosts) -> None:
    cluster.deploy(SIM)
    cluster.wait_ready(2)
    wait_hosts(cluster, "router", [ROUTERS])
    wait_hosts(cluster, "unified", [ROUTERS, OTHERS])


def test_a_chat_is_answered_over_http_for_those_with_a_key(cluster: RayUpHosts) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    answer = cluster.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.text
    assert answer.json["usage"]["completion_tokens"] == 5
    assert answer.headers["x-manta-replica"] in states(cluster)
    assert cluster.ask("/v1/chat/completions", body, bearer="another-key").status == 401
    assert cluster.ask("/admin/replicas").status == 401


def test_no_address_that_is_published_is_of_one_host_alone(cluster: RayUpHosts) -> None:
    details = cluster.serve_details()
    deployments = details["applications"]["lab"]["deployments"].values()
    pages = {
        "routers": cluster.admin("/admin/replicas"),
        "controller": details["controller_info"],
        "proxies": details["proxies"],
        "replicas": [each["replicas"] for each in deployments],
    }
    for whose, said in pages.items():
        found = published_addresses(said)
        assert found, f"{whose}: no address"
        assert on_this_machine_only(found) == [], whose


def test_a_change_of_user_config_restarts_no_process(cluster: RayUpHosts) -> None:
    before = cluster.settled()
    long = {"model": "sim", "prompt": "x" * 20_000, "max_tokens": 1}
    assert cluster.ask("/v1/completions", long).status == 200
    cluster.deploy(scaled(2, router={"limits": {"max_body_bytes": 10_000}}))
    wait_for("the new limit", lambda: cluster.ask("/v1/completions", long).status == 413, 120)
    assert cluster.settled() == before


def test_scaling_starts_and_stops_replicas_under_traffic_without_a_failed_request(
    cluster: RayUpHosts,
) -> None:
    before = cluster.settled()
    with traffic(cluster) as flow:
        flow.next(4)
        cluster.deploy(scaled(4))
        cluster.wait_ready(4)
        wait_hosts(cluster, "unified", [ROUTERS, ROUTERS, OTHERS, OTHERS])
        after = cluster.settled()
        assert after["router"] == before["router"]
        assert after["unified"] > before["unified"]
        flow.next(12)
        cluster.deploy(scaled(3))
        cluster.wait_ready(3)
        wait_for("three processes", lambda: len(cluster.processes().get("unified", ())) == 3, 120)
        assert cluster.settled()["unified"] < after["unified"]
        flow.next(4)


def test_a_replica_drains_under_traffic_without_a_failed_request(cluster: RayUpHosts) -> None:
    victim = cluster.wait_ready(3)[0]["id"]
    before = cluster.settled()
    with traffic(cluster) as flow:
        flow.next(8)
        assert cluster.drain(victim).startswith(f"drained: {victim}\n")
        assert states(cluster)[victim] == "draining"
        assert victim not in flow.next(8)
        assert cluster.drain(victim, "--undo").strip() == f"takes requests again: {victim}"
        cluster.wait_ready(3)
        wait_for("its answers", lambda: victim in flow.next(8), 120)
    assert cluster.settled() == before


def test_a_host_drains_under_traffic_without_a_failed_request(cluster: RayUpHosts) -> None:
    address = cluster.workers[OTHERS].address
    there = {each["id"] for each in cluster.wait_ready(3) if each["address"].rpartition(":")[0] == address}
    assert 1 <= len(there) <= 2
    with traffic(cluster) as flow:
        flow.next(8)
        assert cluster.drain(address).startswith("drained: ")
        assert {id for id, state in states(cluster).items() if state == "draining"} == there
        assert there.isdisjoint(flow.next(8))
        cluster.drain(address, "--undo")
        cluster.wait_ready(3)
        wait_for("its answers", lambda: there.intersection(flow.next(8)), 120)


def test_no_host_is_drained_when_nothing_would_be_left(cluster: RayUpHosts) -> None:
    cluster.drain(cluster.workers[OTHERS].address)
    with pytest.raises(HostError, match="No replica would be left"):
        cluster.drain(cluster.workers[ROUTERS].address)
    cluster.drain(cluster.workers[OTHERS].address, "--undo")
    cluster.wait_ready(3)


def test_a_change_of_the_arguments_restarts_every_process(cluster: RayUpHosts) -> None:
    before = cluster.settled()
    old = before["router"] | before["unified"]
    cluster.deploy(scaled(3, engine={"sim": {"decode_tokens_per_s": 50}}))

    def all_new() -> bool:
        now = cluster.processes()
        return bool(now) and old.isdisjoint(now["router"] | now["unified"])

    wait_for("other processes", all_new, 300)
    cluster.wait_ready(3)


def test_a_drained_host_is_stopped_and_its_replicas_move_without_a_failed_request(
    cluster: RayUpHosts,
) -> None:
    leaving = cluster.workers[OTHERS]
    with traffic(cluster) as flow:
        flow.next(4)
        cluster.drain(leaving.address)
        cluster.operator.ssh(leaving, "~/manta/ray-up/stop.sh", timeout_s=180)
        wait_ended(leaving)
        wait_hosts(cluster, "unified", [ROUTERS, ROUTERS, ROUTERS])
        cluster.wait_ready(3)
        flow.next(8)


def test_ray_down_forgets_the_workers_and_the_clean_up_does_not(cluster: RayUpHosts) -> None:
    cluster.type("ray down -y ~/up.yaml")
    wait_ended(cluster.head)
    assert any("supervise.sh" in line for line in left_of_ray(cluster.workers[ROUTERS]))
    cluster.type("cluster/ray-up/down.sh ~/up.yaml")
    for host in cluster.all:
        wait_ended(host)
