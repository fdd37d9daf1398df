"""A network of its own, held open by this process: the kernel takes it down when the last holder is gone."""

from __future__ import annotations

import os
import subprocess


class CommandError(RuntimeError):
    """A command of the lab itself failed. The message names it and what it wrote."""


class NetworkNamespace:
    """A network namespace without a name. Nothing of it is left when this process ends, however it ends."""

    def __init__(self) -> None:
        self._fd = _open_new()
        self.inode = os.fstat(self._fd).st_ino
        """By which `/proc/*/ns/net` tells who is inside."""

    @property
    def path(self) -> str:
        """For programs that take a namespace by file; good while this process lives and has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that runs in this network, and else where the caller is."""
        return ["nsenter", f"--net={self.path}", "--"]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Raises CommandError when the command fails."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=30)
        if check and done.returncode:
            raise CommandError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Interfaces in it go once no process is inside any more. A second call does nothing."""
        if not self.closed:
            os.close(self._fd)
            self._fd = -1


def _open_new() -> int:
    # The shell only holds the namespace until it is open here.
    holder = ["unshare", "--net", "sh", "-c", "echo ready; read _"]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise CommandError("unshare --net: a network namespace is not allowed here")
        return os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
