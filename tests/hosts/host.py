"""One host of a lab: processes, disk, memory and network of its own, and what can happen to it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from cluster.interrupts import held
from tests.hosts.link import Link, Spawn
from tests.hosts.netns import NetworkNamespace

INIT = Path(__file__).with_name("host_init.sh")
NAMESPACES = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]
SSH_PORT = 22
LISTENING = "0A"
START_S = 30.0
END_S = 30.0
"""Time that a killed host has to take its processes down: engines with gigabytes of memory need some."""


class HostError(RuntimeError):
    """A command on a host failed, or the host is down. The message names the host and what was written."""


class HostTimeout(HostError):
    """A command did not end in time; it has been killed on the host."""


class Keys(NamedTuple):
    """Of one lab: every host has them, so each can reach each by ssh."""

    private: str
    public: str
    host_private: str
    host_public: str


class Host:
    """Made by `Lab.make`, started. Methods are for one thread at a time."""

    def __init__(
        self,
        name: str,
        address: str,
        port: str,
        shm_mib: int,
        folder: Path,
        switch: NetworkNamespace,
        keys: Keys,
        environment: Mapping[str, str],
        visible: Sequence[Path],
        spawn: Spawn,
        removed: Callable[[Host], None],
    ) -> None:
        self.name = name
        self.address = address
        self.shm_mib = shm_mib
        self.folder = folder
        self.environment = {"HOME": "/root", "USER": "root", "LOGNAME": "root", **environment}
        self.network = NetworkNamespace()
        self._visible = visible
        self._spawn = spawn
        self._removed = removed
        self._process: subprocess.Popen[bytes] | None = None
        self._pid1: psutil.Process | None = None
        try:
            self._write_disk(keys)
            self._link = Link(address, port, self.network, switch, folder / "log", spawn)
        except BaseException:
            self.network.close()
            raise

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address}, {'up' if self.is_up else 'down'})"

    @property
    def is_up(self) -> bool:
        """A host that is cut is still up."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid1(self) -> int:
        """The number that the host's PID 1 has on this machine. Raises HostError when the host is down."""
        if not self.is_up or self._pid1 is None:
            raise HostError(f"{self.name} is down")
        return self._pid1.pid

    def start(self) -> None:
        """Boot, also after a crash: same name, address and disk, an empty /dev/shm. Returns when ssh listens."""
        assert not self.is_up, f"{self.name} is up"
        ssh_environment = " ".join(f'"{name}={value}"' for name, value in self.environment.items())
        arguments = [self.folder, self.name, self.address, self.shm_mib, ssh_environment, *self._visible]
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = self._spawn(
                [*self.network.enter, *NAMESPACES, "bash", str(INIT), *map(str, arguments)],
                output,
            )
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._kill()
                raise HostError(f"{self.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)

    def run(
        self,
        command: str,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of bash on the host, not over the network: it works on a host that is cut.

        What stays behind must not hold on to the output. Raises HostError when the command fails and `check` is set,
        and HostTimeout.
        """
        process = self.popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            kill_tree(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out, err = process.communicate()
            raise HostTimeout(f"{self.name}: {command!r} took over {timeout_s} s:\n{out}{err}") from None
        if check and process.returncode:
            raise HostError(f"{self.name}: {command!r} ended with {process.returncode}:\n{out}{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def popen(
        self,
        command: str,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Begin a line of bash on the host: for what runs beside the test.

        `kill_tree` ends it; signals to the process that is returned don't reach the host. It ends with the host at the
        latest.
        """
        environment = [f"{name}={value}" for name, value in (self.environment | dict(env or {})).items()]
        inside = ["nsenter", f"--target={self.pid1}", "--net", "--mount", "--pid", "--uts", "--ipc", "--"]
        return subprocess.Popen(
            # The namespaces' / is the directory now; HOME exists inside alone.
            [*inside, "env", "-i", *environment, "bash", "-c", f"cd\n{command}"],
            cwd="/", stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True, errors="replace",
        )  # fmt: skip

    def ssh(self, to: Host, command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on another host, from here and over the network. Raises as `run` does."""
        return self.run(f"ssh {to.address} {shlex.quote(command)}", timeout_s)

    def write(self, path: str, text: str) -> None:
        """Write a file on the host; folders are made. A relative path begins at /root."""
        quoted = shlex.quote(path)
        self.run(f'mkdir -p "$(dirname {quoted})" && printf %s {shlex.quote(text)} > {quoted}')

    def crash(self) -> None:
        """Every process of the host ends at once, unasked. Returns when they are gone. `start` boots it again."""
        self._kill()

    def cut(self) -> None:
        """Pull the cable: nothing comes or goes, and nobody is told. The host itself runs on."""
        self._link.cut()

    def slow(self, delay_ms: float = 0.0, loss: float = 0.0, mbit: float = 0.0) -> None:
        """Make the link bad, each way alike, instead of how it was before.

        `delay_ms` is added each way, so a round trip takes twice that longer; `loss` is the share of packets lost,
        0 to 1; `mbit` the bandwidth in Mbit/s, 0 for no bound.
        """
        assert 0.0 <= loss <= 1.0, f"loss is a share from 0 to 1, not {loss}"
        assert min(delay_ms, mbit) >= 0.0, f"delay_ms={delay_ms}, mbit={mbit}"
        self._link.slow(delay_ms, loss, mbit)

    def heal(self) -> None:
        """Undo `cut` and `slow`. A crashed host stays down until `start`."""
        self._link.heal()

    @held()
    def remove(self) -> None:
        """End its processes, delete its disk and take its name from the lab. A second call does nothing."""
        if self.network.closed:
            return
        self._kill()
        self._link.remove()
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._removed(self)

    def _write_disk(self, keys: Keys) -> None:
        ssh = self.folder / "own/root/.ssh"
        ssh.mkdir(parents=True, mode=0o700)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items())
        files = {
            ssh / "id_ed25519": keys.private,
            ssh / "id_ed25519.pub": keys.public,
            ssh / "authorized_keys": keys.public,
            ssh / "known_hosts": f"* {keys.host_public}",
            ssh / "config": "BatchMode yes\nLogLevel ERROR\nConnectTimeout 10\n",
            # /etc/profile sets a PATH of its own, and `ray up` runs login shells.
            ssh.parent / ".bashrc": exports,
            ssh.parent / ".bash_profile": ". ~/.bashrc\n",
            self.folder / "host_key": keys.host_private,
            self.folder / "hosts": "",
            self.folder / "resolv.conf": "",
        }
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            path.chmod(0o600 if path.parent == ssh else 0o644)
        (self.folder / "host_key").chmod(0o600)

    def _find_pid1(self) -> psutil.Process | None:
        """The child of `unshare`; None until there is one."""
        if self._pid1 is None and self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._pid1 = next(iter(psutil.Process(self._process.pid).children()), None)
        return self._pid1

    def _listens(self) -> bool:
        """Whether PID 1 is sshd and takes connections, as the kernel lists them."""
        if (pid1 := self._find_pid1()) is None:
            return False
        with suppress(OSError):
            for line in Path(f"/proc/{pid1.pid}/net/tcp").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENING and int(local.rpartition(":")[2], 16) == SSH_PORT:
                    return True
        return False

    def _kill(self) -> None:
        """PID 1 ends only after all others in its namespace, and `unshare` after PID 1."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                (self._find_pid1() or self._process).send_signal(signal.SIGKILL)
            self._process.wait(END_S)
        self._process = self._pid1 = None


def kill_tree(process: subprocess.Popen[str]) -> None:
    """End what `Host.popen` has begun, with all that it started: seen from here, descendants of its `nsenter`."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
