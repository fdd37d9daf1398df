"""JSON Patch (RFC 6902): applying one, and making one from two objects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Operation = dict[str, Any]
NAMING = ("groupName", "name", "mountPath", "containerPort")
"""Fields by which entries of a list are told apart, the first that all of them have."""
_MISSING = object()


class PatchError(ValueError):
    """An operation that can't be applied, or a `test` that found something else."""


def apply(data: Any, operations: list[Operation]) -> Any:
    """A changed copy. Raises PatchError."""
    root = {"": copy.deepcopy(data)}
    for operation in operations:
        name, path = operation.get("op"), operation.get("path", "")
        if name in ("move", "copy"):
            value = copy.deepcopy(_get(root, operation["from"]))
            if name == "move":
                _remove(root, operation["from"])
            _add(root, path, value)
        elif name == "add":
            _add(root, path, copy.deepcopy(operation["value"]))
        elif name == "remove":
            _remove(root, path)
        elif name == "replace":
            _get(root, path)
            _remove(root, path)
            _add(root, path, copy.deepcopy(operation["value"]))
        elif name == "test":
            if (found := _get(root, path)) != operation["value"]:
                raise PatchError(f"{path} is {found!r}; the patch was made for {operation['value']!r}")
        else:
            raise PatchError(f"op is {name!r}; needed: add, remove, replace, move, copy or test")
    return root[""]


def difference(before: Any, after: Any, path: str = "") -> Iterator[Operation]:
    """Operations that make `after` of `before`.

    Entries of a list that have names are followed by these: what goes is removed, what is new is added at the end, and
    every entry that changes is guarded by a `test` of its name. Lists without names, or in another order, are replaced.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            inner = f"{path}/{escaped(key)}"
            if key not in after:
                yield {"op": "remove", "path": inner}
            else:
                yield from difference(before[key], after[key], inner)
        for key in after:
            if key not in before:
                yield {"op": "add", "path": f"{path}/{escaped(key)}", "value": after[key]}
    elif isinstance(before, list) and isinstance(after, list) and (field := _naming(before, after)):
        yield from _list_difference(before, after, path, field)
    elif before != after or type(before) is not type(after):
        yield {"op": "replace", "path": path, "value": after}


def _naming(before: list[Any], after: list[Any]) -> str:
    """The field that names the entries of both lists, if they can be followed by it."""
    for field in NAMING:
        if not all(isinstance(item, dict) and field in item for item in (*before, *after)):
            continue
        old, new = ([item[field] for item in items] for items in (before, after))
        kept = [name for name in old if name in new]
        if len({*old}) == len(old) and len({*new}) == len(new) and new[: len(kept)] == kept:
            return field
    return ""


def _list_difference(before: list[Any], after: list[Any], path: str, field: str) -> Iterator[Operation]:
    names = [item[field] for item in after]
    for index in reversed(range(len(before))):
        if before[index][field] not in names:
            yield {"op": "test", "path": f"{path}/{index}/{field}", "value": before[index][field]}
            yield {"op": "remove", "path": f"{path}/{index}"}
    kept = [item for item in before if item[field] in names]
    for index, (old, new) in enumerate(zip(kept, after, strict=False)):
        if changes := list(difference(old, new, f"{path}/{index}")):
            yield {"op": "test", "path": f"{path}/{index}/{field}", "value": old[field]}
            yield from changes
    for new in after[len(kept) :]:
        yield {"op": "add", "path": f"{path}/-", "value": new}


def escaped(key: str) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _steps(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise PatchError(f"{path!r} is no path; needed: one that begins with /")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")]


def _get(root: Any, path: str) -> Any:
    place = root
    for step in _steps(path):
        place = _step(place, step, path)
    return place


def _step(place: Any, step: str, path: str) -> Any:
    found = _MISSING
    if isinstance(place, dict):
        found = place.get(step, _MISSING)
    elif isinstance(place, list) and step.isdigit() and int(step) < len(place):
        found = place[int(step)]
    if found is _MISSING:
        raise PatchError(f"{path}: there is no {step!r}")
    return found


def _parent(root: Any, path: str) -> tuple[Any, str]:
    *steps, last = _steps(path)
    place = root
    for step in steps:
        place = _step(place, step, path)
    return place, last


def _add(root: Any, path: str, value: Any) -> None:
    place, last = _parent(root, path)
    if isinstance(place, dict):
        place[last] = value
    elif isinstance(place, list) and (last == "-" or (last.isdigit() and int(last) <= len(place))):
        place.insert(len(place) if last == "-" else int(last), value)
    else:
        raise PatchError(f"{path}: nothing can be added there")


def _remove(root: Any, path: str) -> None:
    place, last = _parent(root, path)
    _step(place, last, path)
    del place[int(last) if isinstance(place, list) else last]
