"""When two answers are the same: byte for byte, apart from ids and times.

vLLM hands a stream's tokens on as they come, and joins those that wait for a slow reader. Streams whose bytes differ
are therefore compared once more with such pieces joined: the texts, token ids and log probabilities as wholes, and the
last value of everything else.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_IDS = re.compile(rb'"((?:item_|response_|request_|call_|tool_use_)?id)":( ?)"[^"\\]*"')
_CLOCK = re.compile(rb"\[\d\d:\d\d:\d\d\]")
"""The grammar compiler puts the time of day into its messages."""
_TIMES = re.compile(rb'"(created|created_at|completed_at)":( ?)[0-9.]+')


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes


def normalised(body: bytes) -> bytes:
    """Ids and times replaced by constants; everything else stays as it is."""
    without_ids = _IDS.sub(rb'"\1":\2"ID"', _CLOCK.sub(b"[TIME]", body))
    return _TIMES.sub(rb'"\1":\g<2>0', without_ids)


def difference(ours: Answer, theirs: Answer) -> str:
    """Empty for answers that are the same, else both of them."""
    if ours[:2] != theirs[:2]:
        return f"through the router: {ours}\nfrom the replica:   {theirs}"
    bodies = normalised(ours.body), normalised(theirs.body)
    if bodies[0] == bodies[1]:
        return ""
    if ours.content_type.startswith("text/event-stream"):
        bodies = tuple(json.dumps(joined(body), sort_keys=True).encode() for body in bodies)
        if bodies[0] == bodies[1]:
            return ""
    start = max(0, _first_difference(*bodies) - 80)
    ends = (body[start : start + 240] for body in bodies)
    return "through the router: ...{}\nfrom the replica:   ...{}".format(*ends)


def _first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def joined(stream: bytes) -> list[Any]:
    """Events of a stream, those that continue each other made one: of several choices, each by itself."""
    result: list[list[Any]] = []
    for event in filter(None, stream.decode().split("\n\n")):
        name, _, data = event.rpartition("data: ")
        value = json.loads(data) if data.startswith("{") else data
        if isinstance(value, dict):
            value.pop("sequence_number", None)  # counts pieces
        # The pieces of several choices mingle; other events keep their order.
        candidates = result if _choice(value) is not None else result[-1:]
        begun = next((entry for entry in candidates if _continues(entry[1], value)), None)
        if begun is None:
            result.append([name, value])
        else:
            begun[1] = _join(begun[1], value)
    return sorted(result, key=lambda entry: (_choice(entry[1]) is None, _choice(entry[1])))


def _choice(value: Any) -> int | None:
    choices = value.get("choices") if isinstance(value, dict) else None
    return int(choices[0]["index"]) if choices else None


def _continues(before: Any, value: Any) -> bool:
    if not isinstance(before, dict) or not isinstance(value, dict):
        return False
    if "choices" in value:
        return _choice(value) is not None and _choice(before) == _choice(value)
    kind = value.get("type", "")
    return bool(kind == before.get("type") and kind.endswith("delta"))


def _join(before: Any, after: Any, key: str = "") -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {name: _join(before.get(name), value, name) for name, value in after.items()}
    if key == "choices" and isinstance(before, list):
        return [_join(before[0], after[0])]
    if key == "tool_calls" and isinstance(before, list) and isinstance(after, list):
        return _join_calls(before, after)
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if key in _TEXTS and isinstance(before, str) and isinstance(after, str):
        return before + after
    return before if after is None else after


_TEXTS = frozenset(
    {"content", "reasoning", "text", "arguments", "delta", "partial_json", "thinking", "refusal"}
)


def _join_calls(before: list[Any], after: list[Any]) -> list[Any]:
    calls = {call["index"]: call for call in before}
    for call in after:
        calls[call["index"]] = _join(calls.get(call["index"], {}), call)
    return list(calls.values())
