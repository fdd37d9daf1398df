"""Our connector among vLLM's arguments, alone and beside another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workers.vllm.arguments import EngineArgumentError
from workers.vllm.transfer_config import transfer_config

OURS = {
    "kv_connector": "MantaConnector",
    "kv_connector_module_path": "workers.vllm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"socket": "s"},
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}


@pytest.mark.parametrize("args", [{}, {"dtype": "float32"}, {"kv-transfer-config": None}])
def test_alone_a_failed_load_is_computed(args: dict[str, Any]) -> None:
    assert transfer_config(args, {"socket": "s"}) == {**OURS, "kv_load_failure_policy": "recompute"}


@pytest.mark.parametrize("name", ["kv-transfer-config", "kv_transfer_config"])
@pytest.mark.parametrize("form", [dict, json.dumps])
def test_another_connector_comes_first_and_keeps_its_role(name: str, form: Any) -> None:
    config = transfer_config({name: form(NIXL | {"engine_id": "me"})}, {"socket": "s"})
    assert config == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": "me",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [NIXL, OURS]},
    }


def test_several_connectors_stay_in_their_order() -> None:
    given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NIXL, {"x": 1}]}}
    config = transfer_config({"kv-transfer-config": given}, {"socket": "s"})
    assert config["kv_connector_extra_config"]["connectors"] == [NIXL, {"x": 1}, OURS]


@pytest.mark.parametrize(
    "args", [{"kv-transfer-config": 7}, {"kv-transfer-config": "["}, {"kv-transfer-config": "[]"},
             {"kv_transfer_config.kv_role": "kv_both"}],
)  # fmt: skip
def test_what_is_no_configuration_is_named(args: dict[str, Any]) -> None:
    with pytest.raises(EngineArgumentError, match=r"kv.transfer.config"):
        transfer_config(args, {})
