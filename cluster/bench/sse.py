"""Server-sent events, cut out of the bytes of a stream as they come."""

from __future__ import annotations

import re

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 * 1024 * 1024

# Events end at an empty line. The groups are atomic: CR LF is one line end and never an end and an empty line.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINES = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4


class EventTooLongError(ValueError):
    """An event without an end in sight."""


class EventParser:
    """Feed it bytes as they arrive; it gives the data of the events that have become complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of each complete event, in order; comments and events without data are left out.

        Raises EventTooLongError.
        """
        searched = max(0, len(self._rest) - _LONGEST_END + 1)
        rest = self._rest + data if self._rest else data
        start, found = 0, list[bytes]()
        for end in _END.finditer(rest, searched):
            if (payload := _data(rest[start : end.start()])) is not None:
                found.append(payload)
            start = end.end()
        self._rest = rest[start:] if start else rest
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    @property
    def pending(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._rest.strip())


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = [
        line[5:].removeprefix(b" ")
        for line in _LINES.split(event)
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(lines) if lines else None
