"""What one replica asks of Ray, from its pool and its engine's arguments. Pure: plain dicts out."""

from __future__ import annotations

from typing import Any, NamedTuple

from workers.config import EngineConfig, PoolConfig


class Placement(NamedTuple):
    """Options of the Serve deployment, and arguments that the engine needs to fit them."""

    ray_actor_options: dict[str, Any]
    placement_group_bundles: list[dict[str, float]] | None
    placement_group_strategy: str | None
    engine_args: dict[str, Any]


def place(engine: EngineConfig, pool: PoolConfig, platform: str) -> Placement:
    """`platform` is `cpu` or `cuda`.

    A GPU replica takes tensor x pipeline parallel GPUs of one node, with vLLM's mp executor. One larger than a node
    gets a placement group of one bundle per GPU, and vLLM's ray executor finds the group by itself. Raises ValueError
    for a number of GPUs that contradicts the parallel sizes.
    """
    resources = pool.resources
    options: dict[str, Any] = {"num_cpus": resources.num_cpus}
    if resources.custom:
        options["resources"] = dict(resources.custom)
    if engine.kind == "sim" or platform == "cpu":
        return Placement(options, None, None, {})
    needed = ranks(engine)
    if resources.gpus is not None and resources.gpus != needed:
        raise ValueError(
            f"pools.{pool.role}.resources.gpus is {resources.gpus}; needed: {needed}, "
            "tensor-parallel-size x pipeline-parallel-size of engine.args"
        )
    if needed <= resources.gpus_per_node:
        options["num_gpus"] = needed
        executor = {} if needed == 1 else {"distributed-executor-backend": "mp"}
        return Placement(options, None, None, executor)
    # The replica itself runs in the first bundle, so that one holds all that it asks for.
    driver: dict[str, float] = {"CPU": max(1.0, resources.num_cpus), **resources.custom}
    bundles = [driver, *({"GPU": 1.0, "CPU": 1.0} for _ in range(needed))]
    return Placement(options, bundles, "PACK", {"distributed-executor-backend": "ray"})


def ranks(engine: EngineConfig) -> int:
    """Worker processes of one engine: tensor x pipeline parallel size."""
    return _parallel_size(engine, "tensor") * _parallel_size(engine, "pipeline")


def _parallel_size(engine: EngineConfig, kind: str) -> int:
    name = f"{kind}-parallel-size"
    return int(engine.args.get(name, engine.args.get(name.replace("-", "_"), 1)))
