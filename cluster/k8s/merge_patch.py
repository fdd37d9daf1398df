"""Strategic merge, as kustomize does it: lists of Kubernetes' own kinds are merged by key, those of others replaced."""

from __future__ import annotations

import copy
from typing import Any

_BUILT_IN = ("", "apps", "autoscaling", "batch", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")
_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_PORTS = {"Service": ("port",), "NetworkPolicy": ()}
_CONTAINER_PORTS = ("containerPort",)
_DIRECTIVE = "$patch"


def apply(item: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A merged copy of the object; an empty one where the patch deletes it."""
    if patch.get(_DIRECTIVE) == "delete":
        return {}
    group = item["apiVersion"].rpartition("/")[0]
    return _Merge(group in _BUILT_IN, item["kind"]).mappings(item, patch)


class _Merge:
    def __init__(self, by_key: bool, kind: str) -> None:
        self._by_key = by_key
        self._kind = kind

    def mappings(self, before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
        if patch.get(_DIRECTIVE) == "replace":
            return {key: copy.deepcopy(value) for key, value in patch.items() if key != _DIRECTIVE}
        merged = copy.deepcopy(before)
        for key, value in patch.items():
            old = merged.get(key)
            if value is None or (isinstance(value, dict) and value.get(_DIRECTIVE) == "delete"):
                merged.pop(key, None)
            elif isinstance(value, dict):
                merged[key] = self.mappings(old if isinstance(old, dict) else {}, value)
            elif isinstance(value, list) and isinstance(old, list) and (keys := self._keys(key, value)):
                merged[key] = self._lists(old, value, keys)
            else:
                merged[key] = copy.deepcopy(value)
        return merged

    def _keys(self, name: str, items: list[Any]) -> tuple[str, ...]:
        if not self._by_key or not all(isinstance(item, dict) for item in items):
            return ()
        if name == "ports":
            return _PORTS.get(self._kind, _CONTAINER_PORTS)
        return _MERGE_KEYS.get(name, ())

    def _lists(self, before: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
        """What the patch names comes first, in its order, as kustomize puts it."""
        rest, first = copy.deepcopy(before), []
        for item in patch:
            names = [item.get(key) for key in keys]
            there = next((i for i, old in enumerate(rest) if [old.get(key) for key in keys] == names), None)
            old = {} if there is None else rest.pop(there)
            if item.get(_DIRECTIVE) != "delete":
                first.append(self.mappings(old, item))
        return first + rest
