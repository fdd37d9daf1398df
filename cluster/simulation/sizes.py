"""Sizes in bytes as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTP", 1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]i?)?B?\Z")


def parse_size(text: str | int | float) -> int:
    """Bytes of `64GiB`, `1.5TB`, `4096`. Raises ValueError."""
    if isinstance(text, bool):
        raise ValueError(f"found {text!r}; needed: a size such as 64GiB or a number of bytes")
    if isinstance(text, int | float):
        if not math.isfinite(text) or text < 0:
            raise ValueError(f"found {text}; needed: a size of 0 bytes or more")
        return int(text)
    found = _SIZE.match(text.strip())
    if found is None:
        raise ValueError(f"found {text!r}; needed: a size such as 64GiB, 1.5TB or 4096")
    return int(float(found[1]) * (_UNITS | _BINARY)[found[2] or ""])


def size_text(nbytes: float) -> str:
    """`64 GiB`, with at most one digit behind the point."""
    for unit, size in reversed(_BINARY.items()):
        if nbytes >= size:
            return f"{round(nbytes / size, 1):g} {unit}B"
    return f"{nbytes:g} B"
