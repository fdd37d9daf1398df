"""The files of `cluster/ray-up/`: they are current, Ray takes them, and all that they name is there."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND
from ray.serve.schema import ServeDeploySchema

from cluster.cloud_hosts import CLIENTS
from cluster.config import ClusterConfig
from cluster.export import serve_text
from cluster.ray_up import ENVIRONMENT, OnPremises, Provider, RayUp, Shipping, ray_up_text

pytestmark = pytest.mark.usefixtures("no_cluster")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster" / "ray-up"
PROVIDERS: dict[Provider, str] = {"local": "onprem.yaml", "aws": "aws.yaml", "gcp": "gcp.yaml"}
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WHEEL = f"dist/manta_serve-{PROJECT['version']}-py3-none-any.whl"
CONFIG = ClusterConfig.load(FOLDER / "manta.yaml")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    name: Provider = request.param
    return name


@pytest.fixture
def data(provider: Provider) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / PROVIDERS[provider]).read_text(encoding="utf-8"))
    return loaded


def text_of(provider: Provider, config: ClusterConfig = CONFIG, **options: Any) -> str:
    return ray_up_text(RayUp(config, Shipping(WHEEL), OnPremises(**options)), provider)


def commands(data: dict[str, Any]) -> list[str]:
    """All that runs on hosts."""
    found = [command for key, value in data.items() if key.endswith("_commands") for command in value]
    assert found
    return found


def workers(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Node types but the head's."""
    return {
        name: node for name, node in data["available_node_types"].items() if name != data["head_node_type"]
    }


def offered(data: dict[str, Any]) -> set[str]:
    """Roles that some host takes."""
    if data["provider"]["type"] != "local":
        names = [name for node in workers(data).values() for name in node["resources"]]
        return {name.removeprefix("manta_") for name in names if name.startswith("manta_")}
    return {role for roles in roles_by_host(data).values() for role in roles}


def roles_by_host(data: dict[str, Any]) -> dict[str, list[str]]:
    listed = next(command for command in data["setup_commands"] if "~/manta/roles" in command)
    lines = [line.split() for line in re.findall(r"'([^'%]+)' \\$", listed, re.MULTILINE)]
    return {host: roles for host, *roles in lines}


# --- current, and as Ray wants them


def test_the_committed_files_are_the_generated_ones(provider: Provider) -> None:
    name = PROVIDERS[provider]
    assert (FOLDER / name).read_text(encoding="utf-8") == text_of(provider), (
        f"run: manta export ray-up cluster/ray-up/manta.yaml --provider {provider} -o cluster/ray-up/{name}"
    )


def test_the_committed_serve_file_is_the_generated_one() -> None:
    assert (FOLDER / "serve.yaml").read_text(encoding="utf-8") == serve_text(CONFIG), (
        "run: manta export serve cluster/ray-up/manta.yaml -o cluster/ray-up/serve.yaml"
    )


def test_rays_schema_takes_the_file(data: dict[str, Any]) -> None:
    jsonschema.validate(data, SCHEMA)


def test_rays_launcher_takes_the_file_with_its_defaults(data: dict[str, Any]) -> None:
    validate_config(prepare_config(data))


def test_a_misspelt_key_would_not_pass(data: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"setup_comands": []}, SCHEMA)


# --- hosts


def test_the_heads_type_exists_and_bounds_are_in_order(data: dict[str, Any]) -> None:
    prepared = prepare_config(data)
    types = prepared["available_node_types"]
    assert prepared["head_node_type"] in types
    assert all(0 <= node["min_workers"] <= node["max_workers"] for node in types.values())
    assert 0 < sum(node["min_workers"] for node in types.values()) <= prepared["max_workers"]
    assert sum(node["max_workers"] for node in types.values()) == prepared["max_workers"]


def test_the_head_takes_no_replica(data: dict[str, Any]) -> None:
    start = data["head_start_ray_commands"][-1].split()
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(start)
    assert not any(word.startswith("--resources") for word in start)
    if data["provider"]["type"] == "local":
        assert data["provider"]["head_ip"] not in roles_by_host(data)
    else:
        head = data["available_node_types"][data["head_node_type"]]
        assert head["resources"] == {"CPU": 0}
        assert head["max_workers"] == 0


def test_every_role_has_hosts_and_every_listed_host_is_a_worker(data: dict[str, Any]) -> None:
    assert offered(data) == {"router", *(pool.role for pool in CONFIG.pools)}
    if data["provider"]["type"] == "local":
        assert list(roles_by_host(data)) == data["provider"]["worker_ips"]
        assert data["max_workers"] == len(data["provider"]["worker_ips"])


def test_hosts_offer_all_that_the_deployments_ask_for(data: dict[str, Any]) -> None:
    file = yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(file)
    asked: dict[str, set[str]] = {}
    for deployment in file["applications"][0]["deployments"]:
        options = deployment["ray_actor_options"]
        asked[deployment["name"]] = set(options.get("resources", {})) | (
            {"GPU"} if options.get("num_gpus") else set()
        )
    assert asked == {
        "router": {"manta_router"}, "decode": {"manta_decode", "GPU"}, "prefill": {"manta_prefill", "GPU"},
    }  # fmt: skip
    if data["provider"]["type"] != "local":
        for name, wanted in asked.items():
            assert wanted <= set(workers(data)[name]["resources"])


def test_addresses_are_those_of_a_network_and_never_of_one_host(data: dict[str, Any]) -> None:
    assert "localhost" not in yaml.safe_dump(data)
    assert "127.0.0.1" not in yaml.safe_dump(data)
    if data["provider"]["type"] == "local":
        head = data["provider"]["head_ip"]
        assert not any(ip_address(host).is_loopback for host in [head, *data["provider"]["worker_ips"]])
        assert f"--node-ip-address={head}" in data["head_start_ray_commands"][-1]


def test_cloud_hosts_have_room_on_their_disks_and_gpu_hosts_lie_near_each_other() -> None:
    aws, gcp = (
        yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")) for name in ("aws.yaml", "gcp.yaml")
    )
    assert "," not in aws["provider"]["availability_zone"]
    for name, node in aws["available_node_types"].items():
        config = node["node_config"]
        ebs = config["BlockDeviceMappings"][0]["Ebs"]
        assert ebs["Encrypted"]
        assert ebs["VolumeSize"] >= (300 if "GPU" in node["resources"] else 100)
        assert config["MetadataOptions"] == {"HttpTokens": "required"}
        assert ("Placement" in config) == ("GPU" in node["resources"])
        assert ("IamInstanceProfile" in config) == (name == "head")
        assert ("sg-ROUTER-FILL-IN" in config["SecurityGroupIds"]) == (name == "router")
    zone = gcp["provider"]["availability_zone"]
    for name, node in gcp["available_node_types"].items():
        config = node["node_config"]
        boot, *local = config["disks"]
        assert boot["initializeParams"]["diskSizeGb"] >= (300 if "GPU" in node["resources"] else 100)
        assert all(disk["initializeParams"]["diskType"].split("/")[1] == zone for disk in config["disks"])
        assert bool(local) == (name != "head")
        assert ("scheduling" in config) == ("GPU" in node["resources"])
        assert ("serviceAccounts" in config) == (name == "head")
        assert ("manta-router" in config["tags"]["items"]) == (name == "router")


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_spot_is_one_line_to_take_over(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    option = {"aws.yaml": "InstanceMarketOptions: {MarketType: spot}", "gcp.yaml": "provisioningModel: SPOT"}[
        name
    ]
    assert all("#" in line for line in text.splitlines() if option in line)
    assert text.count(option) == 3


# --- what runs on them


def test_every_variable_is_set_on_head_and_workers_alike(data: dict[str, Any]) -> None:
    prepared = prepare_config(data)
    for kind in ("head_setup_commands", "worker_setup_commands"):
        written = next(command for command in prepared[kind] if "~/manta/ray.env" in command)
        assert set(re.findall(r"'(\w+)=", written)) == set(ENVIRONMENT)
    # A node type with setup commands of its own would replace these.
    assert not any("worker_setup_commands" in node for node in prepared["available_node_types"].values())


def test_a_dead_host_is_noticed_in_seconds() -> None:
    period, timeout, failures, delay = (
        int(ENVIRONMENT[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold", "initial_delay_ms")
    )
    assert delay == 0
    assert (period + timeout) * failures <= 6000


def test_the_token_is_asked_for_and_brought_along(data: dict[str, Any]) -> None:
    assert ENVIRONMENT["RAY_AUTH_MODE"] == "token"
    assert data["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_scripts_that_commands_run_are_shipped_and_executable(data: dict[str, Any]) -> None:
    assert data["file_mounts"]["~/manta/ray-up"] == "cluster/ray-up"
    scripts = {name for command in commands(data) for name in re.findall(r"~/manta/ray-up/(\S+)", command)}
    on_premises = {"hosts.sh"} if data["provider"]["type"] == "local" else set()
    assert scripts == {"start.sh", "install.sh", "cache-disk.sh"} | on_premises
    assert ENVIRONMENT["RAY_SERVE_HAPROXY_BINARY_PATH"] == "$HOME/manta/ray-up/haproxy.sh"
    for script in [*FOLDER.glob("*.sh"), FOLDER / "bin" / "ray"]:
        assert script.stat().st_mode & 0o111, script.name
    called = {
        name for path in FOLDER.glob("*.sh") for name in re.findall(r"\$here/([\w.-]+)", path.read_text())
    }
    assert called
    assert all((FOLDER / name).exists() for name in called)


def test_what_is_mounted_is_in_the_repository_or_built_from_it(data: dict[str, Any]) -> None:
    here = {source for source in data["file_mounts"].values() if not source.startswith("~")}
    assert here == {"cluster/ray-up", "requirements", WHEEL}


def test_versions_are_those_of_the_lock(data: dict[str, Any]) -> None:
    install = next(command for command in data["setup_commands"] if "install.sh" in command).split()
    assert install[1:] == ["gpu", Path(WHEEL).name]
    lock = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8").splitlines()
    assert f"ray=={version('ray')}" in lock
    names = {line.partition("==")[0] for line in lock}
    for provider, requirement in CLIENTS.items():
        if provider != data["provider"]["type"]:
            continue
        (command,) = data["head_setup_commands"]
        assert command.endswith(requirement)
        assert "-c ~/manta/requirements/gpu.lock" in command
        assert "==" in requirement
        assert requirement.partition("==")[0] not in names


def test_hosts_that_are_added_reach_the_autoscaler_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hosts.sh relies on: a new provider of the same cluster brings Ray's own list up to date."""
    from ray.autoscaler._private.local import node_provider

    monkeypatch.setattr(node_provider, "get_lock_path", lambda name: str(tmp_path / f"{name}.lock"))
    monkeypatch.setattr(node_provider, "get_state_path", lambda name: str(tmp_path / f"{name}.state"))
    hosts = {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    running = node_provider.LocalNodeProvider(hosts, "manta")
    worker = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}
    running.create_node({}, worker, 2)
    assert running.non_terminated_nodes(worker) == ["10.0.0.2"]
    node_provider.LocalNodeProvider(hosts | {"worker_ips": ["10.0.0.2", "10.0.0.3"]}, "manta")
    running.create_node({}, worker, 1)
    assert running.non_terminated_nodes(worker) == ["10.0.0.2", "10.0.0.3"]
    assert "LocalNodeProvider(config[" in (FOLDER / "hosts.sh").read_text(encoding="utf-8")


def test_ray_is_started_under_the_supervisor_by_the_autoscaler_that_counts_right(
    data: dict[str, Any],
) -> None:
    (head,), (worker,) = data["head_start_ray_commands"], data["worker_start_ray_commands"]
    assert head.startswith("RAY_enable_autoscaler_v2=0 ~/manta/ray-up/start.sh ray start --block --head ")
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert worker.startswith("~/manta/ray-up/start.sh --keep ray start --block --address=$RAY_HEAD_IP:6379 ")
    assert f"--object-store-memory={CONFIG.ray.object_store_mib << 20}" in worker
    assert "docker" not in data


def test_the_unit_starts_ray_again_for_ever_and_leaves_no_process_behind() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "manta-ray.service", encoding="utf-8")
    assert unit["Service"]["Restart"] == "always"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Service"]["KillMode"] == "control-group"
    assert unit["Service"]["ExecStart"] == "@BASE@/ray-up/run.sh"
    filled = set(re.findall(r"s\|(@\w+@)\|", (FOLDER / "start.sh").read_text(encoding="utf-8")))
    assert filled == set(re.findall(r"@\w+@", (FOLDER / "manta-ray.service").read_text(encoding="utf-8")))


def test_the_policy_of_the_head_ends_no_machines_but_the_clusters() -> None:
    policy = json.loads((FOLDER / "aws-head-policy.json").read_text(encoding="utf-8"))
    for statement in policy["Statement"]:
        if "ec2:TerminateInstances" in statement["Action"]:
            assert statement["Condition"]["StringEquals"] == {"aws:ResourceTag/ray-cluster-name": CONFIG.name}
        assert not any(
            action in ("*", "ec2:*") or action.startswith("iam:") for action in statement["Action"]
        )
