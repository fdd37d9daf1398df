"""Whether a tier's storage works: switches itself off when it does not, and finds out when it does again."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

HOPELESS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOTCONN,
        errno.ESTALE,
    }
)
"""After one of these the next operation would fail alike: one is enough."""
LONGEST_PROBE_S = 60.0
STEADY = 10
"""A tier that goes off again within so many probe periods is flapping."""


class TierUnavailable(Exception):
    """The tier is off, or failed at this operation. A miss for whoever asked."""


class PartMissing(LookupError):
    """The tier works and does not have the part."""


class NoRoom(Exception):
    """The part does not fit under the tier's cap until others are deleted."""


class TierHealth:
    """One direction of a tier: its reads or its writes.

    On: operations run. `failures` of them in a row that raise OSError or take longer than `limit_s`, or one that
    raises what is hopeless, or one that is still running after `limit_s`, switch it off: operations are refused at
    once. Off: every `probe_s` seconds one operation is let through, and its success switches it on again. A tier
    that flaps is tried less and less often, down to once a minute.

    Both changes are logged, once each, and `switched_off` counts. Thread-safe; never waits.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_s: float,
        probe_s: float = 5.0,
        failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is what people read in the log: `reads from disk /data/kv`."""
        self.name = name
        self.limit_s = limit_s
        self.failed = 0
        """Operations that raised OSError."""
        self.slow = 0
        """Operations that took longer than `limit_s`, failed or not."""
        self.switched_off = 0
        self._probe_s = self._delay = probe_s
        self._failures = failures
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._running: dict[int, float] = {}
        self._in_a_row = 0
        self._off: str | None = None
        self._changed = clock()
        self._retry_at = 0.0
        self._probe: int | None = None

    def works(self) -> bool:
        """Whether operations are let through, as far as is known now."""
        with self._lock:
            self._notice_hang()
            return self._off is None

    def due(self) -> bool:
        """Whether it is off and the next operation would be let through to try it out."""
        with self._lock:
            self._notice_hang()
            return self._off is not None and self._may_probe()

    @contextmanager
    def operation(self, even_off: bool = False) -> Iterator[None]:
        """Around one operation. Raises TierUnavailable where it is refused, and in place of OSError.

        Any other exception is the operation's result and says nothing against the storage. `even_off`: refuse it
        only while another hangs, and learn nothing from its success.
        """
        token = self._begin(even_off)
        try:
            yield
        except OSError as error:
            self._end(token, error, even_off)
            raise TierUnavailable(f"{self.name}: {error}") from error
        except BaseException:
            self._end(token, None, even_off)
            raise
        self._end(token, None, even_off)

    def _begin(self, even_off: bool) -> int:
        with self._lock:
            self._notice_hang()
            token = next(self._tokens)
            if self._off is not None:
                if not (self._may_probe() or (even_off and not self._hangs())):
                    raise TierUnavailable(f"{self.name} are off: {self._off}")
                if not even_off:
                    self._probe = token
            self._running[token] = self._clock()
            return token

    def _end(self, token: int, error: OSError | None, even_off: bool) -> None:
        with self._lock:
            took = self._clock() - self._running.pop(token)
            probed = token == self._probe
            if probed:
                self._probe = None
            late = took > self.limit_s
            self.slow += late
            self.failed += error is not None
            if error is None and not late:
                if not even_off:
                    self._in_a_row = 0
                if probed:
                    self._switch_on()
                return
            self._in_a_row += 1
            if self._off is not None:
                self._retry_at = max(self._retry_at, self._clock() + self._delay)
            elif self._in_a_row >= self._failures or (error is not None and error.errno in HOPELESS):
                self._switch_off(str(error) if error is not None else f"operations take {took:.1f} s")

    def _may_probe(self) -> bool:
        return self._probe is None and self._clock() >= self._retry_at and not self._hangs()

    def _hangs(self) -> bool:
        # Begun in order, so the first is the oldest.
        oldest = next(iter(self._running.values()), None)
        return oldest is not None and self._clock() - oldest > self.limit_s

    def _notice_hang(self) -> None:
        if self._off is None and self._hangs():
            self._switch_off(f"an operation has not ended within {self.limit_s:g} s")

    def _switch_off(self, reason: str) -> None:
        now = self._clock()
        flapping = self.switched_off > 0 and now - self._changed < STEADY * self._delay
        self._delay = min(2 * self._delay, max(LONGEST_PROBE_S, self._probe_s)) if flapping else self._probe_s
        self._off, self._changed, self._retry_at = reason, now, now + self._delay
        self.switched_off += 1
        logger.warning("%s are off: %s; tried again every %g s", self.name, reason, self._delay)

    def _switch_on(self) -> None:
        now = self._clock()
        logger.warning("%s are on again, after %.1f s", self.name, now - self._changed)
        self._off, self._changed = None, now

    def check_integrity(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        with self._lock:
            assert list(self._running) == sorted(self._running)
            assert self._probe is None or (self._off is not None and self._probe in self._running)
            assert self._off is not None or self._in_a_row < self._failures
            assert self._probe_s <= self._delay <= max(LONGEST_PROBE_S, self._probe_s)
            assert (self._off is None) or self.switched_off > 0
