"""`manta drain`: when it is done, what it says, and what it does when it can't go on."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import cluster.cli
from cluster.admin import Admin, AdminError
from cluster.drain import DrainError, Left, Told, ask_drain, progress, said, undone, wait_drained

A = Told("unified-a", "f00d", "10.0.0.1:4001", True, 2)
B = Told("unified-b", "f00d", "10.0.0.1:4002", True, 0)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Looks(Admin):
    """A cluster that answers each look with the next of `answers`, and then with the last for ever."""

    def __init__(self, *answers: dict[str, Any] | AdminError) -> None:
        super().__init__("http://nowhere")
        self._answers = list(answers)
        self.looks = 0

    def ask(self, path: str, body: object = None) -> bytes:
        self.looks += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, AdminError):
            raise answer
        replicas = [{"id": name} | fields for name, fields in answer.items()]
        return json.dumps({"ready": True, "endpoint": "http://nowhere", "replicas": replicas}).encode()


def draining(open_requests: int = 0, **fields: Any) -> dict[str, Any]:
    return {"state": "draining", "open_requests": open_requests} | fields


def wait(admin: Admin, timeout_s: float = 60, on_look: Callable[[Left], None] = lambda _: None) -> Left:
    clock = Clock()
    return wait_drained(admin, [A, B], timeout_s, on_look, clock, clock.sleep)


def test_it_is_done_when_nothing_was_open_twice_in_a_row() -> None:
    seen: list[int] = []
    quiet = {"unified-a": draining(), "unified-b": draining()}
    busy = {"unified-a": draining(1), "unified-b": draining()}
    admin = Looks({"unified-a": draining(2), "unified-b": draining()}, quiet, busy, quiet, quiet)
    assert wait(admin, on_look=lambda left: seen.append(left.total)) == Left(
        {"unified-a": 0, "unified-b": 0}, frozenset()
    )
    assert seen == [2, 0, 1, 0, 0]


def test_a_router_that_has_not_heard_yet_proves_nothing() -> None:
    ready = {"unified-a": {"state": "ready"}, "unified-b": draining()}
    quiet = {"unified-a": draining(), "unified-b": draining()}
    admin = Looks(ready, quiet, ready, quiet)
    wait(admin)
    assert admin.looks == 5


def test_what_the_engine_still_runs_is_open_too() -> None:
    admin = Looks({"unified-a": draining(0, running=1, waiting=2), "unified-b": draining()})
    with pytest.raises(DrainError, match="unified-a has 3 open requests"):
        wait(admin, timeout_s=2)


def test_a_replica_that_has_gone_is_waited_for_no_longer_and_told() -> None:
    left = wait(Looks({"unified-b": draining()}))
    assert left.gone == {"unified-a"}
    assert "gone meanwhile: unified-a" in said("f00d", [A, B], left)


def test_time_that_is_up_is_an_error_that_says_what_is_open_and_that_it_still_drains() -> None:
    admin = Looks({"unified-a": draining(1), "unified-b": draining(4)})
    with pytest.raises(DrainError) as up:
        wait(admin, timeout_s=3)
    assert str(up.value).startswith(
        "after 3 s: unified-a has 1 open request, unified-b has 4 open requests. "
    )
    assert "Nothing new goes there" in str(up.value)


def test_a_router_that_is_away_for_a_moment_is_asked_again() -> None:
    away, failing = AdminError("no answer"), AdminError("answered 503", 503)
    quiet = {"unified-a": draining(), "unified-b": draining()}
    assert wait(Looks(quiet, away, quiet, failing, quiet, quiet)).total == 0
    with pytest.raises(DrainError, match="after 1 s: no answer"):
        wait(Looks(away), timeout_s=1)


def test_a_refusal_is_not_asked_again() -> None:
    admin = Looks(AdminError("answered 401", 401))
    with pytest.raises(AdminError, match="401"):
        wait(admin)
    assert admin.looks == 1


@pytest.mark.parametrize("name", ["unified-a", "unified", "10.0.0.1:4001"])
def test_of_a_replica_it_is_said_how_to_have_one_less(name: str) -> None:
    text = said(name, [A], Left({"unified-a": 0}, frozenset()))
    assert text.startswith("drained: unified-a\n")
    assert "lower `replicas` of the pool" in text
    assert f"`manta drain {name} --undo`" in text


@pytest.mark.parametrize("name", ["f00d", "f0", "10.0.0.1"])
def test_of_a_node_it_is_said_that_ray_can_be_stopped(name: str) -> None:
    text = said(name, [A, B], Left({}, frozenset()))
    assert text.startswith("drained: unified-a, unified-b\n")
    assert "`ray stop`" in text


def test_what_takes_no_requests_after_undo_is_named() -> None:
    back = Told("unified-b", "f00d", "", False, 0)
    assert undone([back]) == "takes requests again: unified-b"
    assert "sick: unified-a" in undone([A, back])


def test_in_a_pipe_every_change_is_a_line_and_nothing_else_is() -> None:
    out = io.StringIO()
    with progress(Console(file=out), [A, B]) as show:
        for count in (2, 2, 1, 0, 0):
            show(Left({"unified-a": count, "unified-b": 0}, frozenset()))
    assert out.getvalue() == "unified-a has 2 open requests\nunified-a has 1 open request\n"


def test_on_a_terminal_every_replica_has_a_bar() -> None:
    out = io.StringIO()
    with progress(Console(file=out, force_terminal=True, width=100), [A, B]) as show:
        show(Left({"unified-a": 7, "unified-b": 0}, frozenset()))
    assert "unified-a" in out.getvalue()
    assert "7 open" in out.getvalue()
    assert "unified-b" in out.getvalue()


# The command.


class Cluster:
    """Stands for a cluster's HTTP side."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.status = 200
        self.told: Any = {"replicas": [{"id": "unified-a", "node": "f00d", "address": "", "draining": True,
                                        "open_requests": 0}]}  # fmt: skip
        self.known = {
            "ready": True,
            "endpoint": "",
            "replicas": [{"id": "unified-a", "state": "draining"}],
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, self.headers.get("authorization"), body))
                self.answer(outer.status, outer.told)

            def do_GET(self) -> None:
                self.answer(200, outer.known)

            def answer(self, status: int, value: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/law"


@pytest.fixture
def there() -> Iterator[Cluster]:
    made = Cluster()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("MANTA_ADMIN_KEY", raising=False)


def manta(*arguments: str) -> Result:
    return CliRunner().invoke(cluster.cli.app, ["drain", *arguments])


def test_the_command_asks_waits_and_says_what_was_drained(
    there: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_ADMIN_KEY", "open sesame")
    result = manta("unified-a", "--endpoint", there.endpoint)
    assert result.exit_code == 0, result.output
    assert "drained: unified-a" in result.output
    body = {"name": "unified-a", "undo": False, "force": False}
    assert there.asked == [("/law/admin/replicas/drain", "Bearer open sesame", body)]


def test_undo_says_what_takes_requests_again(there: Cluster) -> None:
    there.told["replicas"][0]["draining"] = False
    result = manta("f00d", "--undo", "--endpoint", there.endpoint)
    assert (result.exit_code, result.output.strip()) == (0, "takes requests again: unified-a")
    assert there.asked[0][1] is None
    assert there.asked[0][2]["undo"] is True


def test_force_is_passed_on(there: Cluster) -> None:
    manta("f00d", "--force", "--endpoint", there.endpoint)
    assert there.asked[0][2]["force"] is True


def test_time_that_is_up_is_exit_code_1(there: Cluster) -> None:
    there.known["replicas"][0]["open_requests"] = 3  # type: ignore[index]
    result = manta("unified-a", "--timeout", "0", "--endpoint", there.endpoint)
    assert result.exit_code == 1
    assert "unified-a has 3 open requests" in result.output


def test_a_name_of_nothing_is_exit_code_1_with_what_the_cluster_says(there: Cluster) -> None:
    there.status, there.told = 404, {"error": {"message": "No replica is named x. Replicas: unified-a."}}
    result = manta("x", "--endpoint", there.endpoint)
    assert result.exit_code == 1
    assert "answered 404: No replica is named x. Replicas: unified-a." in result.output


def test_a_cluster_that_does_not_answer_is_exit_code_1() -> None:
    result = manta("x", "--endpoint", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "does not answer" in result.output


def test_without_a_cluster_here_one_must_be_named() -> None:
    result = manta("x")
    assert result.exit_code == 1
    assert "--endpoint" in result.output


def test_an_answer_that_is_no_json_is_told_as_it_is(there: Cluster) -> None:
    there.status, there.told = 502, "gone"
    with pytest.raises(AdminError, match='answered 502: "gone"') as refused:
        ask_drain(Admin(there.endpoint), "x")
    assert refused.value.status == 502
