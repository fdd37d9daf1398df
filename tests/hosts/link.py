"""The cable between a host and the bridge: whole, cut or bad."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts.netns import CommandError, NetworkNamespace

RELAY = Path(__file__).with_name("slow_link.py")
BRIDGE = "br0"
DEVICE = "eth0"
START_S = 30.0

Spawn = Callable[..., "subprocess.Popen[bytes]"]
"""Starts a command that ends with the lab: (command, file for its output)."""


class Link:
    """From `eth0` in the host's network to a port on the bridge in the switch's."""

    def __init__(
        self,
        address: str,
        port: str,
        host: NetworkNamespace,
        switch: NetworkNamespace,
        log: Path,
        spawn: Spawn,
    ) -> None:
        self._port = port
        self._host = host
        self._switch = switch
        self._log = log
        self._spawn = spawn
        self._relay: subprocess.Popen[bytes] | None = None
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host.path)
        switch.run("ip", "link", "set", port, "master", BRIDGE, "up")
        host.run("ip", "address", "add", f"{address}/24", "dev", DEVICE)
        host.run("ip", "link", "set", DEVICE, "up")
        host.run("ip", "link", "set", "lo", "up")

    def cut(self) -> None:
        self._switch.run("ip", "link", "set", self._port, "down")

    def slow(self, delay_ms: float, loss: float, mbit: float) -> None:
        """Instead of how it was before; see `Host.slow`."""
        self._make_fast()
        netem = netem_options(delay_ms, loss, mbit)
        towards = self._switch.run("tc", "qdisc", "replace", "dev", self._port, "root", *netem, check=False)
        if towards.returncode == 0:
            self._host.run("tc", "qdisc", "replace", "dev", DEVICE, "root", *netem)
        elif "unknown" in towards.stderr:
            # A kernel without netem: a process that stands between the host and the bridge does the same.
            self._stand_between(delay_ms, loss, mbit)
        else:
            raise CommandError(f"tc {' '.join(netem)}: {towards.stderr.strip()}")

    def heal(self) -> None:
        self._make_fast()
        self._switch.run("ip", "link", "set", self._port, "up")

    def remove(self) -> None:
        self._end_relay()
        self._switch.run("ip", "link", "del", self._port, check=False)

    def _make_fast(self) -> None:
        self._end_relay()
        for network, device in ((self._switch, self._port), (self._host, DEVICE)):
            # There is none on a link that is as it was made.
            network.run("tc", "qdisc", "del", "dev", device, "root", check=False)

    def _stand_between(self, delay_ms: float, loss: float, mbit: float) -> None:
        inner, outer = f"{self._port}i", f"{self._port}o"
        self._switch.run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        self._switch.run("ip", "link", "set", inner, "up")
        self._switch.run("ip", "link", "set", outer, "master", BRIDGE, "up")
        self._switch.run("ip", "link", "set", self._port, "nomaster")
        ready = self._log.with_name("relay-ready")
        ready.unlink(missing_ok=True)
        arguments = [self._port, inner, delay_ms / 1000, loss, mbit * 1e6, ready]
        with self._log.open("ab") as output:
            command = [*self._switch.enter, sys.executable, str(RELAY), *map(str, arguments)]
            self._relay = self._spawn(command, output)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if self._relay.poll() is not None or time.monotonic() > deadline:
                raise CommandError(f"the slow link did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def _end_relay(self) -> None:
        if self._relay is None:
            return
        self._relay.kill()
        self._relay.wait()
        self._relay = None
        self._switch.run("ip", "link", "del", f"{self._port}i", check=False)
        self._switch.run("ip", "link", "set", self._port, "master", BRIDGE, check=False)


def netem_options(delay_ms: float, loss: float, mbit: float) -> list[str]:
    """What tc's netem is told."""
    options = ["netem", "delay", f"{delay_ms:g}ms"]
    if loss:
        options += ["loss", f"{loss * 100:g}%"]
    if mbit:
        options += ["rate", f"{mbit:g}mbit"]
    return options
