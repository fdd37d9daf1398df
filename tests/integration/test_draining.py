"""Replicas that an operator takes out of service, and brings back: nothing fails, and nothing new comes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.stored_responses import find_holder
from tests.integration.in_process import (
    HOST,
    SECRET,
    AppServer,
    Cluster,
    Node,
    bound_socket,
    chat,
    http_client,
    running,
    until,
)
from workers.http import ReplicaApp
from workers.messages import DRAIN_PATH, SECRET_HEADER
from workers.stored_responses import ResponseGuard

PATH = "/admin/replicas/drain"


async def drain(cluster: Cluster, name: str, **options: Any) -> httpx.Response:
    return await cluster.http.post(PATH, json={"name": name, **options})


def state(cluster: Cluster, replica: str) -> str:
    entry = cluster.core.directory.get(replica)
    assert entry is not None
    return cluster.core.directory.state(entry)


def everywhere(cluster: Cluster, replica: str, wanted: str) -> bool:
    directories = [router.core.directory for router in cluster.routers]
    return all(directory.state(directory.get(replica)) == wanted for directory in directories)  # type: ignore[arg-type]


async def replica_of(cluster: Cluster, text: str) -> str:
    answer = await cluster.http.post("/v1/chat/completions", json=chat(text))
    assert answer.status_code == 200
    return answer.headers["x-manta-replica"]


async def test_a_replica_that_drains_gets_nothing_new_from_any_router_until_it_is_taken_back() -> None:
    async with running(3, routers=2) as cluster:
        told = await drain(cluster, "replica-1")
        assert told.status_code == 200
        (said,) = told.json()["replicas"]
        assert said == {
            "id": "replica-1",
            "node": "this-node",
            "address": cluster.node("replica-1").info.address,
            "draining": True,
            "open_requests": 0,
        }
        await until(lambda: everywhere(cluster, "replica-1", "draining"))
        for router in cluster.routers:
            await cluster.talk_to(router)
            answered = {await replica_of(cluster, f"{number} asks") for number in range(8)}
            assert answered == {"replica-0", "replica-2"}
        back = await drain(cluster, "replica-1", undo=True)
        assert [each["draining"] for each in back.json()["replicas"]] == [False]
        await until(lambda: everywhere(cluster, "replica-1", "ready"))
        assert "replica-1" in {await replica_of(cluster, f"{number} again") for number in range(8)}


async def test_no_request_fails_while_replicas_drain_under_traffic_one_after_the_other() -> None:
    async with running(3, routers=2, decode_tokens_per_s=400.0) as cluster:
        stop, answers = asyncio.Event(), list[bytes]()

        async def client(number: int, http: httpx.AsyncClient) -> None:
            while not stop.is_set():
                stream = chat(f"{number} asks", max_tokens=16, stream=True)
                answer = await http.post("/v1/chat/completions", json=stream)
                assert answer.status_code == 200
                answers.append(answer.content)

        https = [http_client(base_url=router.url) for router in cluster.routers]
        async with asyncio.TaskGroup() as clients:
            for number in range(12):
                clients.create_task(client(number, https[number % 2]))
            for node in cluster.nodes:
                await until(lambda: node.hosted.app.open_requests)  # noqa: B023
                assert (await drain(cluster, node.id)).status_code == 200
                await until(lambda: everywhere(cluster, node.id, "draining"))  # noqa: B023
                await until(lambda: nothing_under_way(cluster, node))  # noqa: B023
                before, seen = len(answers), node.engine.contents[:]
                await until(lambda: len(answers) > before + 12)  # noqa: B023
                assert node.engine.contents == seen, "something new came"
                assert (await drain(cluster, node.id, undo=True)).status_code == 200
                await until(lambda: everywhere(cluster, node.id, "ready"))  # noqa: B023
            stop.set()
        for http in https:
            await http.aclose()
        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)


def nothing_under_way(cluster: Cluster, node: Node) -> bool:
    """Neither at the replica nor on the way to it."""
    chosen = any(router.core.ledger.load(node.id).open_requests for router in cluster.routers)
    return not chosen and not node.hosted.app.open_requests


async def test_what_is_open_is_counted_until_it_has_ended() -> None:
    async with running(2, decode_tokens_per_s=50.0) as cluster:
        body = chat("tell me all", max_tokens=40, stream=True)
        async with cluster.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            node = cluster.serving()
            (said,) = (await drain(cluster, node.id)).json()["replicas"]
            assert said["open_requests"] == 1
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        (said,) = (await drain(cluster, node.id)).json()["replicas"]
        assert (said["draining"], said["open_requests"]) == (True, 0)


async def test_a_router_that_starts_later_knows_which_replicas_drain(cluster: Cluster) -> None:
    await drain(cluster, "replica-0")
    late = await cluster.add_router()
    await until(lambda: [entry.info.id for entry in late.core.directory.ready()] == ["replica-1"])
    entry = late.core.directory.get("replica-0")
    assert entry is not None
    await until(lambda: late.core.directory.state(entry) == "draining")
    await drain(cluster, "replica-0", undo=True)
    await until(lambda: late.knows(cluster.nodes))


async def test_a_node_is_drained_with_all_its_replicas_and_only_by_force_when_none_is_left(
    cluster: Cluster,
) -> None:
    refused = await drain(cluster, "this-node")
    assert refused.status_code == 409
    assert "No replica would be left" in refused.json()["error"]["message"]
    assert [state(cluster, node.id) for node in cluster.nodes] == ["ready", "ready"]
    forced = await drain(cluster, "this-node", force=True)
    assert [each["id"] for each in forced.json()["replicas"]] == ["replica-0", "replica-1"]
    await until(lambda: not cluster.core.directory.ready())
    assert (await cluster.http.get("/readyz")).status_code == 503
    back = await drain(cluster, HOST, undo=True)
    assert len(back.json()["replicas"]) == 2
    await until(lambda: cluster.router.knows(cluster.nodes))


async def test_the_last_replica_that_takes_requests_is_kept_unless_forced(cluster: Cluster) -> None:
    await drain(cluster, "replica-0")
    await until(lambda: state(cluster, "replica-0") == "draining")
    assert (await drain(cluster, "replica-0")).status_code == 200, "asking again is no harm"
    assert (await drain(cluster, "replica-1")).status_code == 409
    assert await replica_of(cluster, "still served") == "replica-1"


async def test_requests_wait_while_nothing_takes_them_and_go_on_when_something_does(cluster: Cluster) -> None:
    await drain(cluster, "this-node", force=True)
    await until(lambda: not cluster.core.directory.ready())
    asked = asyncio.create_task(replica_of(cluster, "is anybody there"))
    await until(lambda: len(cluster.core.room) == 1)
    await drain(cluster, "replica-1", undo=True)
    assert await asked == "replica-1"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"name": "replica-9"}', 404, "replica-0, replica-1"),
        (b'{"name": "replica-"}', 409, "replica-0, replica-1"),
        (b'{"name": 7}', 400, "name"),
        (b'{"nam": "replica-0"}', 400, "nam"),
        (b"{", 400, "JSON"),
        (b"\xff", 400, "JSON"),
        (b'{"name": "' + b"x" * 70_000 + b'"}', 413, "65536"),
    ],
)
async def test_what_can_not_be_drained_is_refused_with_what_is_wrong(
    cluster: Cluster, body: bytes, status: int, said: str
) -> None:
    refused = await cluster.http.post(PATH, content=body)
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
    assert all(state(cluster, node.id) == "ready" for node in cluster.nodes)


async def test_only_the_admin_key_drains() -> None:
    async with running(2, router={"admin_key": "open sesame"}) as cluster:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await cluster.http.post(PATH, json={"name": "replica-0"}, headers=headers)
            assert refused.status_code == 401
        assert state(cluster, "replica-0") == "ready"
        headers = {"authorization": "Bearer open sesame"}
        assert (await cluster.http.post(PATH, json={"name": "replica-0"}, headers=headers)).status_code == 200
        assert (await cluster.http.get(PATH, headers=headers)).status_code == 405


async def test_a_replica_that_can_not_be_told_is_an_error_that_says_which_and_who_did(
    cluster: Cluster,
) -> None:
    dead, other = cluster.nodes
    await dead.kill()
    answer = await drain(cluster, "this-node", force=True)
    assert answer.status_code == 502
    message = answer.json()["error"]["message"]
    assert message.startswith("1 of 2 replicas could not be told: replica-0: ")
    assert message.endswith("replica-1 did as told.")
    assert other.hosted.cordoned
    await dead.revive()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_a_replica_is_told_only_with_the_secret_and_in_the_two_ways_there_are(
    cluster: Cluster, method: str
) -> None:
    node = cluster.nodes[0]
    async with http_client(base_url=node.url) as http:
        assert (await http.request(method, DRAIN_PATH)).status_code == 401
        assert not node.hosted.cordoned
        told = await http.request(method, DRAIN_PATH, headers={SECRET_HEADER: SECRET})
    assert told.status_code == (200 if method in ("PUT", "DELETE") else 405)
    assert node.hosted.cordoned == (method == "PUT")


async def test_taking_back_does_not_stop_what_stops_a_replica_otherwise(cluster: Cluster) -> None:
    cluster.nodes[0].hosted.sick = True
    (said,) = (await drain(cluster, "replica-0", undo=True)).json()["replicas"]
    assert said["draining"] is True


async def test_draining_is_no_sickness(cluster: Cluster) -> None:
    await drain(cluster, "replica-0")
    hosted = cluster.nodes[0].hosted
    assert hosted.cordoned
    assert not hosted.sick
    await hosted.engine.check_health()


class Responses:
    """vLLM's store in small: makes responses in the background, and says how far they are."""

    def __init__(self) -> None:
        self.status: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await receive()
            response = f"resp_{len(self.status)}"
            self.status[response] = "queued"
        else:
            response = scope["path"].rpartition("/")[2]
        found = response in self.status
        body = json.dumps({"id": response, "status": self.status[response]}).encode() if found else b"{}"
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def stored(cluster: Cluster) -> Any:
    """The first replica with responses instead of chats: (store, its application, a client with the secret)."""
    node, store = cluster.nodes[0], Responses()
    app = ReplicaApp(ResponseGuard(store), node.hosted.publisher, SECRET)
    server = AppServer([app], [bound_socket(HOST)])
    await server.start()
    async with http_client(f"http://{server.addresses[0]}", {SECRET_HEADER: SECRET}) as http:
        yield store, app, http
    await server.stop()


async def test_a_response_in_the_background_is_an_open_request_until_it_has_ended(
    stored: tuple[Responses, ReplicaApp, httpx.AsyncClient],
) -> None:
    store, app, http = stored
    made = await http.post("/v1/responses", json={"input": "hi", "background": True})
    assert made.json() == {"id": "resp_0", "status": "queued"}
    asked = await http.get("/v1/responses/resp_0")
    assert asked.json()["status"] == "queued", "the connection answers on meanwhile"
    store.status["resp_0"] = "in_progress"
    assert app.open_requests == 1
    store.status["resp_0"] = "completed"
    await until(lambda: app.idle.is_set())
    assert app.open_requests == 0


async def test_a_response_that_the_store_forgot_is_not_waited_for(
    stored: tuple[Responses, ReplicaApp, httpx.AsyncClient],
) -> None:
    store, app, http = stored
    await http.post("/v1/responses", json={"input": "hi", "background": True})
    assert app.open_requests == 1
    store.status.clear()
    await until(lambda: app.idle.is_set())


async def test_a_draining_replica_is_asked_for_what_it_holds_and_not_to_continue_it(cluster: Cluster) -> None:
    entry = cluster.core.directory.get("replica-0")
    assert entry is not None
    await drain(cluster, "replica-0")
    await until(lambda: state(cluster, "replica-0") == "draining")
    assert entry in cluster.core.directory.reachable()
    assert entry not in cluster.core.directory.ready()
    asked: list[str] = []

    class Asking:
        """The directory, which notes whom it was made to ask."""

        ready, reachable = cluster.core.directory.ready, cluster.core.directory.reachable

        def ask(self, entry: Any, *args: Any) -> Any:
            asked.append(entry.info.id)
            return cluster.core.directory.ask(entry, *args)

    for continues, askable in ((False, ["replica-0", "replica-1"]), (True, ["replica-1"])):
        asked.clear()
        assert await find_holder(Asking(), "resp_1", "", continues) is None  # type: ignore[arg-type]
        assert sorted(asked) == askable
