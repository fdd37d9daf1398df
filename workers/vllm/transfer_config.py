"""The KV connector among vLLM's arguments, beside one that the configuration asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.vllm.arguments import EngineArgumentError

NAME = "MantaConnector"
MODULE = "workers.vllm.connector"
POLICY = {"kv_load_failure_policy": "recompute"}
"""A failed load is computed. vLLM's default is to fail the request."""
_ARGUMENT = "kv-transfer-config"


def transfer_config(args: Mapping[str, Any], extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with our connector in it. `args` are those of the configuration.

    Another connector comes first: what it loads, ours does not. Raises EngineArgumentError for a `kv-transfer-config`
    that is no mapping.
    """
    ours = {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config),
    }
    given = given_transfer_config(args)
    if not given:
        return ours | POLICY
    engine_id = {key: given.pop(key) for key in ("engine_id",) if key in given}
    others = [given]
    if given.get("kv_connector") == "MultiConnector":
        others = list(given.get("kv_connector_extra_config", {}).get("connectors", []))
    # Of both roles, whatever the other connector's is: loads must not meet a step that still writes.
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return multi | engine_id | POLICY | {"kv_connector_extra_config": {"connectors": [*others, ours]}}


def given_transfer_config(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration asks for itself; empty for nothing. Raises EngineArgumentError for what is no mapping."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        option = name.replace("_", "-")
        if option.startswith(f"{_ARGUMENT}.") or (
            option == _ARGUMENT and not isinstance(value, Mapping | str | None)
        ):
            raise EngineArgumentError(
                f"engine.args.{name}: found {value!r}; needed: one mapping, {_ARGUMENT}"
            )
        if option == _ARGUMENT and value:
            found = dict(value) if isinstance(value, Mapping) else _parsed(value)
    return found


def _parsed(value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise EngineArgumentError(f"engine.args.{_ARGUMENT}: {error}") from error
    if not isinstance(parsed, dict):
        raise EngineArgumentError(f"engine.args.{_ARGUMENT}: found {value!r}; needed: a mapping")
    return parsed


def register_connector() -> None:
    """Make the name known where vLLM looks a connector up by it: in the statistics of a MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
