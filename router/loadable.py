"""How much of a prompt a node can load, by where it is."""

from __future__ import annotations

from typing import NamedTuple, Self


class Loadable(NamedTuple):
    """Chunks, or tokens, that a node can load behind what its engine has, by where they are seen from that node."""

    dram: int = 0
    peer: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def within(self, most: int) -> Self:
        """Not more than `most` in all; what is slowest to load is left out first."""
        counts = []
        for count in self:
            counts.append(min(count, max(0, most)))
            most -= counts[-1]
        return type(self)(*counts)


NOTHING_LOADABLE = Loadable()
