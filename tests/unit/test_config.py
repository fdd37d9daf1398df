"""One YAML, one object: what is wrong with a configuration is said by field, value found and value needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, ConfigError

CONFIGS = Path(__file__).parents[2] / "cluster" / "configs"
VALID: dict[str, Any] = {"model": {"path": "org/model"}}


def refusal(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.parse(data, "file.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_that_ships_loads_and_local_ones_stay_on_this_machine(path: Path) -> None:
    config = ClusterConfig.load(path)
    assert config.http.host == "127.0.0.1"
    assert config.endpoint == "http://127.0.0.1:8000"
    if path.stem.startswith("local"):
        assert config.router.num_cpus == 0
        assert {pool.resources.num_cpus for pool in config.pools} == {0}


def test_the_local_configurations_start_two_engines_and_eight_simulated_replicas() -> None:
    cpu, sim = (ClusterConfig.load(CONFIGS / f"local-{name}.yaml") for name in ("cpu", "sim"))
    assert (cpu.engine.kind, cpu.pools[0].replicas, cpu.pools[0].resources.cores) == ("vllm", 2, 1)
    assert (sim.engine.kind, sim.pools[0].replicas * sim.engine.sim.virtual_replicas) == ("sim", 8)


def test_a_configuration_survives_the_way_through_serves_arguments() -> None:
    config = ClusterConfig.load(CONFIGS / "local-cpu.yaml")
    assert ClusterConfig.parse(config.model_dump(mode="json")) == config


def test_a_value_out_of_range_is_named_with_what_is_needed() -> None:
    message = refusal(VALID | {"http": {"port": 70000}})
    assert message == "file.yaml: http.port: found 70000; needed: Input should be less than or equal to 65535"


def test_a_value_of_the_wrong_kind_is_named_inside_lists_too() -> None:
    message = refusal(VALID | {"pools": [{"role": "unified"}, {"role": "cook"}]})
    assert message.startswith("file.yaml: pools.1.role: found 'cook'; needed: ")
    assert "'prefill'" in message


def test_an_unknown_field_is_an_error_in_every_section() -> None:
    assert refusal(VALID | {"modle": {}}) == "file.yaml: modle: no such field (found {})"
    assert refusal(VALID | {"router": {"limits": {"max_que": 3}}}) == (
        "file.yaml: router.limits.max_que: no such field (found 3)"
    )


def test_every_finding_has_a_line_of_its_own() -> None:
    message = refusal({"http": {"port": 0}, "name": "Not A Name", "extra": 1})
    assert len(message.splitlines()) == 3
    assert all(line.startswith("file.yaml: ") for line in message.splitlines())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "model.path is empty"),
        (
            VALID | {"pools": [{"role": "unified"}, {"role": "unified"}]},
            r"pools: roles \['unified', 'unified'\]",
        ),
        (VALID | {"pools": [{"role": "prefill"}]}, "can't answer requests"),
        (
            VALID | {"engine": {"args": {"block-size": 48}}, "cache": {"chunk_tokens": 64}},
            "cache.chunk_tokens is 64; needed: a multiple of .* 48 tokens",
        ),
        (
            VALID | {"engine": {"args": {"block_size": 48}}, "cache": {"chunk_tokens": 64}},
            "a multiple of .* 48 tokens",
        ),
        (
            {"engine": {"kind": "sim", "sim": {"block_tokens": 48}}, "cache": {"chunk_tokens": 64}},
            "a multiple of .* 48 tokens",
        ),
        (
            VALID | {"pools": [{"autoscaling": {"min_replicas": 3, "max_replicas": 2}}]},
            "min_replicas is 3, more than max_replicas = 2",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterConfig.parse(data)


def test_a_file_that_can_not_be_used_says_which_and_why(tmp_path: Path) -> None:
    missing, broken, list_ = (tmp_path / name for name in ("missing.yaml", "broken.yaml", "list.yaml"))
    broken.write_text("model: {path: [}")
    list_.write_text("- model\n- pools\n")
    with pytest.raises(ConfigError, match=r"missing.yaml: can't be read \(No such file"):
        ClusterConfig.load(missing)
    with pytest.raises(ConfigError, match=r"(?s)broken.yaml: not valid YAML: .*line 1"):
        ClusterConfig.load(broken)
    with pytest.raises(ConfigError, match=r"list.yaml: found list, needed a mapping"):
        ClusterConfig.load(list_)


def test_a_configuration_can_not_be_changed_after_it_was_read() -> None:
    config = ClusterConfig.parse(VALID)
    with pytest.raises(ValueError, match="frozen"):
        config.http.port = 1  # type: ignore[misc]


def test_the_served_name_is_the_last_part_of_the_path_unless_given() -> None:
    assert ClusterConfig.parse({"model": {"path": "/models/tiny/"}}).served_name == "tiny"
    assert ClusterConfig.parse({"model": {"path": "org/model", "name": "chat"}}).served_name == "chat"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data-parallel-size", 2),
        ("data_parallel_size", 2),
        ("api-key", "k"),
        ("headless", True),
        ("config", "more.yaml"),
        ("lora-modules", ["a=b"]),
    ],
)
def test_arguments_that_cannot_work_inside_a_replica_are_refused_with_the_reason(
    name: str, value: Any
) -> None:
    said = refusal(VALID | {"engine": {"args": {name: value}}})
    assert f"args.{name} is {value!r}" in said
    assert "since" in said


def test_refused_arguments_at_the_value_that_changes_nothing_are_taken() -> None:
    args = {"data-parallel-size": 1, "headless": False, "api-key": None}
    assert ClusterConfig.parse(VALID | {"engine": {"args": args}}).engine.args == args
