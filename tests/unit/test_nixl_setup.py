"""How a replica sets vLLM's NIXL connector up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workers.transfer import TransferConfig
from workers.vllm import nixl
from workers.vllm.arguments import EngineArgumentError
from workers.vllm.nixl import side_channel, why_no_nixl, with_nixl
from workers.vllm.transfer_config import transfer_config

OTHER = {"kv_connector": "Other", "kv_role": "kv_both"}


def connectors(args: dict[str, Any], platform: str = "cpu", **transfer: Any) -> list[dict[str, Any]]:
    made = with_nixl(args, TransferConfig(**transfer), platform)
    config = transfer_config(made, {"socket": "s"})
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    found: list[dict[str, Any]] = config["kv_connector_extra_config"]["connectors"]
    return found


def test_it_stands_before_ours_and_fetches_and_is_fetched_from() -> None:
    first, ours = connectors({"dtype": "float32"}, hold_s=12, backends=("UCX",))
    assert first == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "workers.vllm.nixl_connector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 12},
    }
    assert ours["kv_connector"] == "MantaConnector"


@pytest.mark.parametrize(
    ("platform", "buffer", "device"),
    [("cuda", "device", "cuda"), ("cuda", "cpu", "cpu"), ("cpu", "device", "cpu")],
)
def test_kv_leaves_from_where_it_is_unless_told_otherwise(platform: str, buffer: str, device: str) -> None:
    assert connectors({}, platform, buffer=buffer)[0]["kv_buffer_device"] == device


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_a_connector_of_the_configuration_s_own_stays(form: Any) -> None:
    names = [each["kv_connector"] for each in connectors({"kv_transfer_config": form(OTHER)})]
    assert names == ["NixlConnector", "Other", "MantaConnector"]


def test_every_start_has_an_id_of_its_own() -> None:
    def engine_id() -> str:
        return str(transfer_config(with_nixl({}, TransferConfig(), "cpu"), {})["engine_id"])

    assert engine_id() != engine_id()


@pytest.mark.parametrize("given", [OTHER | {"engine_id": "me"}, {"kv_connector": "NixlPushConnector"}])
def test_what_would_outlive_a_start_or_fight_over_it_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(EngineArgumentError, match="kv-transfer-config: found"):
        with_nixl({"kv-transfer-config": given}, TransferConfig(), "cpu")


def test_others_reach_it_at_its_node_s_address_on_a_port_of_its_own() -> None:
    one, other = (
        side_channel("127.0.0.1", {}),
        side_channel("127.0.0.1", {"VLLM_NIXL_SIDE_CHANNEL_PORT": "7"}),
    )
    assert one["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert 1024 <= int(one["VLLM_NIXL_SIDE_CHANNEL_PORT"]) < 65536
    assert other == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", ""),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.abort()", "status -6"),
    ],
)
def test_whether_it_can_start_is_tried_where_it_can_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(nixl, "_PROBE", program)
    why_no_nixl.cache_clear()
    try:
        assert reason in why_no_nixl(("UCX",))
        assert bool(why_no_nixl(("UCX",))) == bool(reason)
    finally:
        why_no_nixl.cache_clear()
