"""A child process that answers every line of JSON with one of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from benchmarks import peers

READY = "ready"
_END_S = 20.0
_TAIL = 3000


class ChildError(RuntimeError):
    """A child ended, or did not answer in time. The message ends with what it wrote."""


class LineProcess:
    """A context manager. The child prints READY once it takes lines, and ends when its standard input does."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts it and does not wait: `wait_ready` does, so that several can start side by side."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._rest = b""
        self._process = subprocess.Popen(
            command,
            cwd=peers.ROOT,
            env=os.environ | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"} | dict(env or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ChildError."""
        line = self._line(timeout_s)
        if line != READY.encode():
            raise self._error(f"said {line!r} instead of {READY!r}")

    def ask(self, question: Any, timeout_s: float) -> Any:
        """Raises ChildError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise self._error("takes no more questions") from None
        return json.loads(self._line(timeout_s))

    def close(self) -> None:
        """Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise self._error(f"did not answer within {timeout_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise self._error("ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _error(self, what: str) -> ChildError:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        return ChildError(f"{self._process.args!r} {what}:\n{self._log.read().decode(errors='replace')}")


def python_path(*more: object) -> str:
    """For children: this repository, what this process has, and more at the end."""
    return os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"), *map(str, more))))
