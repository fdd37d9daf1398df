"""The `manta` command at its edges: exit codes, messages, and what a script reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import cluster.cli
from cluster import processes, state
from cluster.state import ClusterState

ROOT = Path(__file__).parents[2]
ANSWER = {
    "ready": True,
    "endpoint": "http://127.0.0.1:8000",
    "routers": [{"id": "r1"}],
    "replicas": [
        {
            "id": "unified-abc.0",
            "role": "unified",
            "node": "ab" * 28,
            "address": "127.0.0.1:4001",
            "state": "ready",
            "waiting": 1,
            "running": 2,
            "kv_used": 0.25,
        }
    ],
}


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def sim_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "sim.yaml"
    path.write_text("name: sim\nengine: {kind: sim}\n")
    return path


class Admin:
    """A stand-in for `/admin/replicas` that notes the key it was asked with."""

    def __init__(self) -> None:
        self.body = json.dumps(ANSWER).encode()
        self.code = 200
        self.authorization: str | None = None
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                admin.authorization = self.headers.get("Authorization")
                self.send_response(admin.code if self.path == "/admin/replicas" else 404)
                self.end_headers()
                self.wfile.write(admin.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def head() -> Iterator[processes.ProcessId]:
    """A process that stands for Ray's head."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield processes.identify(process.pid)
    process.kill()
    process.wait()


def manta(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cluster.cli.app, [str(argument) for argument in arguments])


def remember(head: processes.ProcessId | None, name: str = "sim", **fields: str) -> ClusterState:
    values = {
        "config": "sim.yaml",
        "ray_address": "127.0.0.1:6399",
        "endpoint": "http://127.0.0.1:1",
    } | fields
    made = ClusterState(name=name, head=head, **values)
    state.save(made)
    return made


def test_check_prints_one_plain_line_per_finding_and_exits_0_when_nothing_is_wrong(sim_yaml: Path) -> None:
    text = sim_yaml.read_text() + "http: {port: 18431}\nray: {port: 18432}\n"
    sim_yaml.write_text(text)
    done = manta("check", sim_yaml)
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 3
    assert "\x1b" not in done.stdout


def test_check_exits_1_on_an_error_and_says_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {path: /no/such/model}\nengine: {device: cpu}\n")
    done = manta("check", path)
    assert done.exit_code == 1
    assert "error" in done.stdout
    assert "/no/such/model" in done.stdout


@pytest.mark.parametrize("command", ["check", "up"])
def test_a_file_that_is_no_configuration_is_explained_without_a_traceback(
    tmp_path: Path, command: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("http: {port: none}\n")
    done = manta(command, path)
    assert done.exit_code == 1
    assert "bad.yaml: http.port: found 'none'; needed: " in done.stderr
    assert isinstance(done.exception, SystemExit)


def test_status_exits_3_when_nothing_runs_in_words_and_in_json() -> None:
    assert (manta("status").exit_code, manta("status").stdout) == (3, "not running\n")
    done = manta("status", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout) == {"ready": False, "endpoint": "", "routers": [], "replicas": []}


def test_status_json_is_what_the_cluster_answers(admin: Admin, head: processes.ProcessId) -> None:
    remember(head, endpoint=admin.endpoint)
    done = manta("status", "--json")
    assert done.exit_code == 0
    assert done.stdout == admin.body.decode() + "\n"


def test_status_shows_a_row_per_replica(admin: Admin, head: processes.ProcessId) -> None:
    remember(head, endpoint=admin.endpoint)
    done = manta("status")
    assert done.exit_code == 0
    row = next(line for line in done.stdout.splitlines() if line.startswith("unified-abc.0"))
    assert row.split() == ["unified-abc.0", "unified", "ready", "abababab", "127.0.0.1:4001", "1", "2", "25%"]


def test_status_shows_the_admin_key_of_the_configuration(
    admin: Admin, head: processes.ProcessId, sim_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", "open sesame")
    sim_yaml.write_text(sim_yaml.read_text() + "router: {admin_key: 'env:TEST_ADMIN_KEY'}\n")
    remember(head, endpoint=admin.endpoint, config=str(sim_yaml))
    assert manta("status").exit_code == 0
    assert admin.authorization == "Bearer open sesame"


@pytest.mark.parametrize("code", [200, 401])
def test_status_exits_1_while_a_cluster_runs_and_is_not_ready(
    admin: Admin, head: processes.ProcessId, code: int
) -> None:
    remember(head, endpoint=admin.endpoint)
    admin.code, admin.body = code, json.dumps(ANSWER | {"ready": False, "replicas": []}).encode()
    assert manta("status").exit_code == 1
    done = manta("status", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["ready"] is False


def test_status_of_a_cluster_whose_head_died_says_so(head: processes.ProcessId) -> None:
    remember(processes.ProcessId(head.pid, head.created - 3600))
    done = manta("status")
    assert done.exit_code == 3
    assert "ended without `manta down`" in done.stdout


def test_a_second_up_of_the_same_name_points_at_status_and_down(
    sim_yaml: Path, head: processes.ProcessId
) -> None:
    remember(head)
    done = manta("up", sim_yaml)
    assert done.exit_code == 1
    assert "sim runs already at http://127.0.0.1:1" in done.stderr
    assert "manta status" in done.stderr
    assert "manta down" in done.stderr
    assert processes.is_alive(head)


def test_up_starts_nothing_on_a_machine_that_does_not_fit(sim_yaml: Path, state_folder: Path) -> None:
    sim_yaml.write_text(sim_yaml.read_text() + "ray: {object_store_mib: 99999999}\n")
    done = manta("up", sim_yaml)
    assert done.exit_code == 1
    assert "not started: 1 error, see above" in done.stderr
    assert "/dev/shm" in done.stderr
    assert not state_folder.exists()


def test_down_stops_the_recorded_process_and_forgets_it(head: processes.ProcessId) -> None:
    remember(head)
    done = manta("down")
    assert done.exit_code == 0, done.output
    assert "sim is down: 1 processes ended" in done.stdout
    assert not processes.is_alive(head)
    assert state.names() == []


def test_down_leaves_a_process_alone_that_only_has_the_same_number(head: processes.ProcessId) -> None:
    remember(processes.ProcessId(head.pid, head.created - 3600))
    assert manta("down").exit_code == 0
    assert processes.is_alive(head)
    assert state.names() == []


def test_down_with_nothing_to_stop_is_no_error() -> None:
    done = manta("down")
    assert (done.exit_code, done.stdout) == (0, "nothing to stop\n")


def test_of_several_clusters_one_must_be_named(head: processes.ProcessId) -> None:
    remember(head, "one")
    remember(head, "two")
    done = manta("down")
    assert done.exit_code == 1
    assert "--name: one, two" in done.stderr
    assert processes.is_alive(head)
    assert manta("status", "--name", "one").exit_code == 1


def test_a_state_file_that_is_damaged_is_named(state_folder: Path) -> None:
    state_folder.mkdir()
    (state_folder / "sim.json").write_text('{"name": 3')
    done = manta("status")
    assert done.exit_code == 1
    assert str(state_folder / "sim.json") in done.stderr


def test_processes_that_left_the_session_are_found_by_their_mark(head: processes.ProcessId) -> None:
    marked = os.environ | {processes.MARK: "the mark"}
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True, env=marked)
    try:
        found = {member.pid for member in processes.belonging_to(head, "the mark")}
        assert found == {head.pid, stray.pid}
        assert processes.stop(head, "the mark") == processes.StopReport(stopped=2, killed=0, left=())
    finally:
        stray.kill()
        stray.wait()


def test_a_process_that_ignores_the_request_to_end_is_killed() -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('on', flush=True); time.sleep(600)"
    )
    deaf = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert deaf.stdout is not None
    with deaf:
        assert deaf.stdout.readline() == "on\n"
        report = processes.stop(processes.identify(deaf.pid), "", grace_s=0.2)
        assert report == processes.StopReport(stopped=1, killed=1, left=())


def test_fetching_an_unknown_model_lists_the_known_ones() -> None:
    done = manta("model", "fetch", "gpt-5")
    assert done.exit_code == 1
    assert "SmolLM2-135M-Instruct" in done.stderr


def test_the_command_answers_without_importing_ray() -> None:
    program = "import sys, cluster.cli; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
