"""`manta export ray-up` for configurations and machines other than those of the files that ship."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import cluster.cli
from cluster.cloud_hosts import OFFERS
from cluster.config import ClusterConfig
from cluster.export import ExportError
from cluster.host_groups import Group, Machine, groups
from cluster.ray_up import Host, OnPremises, Provider, RayUp, Shipping, ray_up_text

pytestmark = pytest.mark.usefixtures("no_cluster")

CONFIG = ClusterConfig.load(Path(__file__).parents[2] / "cluster" / "ray-up" / "manta.yaml")
WHEEL = "dist/manta_serve-1.2.3-py3-none-any.whl"


@pytest.fixture(params=["local", "aws", "gcp"])
def provider(request: pytest.FixtureRequest) -> Provider:
    name: Provider = request.param
    return name


def text_of(provider: Provider, config: ClusterConfig = CONFIG, **options: Any) -> str:
    return ray_up_text(RayUp(config, Shipping(WHEEL), OnPremises(**options)), provider)


def roles_by_host(data: dict[str, Any]) -> dict[str, list[str]]:
    listed = next(command for command in data["setup_commands"] if "~/manta/roles" in command)
    lines = [line.split() for line in re.findall(r"'([^'%]+)' \\$", listed, re.MULTILINE)]
    return {host: roles for host, *roles in lines}


def test_keys_that_the_configuration_takes_from_variables_are_brought_along(provider: Provider) -> None:
    mounted = "~/manta/secrets.env"
    assert mounted in yaml.safe_load(text_of(provider))["file_mounts"]
    assert "MANTA_ADMIN_KEY, MANTA_API_KEY" in text_of(provider)
    keyless = CONFIG.model_copy(
        update={"router": CONFIG.router.model_copy(update={"tenants": {}, "admin_key": ""})}
    )
    assert mounted not in yaml.safe_load(text_of(provider, keyless))["file_mounts"]


def test_a_configuration_without_a_disk_tier_sets_up_no_disk(provider: Provider) -> None:
    assert yaml.safe_load(text_of(provider))["worker_setup_commands"] == [
        "~/manta/ray-up/cache-disk.sh /mnt/manta/kv"
    ]
    bare = CONFIG.model_copy(update={"cache": type(CONFIG.cache)()})
    assert yaml.safe_load(text_of(provider, bare))["worker_setup_commands"] == []


def test_an_environment_that_is_there_already_is_used_and_nothing_is_installed(provider: Provider) -> None:
    data = yaml.safe_load(ray_up_text(RayUp(CONFIG, Shipping(WHEEL, venv="/opt/manta")), provider))
    assert "~/manta/ray-up/install.sh --use /opt/manta" in data["setup_commands"]
    assert not any("requirements" in target or target.endswith(".whl") for target in data["file_mounts"])


def host_groups(machine: Machine, **pool: Any) -> Group:
    engine = {"device": "cuda", "args": {"tensor-parallel-size": pool.pop("tensor", 1)}}
    resources = {"gpus_per_node": pool.pop("gpus_per_node", 8)}
    config = ClusterConfig.parse(
        {"model": {"path": "org/model"}, "engine": engine, "pools": [{"resources": resources, **pool}]}
    )
    return groups(config, lambda gpus: machine)[-1]


@pytest.mark.parametrize(
    ("pool", "machine", "hosts"),
    [
        ({"replicas": 3}, Machine(8, 1), (3, 3)),
        ({"replicas": 3, "tensor": 2}, Machine(48, 4), (2, 2)),
        ({"replicas": 2, "tensor": 16}, Machine(192, 8), (4, 4)),
        ({"autoscaling": {"min_replicas": 0, "max_replicas": 9}}, Machine(192, 8), (0, 2)),
    ],
)
def test_there_are_as_many_hosts_as_the_replicas_need(
    pool: dict[str, Any], machine: Machine, hosts: tuple[int, int]
) -> None:
    group = host_groups(machine, **pool)
    assert (group.least, group.most) == hosts


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize(("tensor", "gpus"), [(1, 1), (2, 4), (8, 8), (16, 8)])
def test_a_replica_gets_the_smallest_machine_that_holds_it(cloud: Provider, tensor: int, gpus: int) -> None:
    data = {
        "model": {"path": "org/m"},
        "engine": {"device": "cuda", "args": {"tensor-parallel-size": tensor}},
    }
    types = yaml.safe_load(text_of(cloud, ClusterConfig.parse(data)))["available_node_types"]
    assert types["unified"]["resources"]["GPU"] == gpus
    assert types["unified"]["min_workers"] == (2 if tensor > 8 else 1)
    assert [offer.machine.gpus for offer in OFFERS["aws"]] == [offer.machine.gpus for offer in OFFERS["gcp"]]


def test_engines_without_gpus_take_the_cpu_lock_on_all_hosts(provider: Provider) -> None:
    data = yaml.safe_load(text_of(provider, ClusterConfig.parse({"engine": {"kind": "sim"}})))
    assert f"~/manta/ray-up/install.sh cpu {Path(WHEEL).name}" in data["setup_commands"]


def test_machines_that_are_given_stand_in_the_file_and_one_may_take_several_roles() -> None:
    config = ClusterConfig.parse({"engine": {"kind": "sim"}})
    workers = (Host("10.1.0.2", ("router", "unified")), Host("box-3", ("unified",)))
    data = yaml.safe_load(
        text_of("local", config, head="10.1.0.1", workers=workers, external_head="192.0.2.1")
    )
    assert roles_by_host(data) == {"10.1.0.2": ["router", "unified"], "box-3": ["unified"]}
    assert data["provider"] == {
        "type": "local", "head_ip": "10.1.0.1", "worker_ips": ["10.1.0.2", "box-3"], "external_head_ip": "192.0.2.1",
    }  # fmt: skip
    assert "FILL IN" not in text_of("local", config, head="10.1.0.1", workers=workers)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (("unified",), "no worker takes the role 'router'"),
        (("router", "decode"), "role 'decode' found; needed: router, unified"),
    ],
)
def test_roles_that_do_not_fit_the_configuration_are_refused(roles: tuple[str, ...], said: str) -> None:
    config = ClusterConfig.parse({"engine": {"kind": "sim"}})
    with pytest.raises(ExportError, match=said):
        text_of("local", config, workers=(Host("10.1.0.2", roles),))


def test_the_command_takes_the_machines_as_options(tmp_path: Path) -> None:
    file, out = tmp_path / "sim.yaml", tmp_path / "up.yaml"
    file.write_text("engine: {kind: sim}\n")
    command = ["export", "ray-up", str(file), "--provider", "local", "--wheel", WHEEL, "-o", str(out)]
    hosts = [
        "--head",
        "10.1.0.1",
        "--worker",
        "10.1.0.2=router,unified",
        "--ssh-user",
        "me",
        "--ssh-key",
        "~/k",
    ]
    done = CliRunner().invoke(cluster.cli.app, command + hosts)
    assert done.exit_code == 0, done.output
    data = yaml.safe_load(out.read_text())
    assert roles_by_host(data) == {"10.1.0.2": ["router", "unified"]}
    assert data["auth"] == {"ssh_user": "me", "ssh_private_key": "~/k"}
    refused = CliRunner().invoke(cluster.cli.app, [*command, "--worker", "10.1.0.2"])
    assert refused.exit_code == 1
    assert "needed: ADDRESS=ROLE" in refused.stderr
