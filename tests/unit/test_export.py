"""`manta export serve`: the file says what the application would do, and each value in one place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import deploy_args_to_deployment_info, get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema
from typer.testing import CliRunner, Result

import cluster.cli
from cluster.app import build
from cluster.config import ClusterConfig
from cluster.export import ExportError, serve_config, serve_text
from router.config import RouterConfig

pytestmark = pytest.mark.usefixtures("no_cluster")

BASE: dict[str, Any] = {
    "name": "exported",
    "model": {"path": "/only/on/the/cluster", "name": "public"},
    "engine": {"device": "cuda", "args": {"tensor-parallel-size": 2}},
    "pools": [
        {"role": "decode", "replicas": 3, "resources": {"custom": {"fast": 1.0}}},
        {"role": "prefill", "autoscaling": {"min_replicas": 0, "max_replicas": 4}},
    ],
    "router": {"replicas": 2, "num_cpus": 1, "tenants": {"a": {"api_keys": ["env:KEY_OF_A"]}}},
    "http": {"host": "0.0.0.0", "port": 9000},
    "ray": {"object_store_mib": 1024},
}


def exported(*changes: tuple[str, Any]) -> dict[str, Any]:
    data = json.loads(json.dumps(BASE))
    for path, value in changes:
        *sections, name = path.split(".")
        at = data
        for section in sections:
            at = at[int(section)] if isinstance(at, list) else at.setdefault(section, {})
        at[name] = value
    return serve_config(ClusterConfig.parse(data))


def application(data: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any] = data["applications"][0]
    return only


def deployments(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {deployment["name"]: deployment for deployment in application(data)["deployments"]}


def code_version(data: dict[str, Any]) -> str:
    """When this changes, Serve builds the application anew and restarts its deployments."""
    return str(get_app_code_version(ServeApplicationSchema.model_validate(application(data))))


def manta(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cluster.cli.app, [str(argument) for argument in arguments])


def test_serve_takes_the_file() -> None:
    schema = ServeDeploySchema.model_validate(exported())
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 9000)
    assert [app.name for app in schema.applications] == ["exported"]
    assert schema.applications[0].import_path == "cluster.app:build"


def test_every_deployment_is_listed_with_its_count_and_what_it_asks_of_ray() -> None:
    listed = deployments(exported())
    assert list(listed) == ["decode", "prefill", "router"]
    assert listed["decode"]["num_replicas"] == 3
    assert listed["decode"]["ray_actor_options"] == {"num_cpus": 0, "num_gpus": 2, "resources": {"fast": 1}}
    assert "num_replicas" not in listed["prefill"]
    scaling = listed["prefill"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (0, 4)
    assert scaling["policy"]["policy_function"] == "workers.autoscaling:demand_policy"
    assert (listed["router"]["num_replicas"], listed["router"]["ray_actor_options"]) == (2, {"num_cpus": 1})


def test_a_replica_that_spans_hosts_brings_its_placement_group() -> None:
    spanning = exported(("engine.args.tensor-parallel-size", 4), ("pools.0.resources.gpus_per_node", 2))
    decode = deployments(spanning)["decode"]
    assert [bundle.get("GPU", 0) for bundle in decode["placement_group_bundles"]] == [0, 1, 1, 1, 1]
    assert decode["placement_group_strategy"] == "PACK"


def test_the_routers_user_config_is_what_may_change_live() -> None:
    user_config = deployments(exported())["router"]["user_config"]
    router = RouterConfig.model_validate(user_config)
    assert router.tenants["a"].api_keys == ("env:KEY_OF_A",)
    assert set(RouterConfig.model_fields) - set(user_config) == {"replicas", "num_cpus"}


def test_arguments_are_the_configuration_without_what_stands_elsewhere() -> None:
    args = application(exported())["args"]
    assert args["model"] == {"path": "/only/on/the/cluster", "name": "public"}
    assert args["pools"] == [{"role": "decode", "resources": {"custom": {"fast": 1.0}}}, {"role": "prefill"}]
    assert args["router"] == {"num_cpus": 1}
    assert "ray" not in args
    ClusterConfig.parse(args)


@pytest.mark.parametrize(
    "change",
    [
        ("router.limits", {"max_queue": 7}),
        ("router.tenants", {"b": {"api_keys": ["env:KEY_OF_B"]}}),
        ("router.replicas", 5),
        ("pools.0.replicas", 9),
        ("pools.1.autoscaling.max_replicas", 9),
        ("ray.object_store_mib", 2048),
    ],
    ids=lambda change: change[0],
)
def test_exporting_again_after_a_live_change_restarts_nothing(change: tuple[str, Any]) -> None:
    before, after = exported(), exported(change)
    if not change[0].startswith("ray."):
        assert application(before)["deployments"] != application(after)["deployments"]
    assert code_version(before) == code_version(after)


@pytest.mark.parametrize(
    "change", [("pools.0.autoscaling", {"max_replicas": 9}), ("pools.1.autoscaling", None)]
)
def test_autoscaling_that_begins_or_ends_restarts_all_as_the_file_says(change: tuple[str, Any]) -> None:
    """Serve counts a deployment's autoscaling policy as code."""
    assert code_version(exported()) != code_version(exported(change))
    assert "begins or ends" in " ".join(serve_text(ClusterConfig.parse(BASE)).replace("#", "").split())


@pytest.mark.parametrize("change", [("engine.args.max-model-len", 512), ("cache.chunk_tokens", 512)])
def test_a_change_that_restarts_engines_is_in_the_arguments(change: tuple[str, Any]) -> None:
    assert application(exported())["args"] != application(exported(change))["args"]


def test_serve_gets_the_same_deployments_from_file_and_code_as_from_the_whole_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the arguments leave out, the list of deployments gives back."""
    monkeypatch.setenv("MANTA_SECRET", "a-secret-for-this-test")
    data = application(exported(("model.path", "org/model")))
    whole = built(dict(BASE, model={"path": "org/model", "name": "public"}))
    from_file = override_deployment_info(built(data["args"]), ServeApplicationSchema.model_validate(data))
    assert set(whole) == set(from_file)
    for name, want in whole.items():
        got = from_file[name]
        assert got.replica_config.ray_actor_options == want.replica_config.ray_actor_options
        assert got.replica_config.placement_group_bundles == want.replica_config.placement_group_bundles
        for option in ("num_replicas", "graceful_shutdown_timeout_s", "request_router_config"):
            if option != "num_replicas" or want.deployment_config.autoscaling_config is None:
                assert getattr(got.deployment_config, option) == getattr(want.deployment_config, option), (
                    option
                )
        assert scaling_of(got) == scaling_of(want)
    live = RouterConfig.model_validate(from_file["router"].deployment_config.user_config)
    assert live.tenants == RouterConfig.model_validate(whole["router"].deployment_config.user_config).tenants


def built(args: dict[str, Any]) -> dict[str, Any]:
    """Serve's own record of every deployment, as its controller keeps it."""
    infos = {}
    for deployment in build_app(build(args), name="exported").deployments:
        infos[deployment.name] = deploy_args_to_deployment_info(
            deployment_name=deployment.name,
            deployment_config_proto_bytes=deployment._deployment_config.to_proto_bytes(),
            replica_config_proto_bytes=deployment._replica_config.to_proto_bytes(),
            deployer_job_id="test",
            app_name="exported",
            route_prefix=None,
        )
    return infos


def scaling_of(info: Any) -> dict[str, Any] | None:
    config = info.deployment_config.autoscaling_config
    return config and config.model_dump(mode="json")


def test_the_device_must_be_said_since_there_is_no_cluster_to_look_at() -> None:
    with pytest.raises(ExportError, match=r"engine.device is auto; needed: cpu or cuda"):
        exported(("engine.device", "auto"))


def test_no_secret_of_this_process_reaches_the_file_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANTA_SECRET", "the-clusters-own-secret")
    assert "the-clusters-own-secret" not in serve_text(ClusterConfig.parse(BASE))
    assert os.environ["MANTA_SECRET"] == "the-clusters-own-secret"
    monkeypatch.delenv("MANTA_SECRET")
    exported()
    assert "MANTA_SECRET" not in os.environ


def test_the_text_says_the_same_as_the_data() -> None:
    assert yaml.safe_load(serve_text(ClusterConfig.parse(BASE))) == exported()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_an_endpoint_that_other_machines_do_not_reach_is_pointed_out(host: str, warned: bool) -> None:
    text = serve_text(ClusterConfig.parse({"engine": {"kind": "sim"}, "http": {"host": host}}))
    assert ("FILL IN" in text) is warned


def test_the_command_writes_to_a_file_or_to_the_standard_output(tmp_path: Path) -> None:
    file, out = tmp_path / "sim.yaml", tmp_path / "serve.yaml"
    file.write_text("name: sim\nengine: {kind: sim}\n")
    printed = manta("export", "serve", file)
    assert printed.exit_code == 0, printed.output
    assert manta("export", "serve", file, "-o", out).exit_code == 0
    assert out.read_text() == printed.stdout
    assert application(yaml.safe_load(printed.stdout))["name"] == "sim"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: org/model}\n", "engine.device is auto"),
        ("name: 1\n", "name: found 1"),
    ],
)
def test_what_can_not_be_exported_is_explained_without_a_traceback(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    done = manta("export", "serve", file)
    assert done.exit_code == 1
    assert said in done.stderr
    assert isinstance(done.exception, SystemExit)


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sim.yaml"
    file.write_text("engine: {kind: sim}\n")
    done = manta("export", "serve", file, "-o", tmp_path / "no" / "serve.yaml")
    assert done.exit_code == 1
    assert "can't be written" in done.stderr
