"""Several hosts on one machine, to deploy on, cut and kill. See `Lab`."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO

from cluster.interrupts import held
from tests.hosts.host import Host, Keys
from tests.hosts.netns import CommandError, NetworkNamespace

REPOSITORY = Path(__file__).parents[2]
PREFIX = "manta-lab-"
OPERATOR = "operator"
NETWORK = "10.77.0"
SWITCH_ADDRESS = f"{NETWORK}.1"
FIRST_HOST = 11
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED = {
    "ip": "iproute2", "tc": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "/usr/sbin/sshd": "openssh-server", "rsync": "rsync", "unshare": "util-linux", "nsenter": "util-linux",
    "setpriv": "util-linux",
}  # fmt: skip
"""Commands, and the Debian packages that bring them."""
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
TRIAL = "mount -t tmpfs tmpfs /tmp && ip link add br0 type bridge && ip link add v0 type veth peer name v1"

SSH_CONFIG = """
Host *
  User root
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""
SSH = """#!/bin/sh
# The hosts have no way to this machine's network: ssh runs in theirs, on the bridge.
exec {enter} ssh -F {folder}/ssh_config "$@"
"""

JANITOR = """
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf --one-file-system -- "$1" && exit; sleep 1; done
"""
"""Deletes the lab's files when the process that has made the lab is gone, however it went."""


@cache
def why_not() -> str | None:
    """What keeps this machine from having a lab; None when nothing does."""
    if sys.platform != "linux":
        return "a lab is made of Linux namespaces"
    if os.geteuid() != 0:
        return "a lab needs root, to make namespaces"
    missing = sorted({package for command, package in NEEDED.items() if shutil.which(command) is None})
    if missing:
        return f"a lab needs {', '.join(missing)}: apt-get install {' '.join(missing)}"
    trial = subprocess.run([*NAMESPACES, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=30)
    if trial.returncode:
        return f"a lab needs namespaces, which are not allowed here: {trial.stderr.strip()}"
    return None


class Lab:
    """Hosts on a bridge of their own. No interface of this machine's own network takes part.

        with Lab() as lab:
            head, worker = lab.make(["head", "worker"], shm_mib=512)
            head.run("ray start --head")

    A host has its own processes, network, host name, /tmp, /root and /dev/shm. What it changes below /etc, /var, /opt,
    /srv, /mnt and /usr/local stays its own where the machine's kernel has overlays; the rest of the disk is the
    machine's. It sees this Python, this repository and the `visible` paths where they are here, and can reach the
    other hosts by name and by ssh, and nothing else.

    The end of the `with`, or `remove`, ends all processes and deletes all files. So does the end of this process,
    even when it is killed: the hosts are its children, and end with it. One lab does not know of another.
    """

    def __init__(self, visible: Iterable[Path] = (), environment: Mapping[str, str] | None = None) -> None:
        """`environment` is for every process of every host. Raises CommandError where `why_not` has a reason."""
        if reason := why_not():
            raise CommandError(reason)
        clear_leftovers()
        self._hosts: list[Host] = []
        self._made = 0
        self._visible = _paths([*_python(), REPOSITORY, *visible])
        path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
        self.environment = {"PATH": path, "LANG": "C.UTF-8"} | dict(environment or {})
        # The kernel ends a host when the *thread* ends that has started it. This one lives as long as the lab.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="lab")
        with held():
            self.folder, self._lock = _locked_folder()
            self._janitor = subprocess.Popen(
                ["sh", "-c", JANITOR, "janitor", str(self.folder)],
                stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self.switch = NetworkNamespace()
            atexit.register(self.remove)
        try:
            self._keys = _make_keys(self.folder)
            self._write_ssh()
            self.switch.run("ip", "link", "add", "br0", "type", "bridge")
            self.switch.run("ip", "address", "add", f"{SWITCH_ADDRESS}/24", "dev", "br0")
            self.switch.run("ip", "link", "set", "br0", "up")
            self.switch.run("ip", "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All that have been made and not removed, the operator's among them."""
        return tuple(self._hosts)

    @property
    def ssh(self) -> Path:
        """A command for a person on this machine, with a host's name behind it. Works while the lab lives."""
        return self.folder / "ssh"

    @property
    def operator(self) -> Host:
        """A host to run `ray up` and clients on, beside those of the cluster. Made when first asked for."""
        for host in self._hosts:
            if host.name == OPERATOR:
                return host
        return self.make([OPERATOR])[0]

    def make(self, names: Iterable[str], shm_mib: int = 256) -> list[Host]:
        """Start hosts, in addition to those that are there. Returns when ssh listens on each.

        Raises CommandError or HostError, with none of these hosts left.
        """
        made: list[Host] = []
        try:
            for name in names:
                assert name not in {host.name for host in self._hosts}, f"{name} is there already"
                with held():
                    host = self._new_host(name, shm_mib)
                    self._hosts.append(host)
                    made.append(host)
            self._tell_names()
            for host in made:
                host.start()
        except BaseException:
            for host in made:
                host.remove()
            raise
        return made

    @held()
    def remove(self) -> None:
        """End and delete everything. A second call does nothing."""
        atexit.unregister(self.remove)
        # Last in, first out; a host that can't be removed does not keep the rest.
        with ExitStack() as steps:
            steps.callback(self._janitor.communicate, timeout=30)
            steps.callback(self._lock.close)
            steps.callback(shutil.rmtree, self.folder, ignore_errors=True)
            steps.callback(self._starter.shutdown)
            steps.callback(self.switch.close)
            for host in self.hosts:
                steps.callback(host.remove)

    def _new_host(self, name: str, shm_mib: int) -> Host:
        number = self._made
        self._made += 1
        return Host(
            name=name,
            address=f"{NETWORK}.{FIRST_HOST + number}",
            port=f"v{number}",
            shm_mib=shm_mib,
            folder=self.folder / name,
            switch=self.switch,
            keys=self._keys,
            environment=self.environment,
            visible=self._visible,
            spawn=self._spawn,
            removed=self._forget,
        )

    def _forget(self, host: Host) -> None:
        self._hosts.remove(host)
        self._tell_names()

    def _spawn(self, command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """A process that the kernel kills when this one ends, out of reach of a Ctrl-C in this terminal."""
        return self._starter.submit(
            subprocess.Popen,
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd="/",
        ).result()  # fmt: skip

    def _write_ssh(self) -> None:
        (self.folder / "known_hosts").write_text(f"* {self._keys.host_public}", encoding="utf-8")
        self.ssh.write_text(
            SSH.format(enter=" ".join(self.switch.enter), folder=self.folder), encoding="utf-8"
        )
        self.ssh.chmod(0o755)

    def _tell_names(self) -> None:
        names = "".join(f"{host.address} {host.name}\n" for host in self._hosts)
        for host in self._hosts:
            # Written in place: the file is mounted.
            with suppress(FileNotFoundError):
                (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        with suppress(FileNotFoundError):
            known = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self._hosts)
            (self.folder / "ssh_config").write_text(
                f"{known}{SSH_CONFIG.format(folder=self.folder)}", encoding="utf-8"
            )


def clear_leftovers() -> list[Path]:
    """Delete what labs have left whose process and janitor were both killed. A lab that lives holds its lock."""
    cleared = []
    for lock_path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/lock"):
        with suppress(OSError), lock_path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
            cleared.append(lock_path.parent)
    return cleared


def _locked_folder() -> tuple[Path, IO[bytes]]:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (folder / "new-lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its name only once it is held, so that nobody takes a new lab for a dead one.
    (folder / "new-lock").rename(folder / "lock")
    return folder, lock


def _make_keys(folder: Path) -> Keys:
    texts = []
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "manta-lab", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
        texts += [(folder / name).read_text(), (folder / f"{name}.pub").read_text()]
    return Keys(*texts)


def _python() -> list[Path]:
    """Where this Python and its packages are, the editable ones included."""
    prefixes = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    return [*prefixes, *(Path(entry) for entry in sys.path if entry)]


def _paths(wanted: Iterable[Path]) -> list[Path]:
    """Each as it is named and as it is, outermost first, without what is inside another."""
    named = {found for path in wanted for found in (path.absolute(), path.resolve()) if found.exists()}
    kept: list[Path] = []
    for path in sorted(named, key=lambda path: len(path.parts)):
        # / and the system's own folders are there anyhow.
        if len(path.parts) > 2 and not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept
