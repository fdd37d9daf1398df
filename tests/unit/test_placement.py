"""What one replica asks of Ray and of vLLM, exactly: what can't be run without the machines is checked here."""

from __future__ import annotations

from typing import Any

import pytest

from workers.config import EngineConfig, PoolConfig
from workers.placement import Placement, place, ranks


def engine(**args: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"args": {name.replace("_", "-"): value for name, value in args.items()}}
    )


def pool(**resources: Any) -> PoolConfig:
    return PoolConfig.model_validate({"resources": resources})


def test_an_engine_on_cpus_asks_for_no_gpu() -> None:
    assert place(engine(), pool(), "cpu") == Placement({"num_cpus": 0.0}, None, None, {})
    assert place(engine(tensor_parallel_size=4), pool(num_cpus=2), "cpu") == Placement(
        {"num_cpus": 2.0}, None, None, {}
    )


def test_a_simulated_engine_asks_for_no_gpu_where_there_are_some() -> None:
    sim = EngineConfig(kind="sim", args={"tensor-parallel-size": 8})
    assert place(sim, pool(), "cuda") == Placement({"num_cpus": 0.0}, None, None, {})


def test_one_gpu_needs_no_executor_of_its_own() -> None:
    assert place(engine(), pool(), "cuda") == Placement({"num_cpus": 0.0, "num_gpus": 1}, None, None, {})


@pytest.mark.parametrize(
    ("tensor", "pipeline", "gpus"), [(2, 1, 2), (1, 2, 2), (2, 2, 4), (8, 1, 8), (4, 2, 8)]
)
def test_a_replica_inside_a_node_takes_its_gpus_with_vllms_mp_executor(
    tensor: int, pipeline: int, gpus: int
) -> None:
    wanted = engine(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert ranks(wanted) == gpus
    assert place(wanted, pool(), "cuda") == Placement(
        {"num_cpus": 0.0, "num_gpus": gpus}, None, None, {"distributed-executor-backend": "mp"}
    )


def test_a_replica_larger_than_a_node_gets_a_placement_group_with_vllms_ray_executor() -> None:
    found = place(engine(tensor_parallel_size=8, pipeline_parallel_size=2), pool(num_cpus=4), "cuda")
    gpu = {"GPU": 1.0, "CPU": 1.0}
    assert found == Placement(
        {"num_cpus": 4.0}, [{"CPU": 4.0}, *[gpu] * 16], "PACK", {"distributed-executor-backend": "ray"}
    )


def test_the_first_bundle_holds_what_the_replica_itself_asks_for() -> None:
    found = place(
        engine(tensor_parallel_size=2), pool(gpus_per_node=1, custom={"h100": 1.0}, num_cpus=0), "cuda"
    )
    assert found.ray_actor_options == {"num_cpus": 0.0, "resources": {"h100": 1.0}}
    assert found.placement_group_bundles is not None
    assert found.placement_group_bundles[0] == {"CPU": 1.0, "h100": 1.0}
    assert found.placement_group_bundles[1:] == [{"GPU": 1.0, "CPU": 1.0}] * 2


def test_a_node_of_fewer_gpus_is_outgrown_earlier() -> None:
    four = engine(tensor_parallel_size=4)
    assert place(four, pool(gpus_per_node=4), "cuda").placement_group_bundles is None
    assert place(four, pool(gpus_per_node=2), "cuda").placement_group_strategy == "PACK"


def test_underscores_name_the_same_arguments() -> None:
    written = EngineConfig(args={"tensor_parallel_size": 2, "pipeline-parallel-size": 2})
    assert place(written, pool(), "cuda").ray_actor_options == {"num_cpus": 0.0, "num_gpus": 4}


def test_further_resources_are_passed_to_ray() -> None:
    assert place(engine(), pool(custom={"a100": 0.5}), "cpu").ray_actor_options == {
        "num_cpus": 0.0,
        "resources": {"a100": 0.5},
    }


def test_gpus_that_fit_the_parallel_sizes_are_accepted() -> None:
    assert place(engine(tensor_parallel_size=2), pool(gpus=2), "cuda").ray_actor_options["num_gpus"] == 2


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_gpus_that_contradict_the_parallel_sizes_are_an_error(gpus: int) -> None:
    with pytest.raises(ValueError, match=rf"pools.unified.resources.gpus is {gpus}; needed: 2"):
        place(engine(tensor_parallel_size=2), pool(gpus=gpus), "cuda")


@pytest.mark.parametrize("resources", [{}, {"num_cpus": 2}, {"custom": {"h100": 1}}])
def test_serve_takes_what_is_asked_of_it(resources: dict[str, Any]) -> None:
    from ray import serve

    found = place(engine(tensor_parallel_size=16), pool(**resources), "cuda")
    asked = {
        "ray_actor_options": found.ray_actor_options,
        "placement_group_bundles": found.placement_group_bundles,
        "placement_group_strategy": found.placement_group_strategy,
    }
    deployment = serve.deployment(type("Replica", (), {}))
    # Serve checks what it is asked for at once, and raises for what the first bundle can't hold.
    assert deployment.options(**asked).ray_actor_options == found.ray_actor_options
    with pytest.raises(ValueError, match="first bundle"):
        deployment.options(**asked | {"ray_actor_options": {"num_cpus": 0, "resources": {"none": 1}}})
