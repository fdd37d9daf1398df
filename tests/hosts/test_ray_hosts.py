"""Ray over the hosts of a lab: they join by ssh, and a host that is gone is noticed in seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.host import Host, HostError
from tests.hosts.lab import Lab
from tests.hosts.ray_hosts import RayHosts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NOTICED_S = 10.0
"""Without the health-check settings Ray takes longer than this, for a crash and for a cut."""

WHERE_TASKS_RUN = """python - <<'PROGRAM'
import ray
ray.init(address='{address}', log_to_driver=False, logging_level='ERROR')
@ray.remote(num_cpus=1)
def name():
    import socket, cluster.config
    return socket.gethostname()
nodes = [node['NodeID'] for node in ray.nodes() if node['Alive'] and node['Resources'].get('CPU')]
strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
print(*sorted(ray.get([name.options(scheduling_strategy=strategy(id, soft=False)).remote() for id in nodes])))
PROGRAM"""


@pytest.fixture(scope="module")
def machines(lab: Lab) -> list[Host]:
    return lab.make(["head", "a", "b"], shm_mib=256)


@pytest.fixture(scope="module")
def ray_hosts(machines: list[Host]) -> Iterator[RayHosts]:
    head, *workers = machines
    with RayHosts(head, workers) as ray_hosts:
        yield ray_hosts


def test_three_hosts_join_and_work_runs_on_the_workers(ray_hosts: RayHosts) -> None:
    assert ray_hosts.alive() == {"head", "a", "b"}
    program = WHERE_TASKS_RUN.format(address=ray_hosts.address)
    assert ray_hosts.head.run(program, env=ray_hosts.env, timeout_s=120).stdout.split() == ["a", "b"]


def test_a_crashed_host_is_noticed_in_seconds_and_may_come_back(ray_hosts: RayHosts) -> None:
    _, b = ray_hosts.workers
    b.crash()
    ray_hosts.wait_alive({"head", "a"}, NOTICED_S)
    b.start()
    ray_hosts.join(b)
    ray_hosts.wait_alive({"head", "a", "b"}, 60.0)


def test_a_cut_host_is_noticed_in_seconds_and_joins_again_once_healed(ray_hosts: RayHosts) -> None:
    a, _ = ray_hosts.workers
    a.cut()
    ray_hosts.wait_alive({"head", "b"}, NOTICED_S)
    a.heal()
    # A raylet that was declared dead does not come back by itself.
    a.run("ray stop --force", env=ray_hosts.env)
    ray_hosts.join(a)
    ray_hosts.wait_alive({"head", "a", "b"}, 60.0)


@pytest.mark.long
def test_with_a_token_only_those_who_have_it_join(lab: Lab) -> None:
    head, worker, stranger = lab.make(["token-head", "token-worker", "stranger"], shm_mib=256)
    with RayHosts(head, [worker], token="0123456789abcdef" * 4) as ray_hosts:
        assert ray_hosts.alive() == {"token-head", "token-worker"}
        without = {name: value for name, value in ray_hosts.env.items() if "AUTH" not in name}
        with pytest.raises(HostError):
            stranger.run(
                f"ray start --address={ray_hosts.address}", env=without | {"RAY_AUTH_MODE": "disabled"}
            )
        assert ray_hosts.alive() == {"token-head", "token-worker"}
    for host in (head, worker, stranger):
        assert "raylet" not in host.run("ps -e -o args").stdout


def test_after_a_stop_nothing_of_ray_runs_on_any_host(ray_hosts: RayHosts) -> None:
    ray_hosts.stop()
    for host in (ray_hosts.head, *ray_hosts.workers):
        commands = host.run("ps -e -o args").stdout
        assert not [line for line in commands.splitlines() if "raylet" in line or "gcs_server" in line]
