"""A lab's hosts under `ray up`, `serve deploy` and `manta`, with the commands that a person types on the operator's."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from cluster.config import ClusterConfig
from tests.hosts.host import Host
from tests.hosts.lab import REPOSITORY, Lab

T = TypeVar("T")

ENVIRONMENT = {
    # The hosts have this Python in place of an installation.
    "PYTHONPATH": str(REPOSITORY),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # A second instead of half a minute in which a stopped router stays for load balancers.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
"""For `Lab`."""
SHM_MIB = 384
"""The head's object store has 256 MiB."""
CHAT_KEY, ADMIN_KEY = "lab-chat-key", "lab-admin-key"
PORT = 8000
ASK = Path(__file__).with_name("ask_http.py")
HEAD = "head"

SHARED: dict[str, Any] = {
    "router": {"tenants": {"team": {"api_keys": ["env:CHAT_KEY"]}}, "admin_key": "env:ADMIN_KEY"},
    "placement": {"use_roles": True},
    "http": {"host": "0.0.0.0", "port": PORT},
    "ray": {"object_store_mib": 120},
}
"""Sections that every configuration here has."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Process:
    """One replica of a Serve deployment."""

    pid: int
    host: str
    """Name."""


class RayUpHosts:
    """Named hosts with their roles; the first router's is where clients ask. Files are in the operator's home."""

    def __init__(self, lab: Lab, workers: Mapping[str, Sequence[str]]) -> None:
        self.operator = lab.operator
        self.head, *made = lab.make([HEAD, *workers], shm_mib=SHM_MIB)
        self.workers = {host.name: host for host in made}
        self.roles = dict(workers)
        entry = next(name for name, roles in workers.items() if "router" in roles)
        self.endpoint = f"http://{self.workers[entry].address}:{PORT}"
        self.name = ""
        self._token = ""
        self._names = {host.address: host.name for host in (self.head, *made)}

    @property
    def all(self) -> list[Host]:
        """Of the cluster, the head first."""
        return [self.head, *self.workers.values()]

    # What a person types.

    def up(self, config: Mapping[str, Any]) -> None:
        """`ray up`, and wait until all hosts have joined. Raises HostError."""
        self._write_config(config)
        secrets = f"CHAT_KEY={CHAT_KEY}\nADMIN_KEY={ADMIN_KEY}\n"
        self.operator.write(".config/manta/secrets.env", secrets)
        self.type("ray get-auth-token --generate > /dev/null")
        self._token = self.operator.run("cat ~/.ray/auth_token").stdout.strip()
        workers = [
            f"--worker {self.workers[name].address}={','.join(roles)}" for name, roles in self.roles.items()
        ]
        self.type(
            f"python -m cluster.cli export ray-up ~/my.yaml --provider local -o ~/up.yaml --venv {sys.prefix} "
            f"--ssh-user root --head {self.head.address} {' '.join(workers)}"
        )
        self.type("ray up -y ~/up.yaml", 400)
        wait_for("all hosts in `ray status`", lambda: self._active() == len(self.all), 240)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Export and `serve deploy`; what changes, changes some time later."""
        self._write_config(config)
        self.type("python -m cluster.cli export serve ~/my.yaml -o ~/serve.yaml")
        self.type("ray rsync-up ~/up.yaml ~/serve.yaml '~/serve.yaml'")
        self.exec("serve deploy ~/serve.yaml")

    def exec(self, command: str) -> str:
        """`ray exec`. Raises HostError."""
        return self.type(f"ray exec ~/up.yaml {shlex.quote(command)}")

    def drain(self, target: str, *options: str) -> str:
        """`manta drain`. Raises HostError when it fails."""
        arguments = shlex.join([target, *options, "--endpoint", self.endpoint])
        return self.type(f"MANTA_ADMIN_KEY={ADMIN_KEY} python -m cluster.cli drain {arguments}")

    def type(self, command: str, timeout_s: float = 180.0) -> str:
        """In the clone of the repository, on the operator's host."""
        return self.operator.run(f"cd {REPOSITORY}\n{command}", timeout_s).stdout

    # What there is.

    def ask(self, path: str, body: object = None, bearer: str = CHAT_KEY) -> Answer:
        """GET, or POST of `body`, from the operator's host at the router's."""
        return self._http(f"{self.endpoint}{path}", body, bearer)

    def admin(self, path: str, body: object = None) -> Any:
        """The answer's content. Fails the test when it is an error."""
        answer = self.ask(path, body, ADMIN_KEY)
        assert answer.status == 200, answer.text
        return answer.json

    def serve_details(self) -> dict[str, Any]:
        """As `ray dashboard` shows it."""
        answer = self._http(f"http://{self.head.address}:8265/api/serve/applications/", None, self._token)
        assert answer.status == 200, answer.text
        return answer.json  # type: ignore[no-any-return]

    def processes(self) -> dict[str, set[Process]]:
        """Of all that runs, by deployment; nothing while a change is under way."""
        application = self.serve_details()["applications"].get(self.name, {})
        deployments = application.get("deployments", {})
        replicas = [each for deployment in deployments.values() for each in deployment["replicas"]]
        if application.get("status") != "RUNNING" or any(each["state"] != "RUNNING" for each in replicas):
            return {}
        return {
            name: {Process(each["pid"], self._names[each["node_ip"]]) for each in deployment["replicas"]}
            for name, deployment in deployments.items()
        }

    def settled(self) -> dict[str, set[Process]]:
        """The same, once no change is under way."""
        return wait_for("an application that runs", self.processes, 180)

    def wait_ready(self, count: int, deadline_s: float = 240.0) -> list[dict[str, Any]]:
        """The replicas that the router knows, once they are so many and all ready."""

        def probe() -> list[dict[str, Any]] | None:
            answer = self.ask("/admin/replicas", bearer=ADMIN_KEY)
            if answer.status != 200:
                return None
            found: list[dict[str, Any]] = answer.json["replicas"]
            return found if [each["state"] for each in found] == ["ready"] * count else None

        return wait_for(f"{count} ready replicas", probe, deadline_s)

    def _active(self) -> int:
        """Nodes that the autoscaler counts as active."""
        active = self.exec("ray status").partition("Active:")[2].partition("Pending:")[0]
        return sum(int(count) for count in re.findall(r"(\d+) local\.cluster\.node", active))

    def _http(self, url: str, body: object, bearer: str) -> Answer:
        method, text = ("GET", "") if body is None else ("POST", json.dumps(body))
        said = self.operator.run(f"python {ASK} {shlex.join([method, url, bearer, text])}", 150).stdout
        return Answer(**json.loads(said))

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.name = ClusterConfig.parse(config).name
        self.operator.write("my.yaml", yaml.safe_dump(dict(config)))


def wait_for(what: str, probe: Callable[[], T | None], deadline_s: float) -> T:
    """The first truthy answer of `probe`; fails the test when there is none in time."""
    end = time.monotonic() + deadline_s
    while not (found := probe()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.5)
    return found


def left_of_ray(host: Host) -> list[str]:
    """Command lines of Ray, Serve and their supervisor that run on a host."""
    marks = ("raylet", "gcs_server", "ray::", "haproxy", "supervise.sh", "dashboard")
    lines = host.run("ps -e -o args").stdout.splitlines()
    return [line for line in lines if any(mark in line for mark in marks)]
