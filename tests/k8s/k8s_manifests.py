"""The manifests that ship, rendered once."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from cluster.k8s.checks import Versions
from cluster.k8s.folders import secrets_at
from cluster.k8s.kustomize import render

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir())) if K8S.is_dir() else ()


def overlay(name: str) -> list[dict[str, Any]]:
    """Objects of an overlay, for the caller to change."""
    return copy.deepcopy(_rendered(name))


def ray_service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(item for item in objects if item["kind"] == "RayService")


@cache
def versions() -> Versions:
    return Versions.of(ROOT)


@cache
def secrets() -> tuple[str, ...]:
    """What the example tells operators to make."""
    return tuple(secrets_at(K8S / "base") or ())


@cache
def _rendered(name: str) -> list[dict[str, Any]]:
    return render(K8S / "overlays" / name)
