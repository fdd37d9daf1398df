"""The fault switch of one simulated replica."""

from __future__ import annotations

from typing import Literal, get_args

FaultKind = Literal["none", "refuse", "hang", "die_before_token", "die_mid_stream", "lose_delta", "unhealthy"]
FAULT_KINDS: tuple[str, ...] = get_args(FaultKind)


class Faults:
    """What goes wrong from now on.

    - `refuse`: requests get a 503.
    - `hang`: requests are taken and never answered.
    - `die_before_token`: the connection breaks before the first token.
    - `die_mid_stream`: the connection breaks once `after_tokens` tokens were sent.
    - `lose_delta`: the next deltas of the event stream are not sent, though they take their numbers.
    - `unhealthy`: the health check fails.
    """

    def __init__(self) -> None:
        self.kind: FaultKind = "none"
        self.after_tokens = 1
        self.lose_next_delta = 0
        """Deltas that are still to be lost. The publisher asks `take_lost_delta` before it sends one."""
        self._left: int | None = None

    def set(self, kind: str, count: int | None = None, after_tokens: int = 1) -> None:
        """Replace the fault. It strikes `count` times: until it is replaced where None, but one delta.

        Raises ValueError for a kind or number that does not exist.
        """
        if kind not in FAULT_KINDS:
            raise ValueError(f"fault: found {kind!r}; needed: one of {', '.join(FAULT_KINDS)}")
        if count is not None and count < 1:
            raise ValueError(f"count: found {count}; needed: at least 1")
        if after_tokens < 1:
            raise ValueError(f"after_tokens: found {after_tokens}; needed: at least 1")
        self.kind = kind  # type: ignore[assignment]
        self.after_tokens = after_tokens
        self._left = count
        self.lose_next_delta = (count or 1) if kind == "lose_delta" else 0

    def strike(self) -> FaultKind:
        """The fault that hits the request that asks, which uses it up by one."""
        kind = self.kind
        if kind in ("none", "lose_delta", "unhealthy"):
            return "none"
        self._use_up()
        return kind

    def take_lost_delta(self) -> bool:
        """Whether the delta that is about to be sent is to be lost."""
        if not self.lose_next_delta:
            return False
        self.lose_next_delta -= 1
        if not self.lose_next_delta and self.kind == "lose_delta":
            self.kind = "none"
        return True

    def _use_up(self) -> None:
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self.kind, self._left = "none", None
