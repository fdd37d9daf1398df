"""The scripts of `cluster/ray-up/` on one host, with a program that stands for Ray's command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "cluster" / "ray-up"

RAY = """#!/bin/bash
# `ray start` stays until it is killed, with a raylet beside it; `ray stop` ends the raylet.
echo "$*" >> "$HOME/calls"
case $1 in
start)
    [ ! -e "$HOME/refuses" ] || { echo "can't start"; exit 1; }
    "$HOME/raylet" 600 &
    echo $! > "$HOME/raylet.pid"
    echo "$RAY_AUTH_MODE ${A_KEY:-}" > "$HOME/environment"
    echo "Ray runtime started."
    wait ;;
stop) kill "$(cat "$HOME/raylet.pid")" 2>/dev/null || true ;;
esac
"""

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("bash", "setsid", "pgrep", "hostname")),
    reason="needs bash, setsid, pgrep and hostname",
)


class RayUpHost:
    """A home folder as `ray up` leaves it, with the scripts in `~/manta/ray-up`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.base = home / "manta"
        shutil.copytree(FOLDER, self.base / "ray-up")
        venv = home / "venv" / "bin"
        venv.mkdir(parents=True)
        (venv / "ray").write_text(RAY)
        (venv / "ray").chmod(0o755)
        (venv / "haproxy").write_text('#!/bin/sh\necho "$@"\n')
        (venv / "python").write_text(f"#!/bin/sh\necho ${{RAY_SERVE_HAPROXY_BINARY_PATH:-{venv}/haproxy}}\n")
        for name in ("haproxy", "python"):
            (venv / name).chmod(0o755)
        # Ray's processes are found by their names.
        shutil.copy(shutil.which("sleep") or "", home / "raylet")
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text("a-token")
        (self.base / "ray.env").write_text("RAY_AUTH_MODE=token\n")

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "MANTA_SYSTEMD": "no"}
        return subprocess.run(
            [str(self.base / "ray-up" / script), *arguments],
            env=environment, cwd=self.home, capture_output=True, text=True, timeout=150,
        )  # fmt: skip

    def prepared(self) -> RayUpHost:
        done = self.run("install.sh", "--use", str(self.home / "venv"))
        assert done.returncode == 0, done.stderr
        return self

    def start(
        self, *options: str, command: str = "--address=10.0.0.1:6379"
    ) -> subprocess.CompletedProcess[str]:
        return self.run("start.sh", *options, "ray", "start", "--block", command)

    def calls(self) -> list[str]:
        return [line for line in (self.home / "calls").read_text().splitlines() if line.startswith("start")]

    def raylet(self) -> int:
        return int((self.home / "raylet.pid").read_text())


def wait_for(what: str, true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RayUpHost]:
    made = RayUpHost(tmp_path)
    yield made
    made.run("stop.sh")


def test_ray_starts_with_the_environment_of_the_cluster(host: RayUpHost) -> None:
    done = host.prepared().start()
    assert done.returncode == 0, done.stderr
    assert host.calls() == ["start --block --address=10.0.0.1:6379"]
    assert (host.home / "environment").read_text().strip() == "token"


def test_secrets_reach_ray_and_no_login_shell(host: RayUpHost) -> None:
    (host.base / "secrets.env").write_text("A_KEY=for-routers\n")
    host.prepared().start()
    assert (host.home / "environment").read_text().strip() == "token for-routers"
    assert (host.base / "secrets.env").stat().st_mode & 0o077 == 0
    assert "for-routers" not in (host.base / "profile.sh").read_text()


def test_ray_that_dies_is_started_again_and_what_it_left_is_killed(host: RayUpHost) -> None:
    host.prepared().start()
    left = host.raylet()
    block = psutil.Process(left).parent()
    assert block is not None
    block.send_signal(signal.SIGKILL)
    wait_for("a second start", lambda: len(host.calls()) == 2)
    wait_for("the end of what was left", lambda: gone(left))
    wait_for("a raylet again", lambda: host.raylet() != left)


def test_ray_is_started_again_however_often_it_fails(host: RayUpHost) -> None:
    host.prepared().start()
    (host.home / "refuses").touch()
    block = psutil.Process(host.raylet()).parent()
    assert block is not None
    block.kill()
    wait_for("three starts in vain", lambda: len(host.calls()) >= 3)
    (host.home / "refuses").unlink()
    wait_for("a raylet", lambda: not gone(host.raylet()))


def test_stopping_ends_supervisor_and_ray_and_nothing_starts_them_again(host: RayUpHost) -> None:
    host.prepared().start()
    raylet = host.raylet()
    supervisor = int((host.base / "supervisor.pid").read_text())
    assert host.run("stop.sh").returncode == 0
    wait_for("the end of both", lambda: gone(raylet) and gone(supervisor))
    assert len(host.calls()) == 1
    assert host.run("stop.sh").returncode == 0


def test_ray_stop_ends_the_supervisor_too(host: RayUpHost) -> None:
    """`ray down` runs it in a login shell on the head."""
    host.prepared().start()
    raylet = host.raylet()
    supervisor = int((host.base / "supervisor.pid").read_text())
    environment = {"HOME": str(host.home), "PATH": os.environ["PATH"]}
    shell = ["bash", "-c", ". ~/.bashrc; ray stop --force"]
    subprocess.run(shell, env=environment, check=True, timeout=60)
    wait_for("the end of both", lambda: gone(raylet) and gone(supervisor))
    assert "stop --force" in (host.home / "calls").read_text().splitlines()
    assert len(host.calls()) == 1


def test_starting_again_replaces_what_runs(host: RayUpHost) -> None:
    host.prepared().start()
    first = host.raylet()
    assert host.start(command="--address=10.0.0.9:6379").returncode == 0
    wait_for("the end of the first", lambda: gone(first))
    assert host.calls()[-1] == "start --block --address=10.0.0.9:6379"
    assert not gone(host.raylet())


def test_what_runs_unchanged_is_left_alone_where_that_is_asked_for(host: RayUpHost) -> None:
    host.prepared().start("--keep")
    first = host.raylet()
    assert "runs already" in host.start("--keep").stdout
    assert (host.raylet(), len(host.calls())) == (first, 1)


@pytest.mark.parametrize("change", ["command", "environment", "installation"])
def test_a_change_is_not_kept_out(host: RayUpHost, change: str) -> None:
    host.prepared().start("--keep")
    if change == "environment":
        (host.base / "ray.env").write_text("RAY_AUTH_MODE=token\nRAY_health_check_period_ms=1\n")
    if change == "installation":
        host.prepared()
    host.start(
        "--keep", command="--address=10.0.0.9:6379" if change == "command" else "--address=10.0.0.1:6379"
    )
    assert len(host.calls()) == 2


def test_a_host_takes_the_roles_that_the_list_gives_its_name(host: RayUpHost) -> None:
    name = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    (host.base / "roles").write_text(f"another router\n{name} unified prefill\n")
    host.prepared().start()
    assert host.calls()[0].endswith('--resources={"manta_unified": 1000, "manta_prefill": 1000}')


def test_without_a_token_nothing_starts(host: RayUpHost) -> None:
    (host.home / ".ray" / "auth_token").unlink()
    done = host.prepared().start()
    assert done.returncode == 1
    assert "there is no token" in done.stderr
    assert not (host.home / "calls").exists()


def test_an_object_store_larger_than_shared_memory_is_refused_with_both_numbers(host: RayUpHost) -> None:
    done = host.prepared().start(command=f"--object-store-memory={1 << 60}")
    assert done.returncode == 1
    assert str(1 << 60) in done.stderr
    assert str(shutil.disk_usage("/dev/shm").total) in done.stderr


def test_login_shells_know_the_environment_once_however_often_it_is_installed(host: RayUpHost) -> None:
    (host.home / ".bashrc").write_text("export MINE=1\n")
    host.prepared().prepared()
    assert (host.home / ".bashrc").read_text() == f"export MINE=1\n. {host.base}/profile.sh\n"
    shown = subprocess.run(
        ["bash", "-c", ". ~/.bashrc; command -v ray; echo $RAY_AUTH_MODE"],
        env={"HOME": str(host.home), "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert shown == [str(host.base / "ray-up" / "bin" / "ray"), "token"]


def test_an_installation_that_lacks_its_files_says_which(host: RayUpHost) -> None:
    done = host.run("install.sh", "cpu", "manta.whl")
    assert done.returncode == 1
    assert f"{host.base}/requirements/cpu.lock" in done.stderr


def test_haproxy_keeps_its_statistics_to_the_host_and_splices_nothing(host: RayUpHost) -> None:
    # As it is in a login shell once the host has been set up: the wrapper must not become itself.
    with (host.base / "ray.env").open("a") as file:
        file.write("RAY_SERVE_HAPROXY_BINARY_PATH=$HOME/manta/ray-up/haproxy.sh\n")
    install = [str(host.base / "ray-up" / "install.sh"), "--use", str(host.home / "venv")]
    wrapper = str(host.base / "ray-up" / "haproxy.sh")
    for variables in ({}, {"RAY_SERVE_HAPROXY_BINARY_PATH": wrapper}):
        environment = {"HOME": str(host.home), "PATH": os.environ["PATH"], **variables}
        subprocess.run(install, env=environment, check=True, timeout=60)
    config = host.home / "haproxy.cfg"
    config.write_text("  bind *:8404\n  bind :9101\n  bind *:8000\n")
    done = subprocess.run([wrapper, "-f", str(config), "-db"], capture_output=True, text=True, check=True)
    assert done.stdout == f"-dS -f {config} -db\n"
    assert config.read_text() == "  bind 127.0.0.1:8404\n  bind :9101\n  bind *:8000\n"


def test_the_cache_is_a_folder_where_there_is_something_at_its_place_already(host: RayUpHost) -> None:
    place = host.home / "disk"
    (place / "others").mkdir(parents=True)
    done = host.run("cache-disk.sh", str(place / "kv"))
    assert done.returncode == 0, done.stderr
    assert (place / "kv").is_dir()
    # A restart of the host mounts again what was mounted.
    again = subprocess.run([str(host.base / "mount-cache")], capture_output=True, text=True)
    assert again.returncode == 0
    assert again.stdout == done.stdout
