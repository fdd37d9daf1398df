"""Kubernetes' resource quantities: `1500m`, `2Gi`, `1e3`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
_FORM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]+)|(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi))?")
_UNITS = {"": Fraction(1), "m": Fraction(1, 1000)} | {
    name: Fraction(base**power)
    for base, suffix in ((1000, ""), (1024, "i"))
    for power, name in enumerate(
        (f"{letter}{suffix}" for letter in ("k" if base == 1000 else "K", *"MGTP")), 1
    )
}


class QuantityError(ValueError):
    """Text that is no quantity."""


def parse(value: Any) -> Fraction:
    """Bytes, cores or pieces. Raises QuantityError."""
    found = _FORM.fullmatch(str(value)) if not isinstance(value, bool) else None
    if found is None:
        raise QuantityError(f"{value!r} is no quantity; needed: as in 500m, 4 or 16Gi")
    number, exponent, unit = found.groups()
    return Fraction(number + (exponent or "")) * _UNITS[unit or ""]


def text(size: int) -> str:
    """Bytes in the largest binary unit that needs no fraction."""
    for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)
