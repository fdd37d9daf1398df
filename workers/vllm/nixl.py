"""vLLM's NIXL connector as a replica sets it up: where it listens, what it is configured with, whether it can start."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

from workers.transfer import TransferConfig
from workers.vllm.arguments import EngineArgumentError
from workers.vllm.transfer_config import given_transfer_config

logger = logging.getLogger(__name__)

# vLLM looks for a connector of this name in places where it makes allowances for it.
NAME = "NixlConnector"
MODULE = "workers.vllm.nixl_connector"
HOST_VARIABLE, PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
RELEASE = "manta_release"
"""In a request's transfer parameters: free the blocks that are kept for the request of this name."""
FETCH_UNTIL = "manta_fetch_until"
"""In a request's transfer parameters: seconds of `time.monotonic`, which all processes of a machine share."""
_PROBE_LIMIT_S = 60.0
# NIXL 1.5 crashes where it is taken apart at the end of the interpreter.
_PROBE = """
import os, sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("probe", nixl_agent_config(backends=sys.argv[1:]))
os._exit(0)
"""


def with_nixl(args: Mapping[str, Any], transfer: TransferConfig, platform: str) -> dict[str, Any]:
    """vLLM's arguments with its NIXL connector beside what they ask for. `platform` is `cpu` or `cuda`.

    The engine gets a new id: one that is given stays the same over restarts, and would let others fetch, by what a
    dead engine told them, what its successor has put there. Raises EngineArgumentError for arguments that give an id
    or a NIXL connector of their own.
    """
    given = given_transfer_config(args)
    if given.get("engine_id"):
        raise EngineArgumentError(
            "engine.args.kv-transfer-config: found engine_id; needed: none, every start of an engine has its own"
        )
    others = [given] if given else []
    if given.get("kv_connector") == "MultiConnector":
        others = list(given.get("kv_connector_extra_config", {}).get("connectors", []))
    for other in others:
        if str(other.get("kv_connector", "")).startswith("Nixl"):
            raise EngineArgumentError(
                f"engine.args.kv-transfer-config: found {other['kv_connector']}; needed: `transfer`, which sets it up"
            )
    nixl = {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        # Both: a replica of either pool computes prompts for others, and fetches.
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu" if platform == "cpu" or transfer.buffer == "cpu" else platform,
        "kv_connector_extra_config": {
            "backends": list(transfer.backends),
            "kv_lease_duration": transfer.hold_s,
        },
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": uuid.uuid4().hex,
        "kv_connector_extra_config": {"connectors": [nixl, *others]},
    }
    kept = {name: value for name, value in args.items() if name.replace("_", "-") != "kv-transfer-config"}
    return kept | {"kv-transfer-config": json.dumps(multi)}


def side_channel(host: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that say where the engine tells others how to reach its KV: at its node's address, on a free port.

    What `env` (the configuration's) sets stays.
    """
    found = {HOST_VARIABLE: host, PORT_VARIABLE: str(_free_port(host))}
    return {name: value for name, value in found.items() if name not in env}


@cache
def why_no_nixl(backends: tuple[str, ...]) -> str:
    """Why NIXL can't start on this machine; empty where it can. Tried once, in a process of its own: what is wrong with
    a transport may end the process that tries it."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _PROBE, *backends],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"starting it took more than {_PROBE_LIMIT_S:.0f} s"
    if not tried.returncode:
        return ""
    lines = [line for line in tried.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with status {tried.returncode}"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
