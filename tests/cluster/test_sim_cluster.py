"""Simulated replicas on real Ray Serve, behind HAProxy: what only the whole can show."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from cluster import processes
from cluster.state import ClusterState
from router import decision_log
from router.config import PolicyConfig
from router.policies import policy_from
from tests.cluster.deployed import Deployed, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SLOW_DECODE = {"engine": {"sim": {"decode_tokens_per_s": 20, "virtual_replicas": 1}}}


@pytest.fixture(scope="module")
def cluster(deploy_sim: Callable[..., Deployed]) -> Deployed:
    """Eight replicas in two processes."""
    return deploy_sim(engine={"sim": {"virtual_replicas": 4}})


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_the_openai_client_is_served_through_haproxy(cluster: Deployed) -> None:
    cluster.ready_replicas(8)
    client = openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="any")
    whole = client.chat.completions.create(**chat("a question"))
    pieces = client.chat.completions.create(**chat("a question"), stream=True)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert whole.choices[0].message.content == streamed
    assert [model.id for model in client.models.list()] == ["sim"]


def test_a_repeated_prefix_is_served_from_where_it_is(cluster: Deployed) -> None:
    prompt = "shared words " * 200
    before = chunks(cluster)
    first = cluster.http.post("/v1/chat/completions", json=chat(prompt))
    wait_for("its chunks in the index", lambda: chunks(cluster) >= before + 10)
    cluster.wait_idle()
    again = cluster.http.post("/v1/chat/completions", json=chat(prompt))
    assert again.headers["x-manta-replica"] == first.headers["x-manta-replica"]
    assert first.headers["x-manta-cached"].startswith("hbm=0,")
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 500
    assert again.headers["x-manta-cached"].startswith(f"hbm={cached},")


def chunks(cluster: Deployed) -> int:
    return sum(replica["chunks"] for replica in cluster.replicas())


def test_status_names_routers_and_replicas(cluster: Deployed) -> None:
    status = cluster.http.get("/admin/replicas").json()
    assert status["ready"] is True
    assert status["endpoint"] == cluster.endpoint
    assert [router["state"] for router in status["routers"]] == ["RUNNING"]
    assert len(status["replicas"]) == 8
    expected = {"id", "role", "node", "address", "state", "waiting", "running", "kv_used"}
    assert all(expected <= set(replica) for replica in status["replicas"])
    assert all(replica["address"].startswith("127.0.0.1:") for replica in status["replicas"])


def test_everything_listens_on_this_machine_only(cluster: Deployed, ray_head: ClusterState) -> None:
    assert ray_head.head is not None
    listening = [
        (process.name(), connection.laddr.ip)
        for process in processes.belonging_to(ray_head.head, ray_head.mark)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any(name.startswith("ray::ServeReplica") for name, _ in listening)
    assert [one for one in listening if one[1].removeprefix("::ffff:") != "127.0.0.1"] == []


def test_handle_calls_choose_as_http_does(cluster: Deployed) -> None:
    prompts = [f"topic {number}: " + "words of it " * 150 for number in range(6)]
    for prompt in prompts:
        before = chunks(cluster)
        cluster.http.post("/v1/chat/completions", json=chat(prompt))
        wait_for("its chunks in the index", lambda before=before: chunks(cluster) > before)
        cluster.wait_idle()
    handle = cluster.handle()
    answers = []
    for prompt in prompts:
        asked = handle.call.remote("/v1/chat/completions", chat(prompt))
        answers.append(asked.result(timeout_s=60))
        cluster.wait_idle()
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in answers)

    log = decision_log.load(io.BytesIO(cluster.decisions()))
    by_http, by_handle = log[-12:-6], log[-6:]
    assert [d.choice.replica for d in by_handle] == [d.choice.replica for d in by_http]
    assert [d.digest for d in by_handle] == [d.digest for d in by_http]
    replayed = decision_log.replay(log, policy_from(PolicyConfig()))
    assert replayed == [decision.choice for decision in log]


def test_streams_of_handle_calls_are_the_servers_bytes(cluster: Deployed) -> None:
    stream = (
        cluster.handle().options(stream=True).stream.remote("/v1/chat/completions", chat("hi", stream=True))
    )
    data = b"".join(stream)
    assert data.endswith(b"data: [DONE]\n\n")


def test_a_handle_call_frees_its_place(cluster: Deployed) -> None:
    cluster.handle().call.remote("/v1/chat/completions", chat("free me")).result(timeout_s=60)
    wait_for("no reservation left", lambda: cluster.http.get("/admin/replicas").json()["open_requests"] == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_a_second(cluster: Deployed, stream: bool) -> None:
    body = chat("a long answer", max_tokens=5000, stream=stream)
    leave = threading.Event()

    def client() -> None:
        """Connects by hand: an HTTP client library would not let go in the middle of an answer that is not streamed."""
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", cluster.config.http.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
            connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
            assert leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(client)
        try:
            wait_for("a busy engine", lambda: sum(r["running"] for r in cluster.replicas()) == 1)
        finally:
            leave.set()
        gone.result()
    # The engine stops within a second; its report may come a tenth of a second later.
    wait_for("idle", lambda: not any(r["running"] + r["waiting"] for r in cluster.replicas()), 1.5)


def test_errors_come_through_haproxy_in_openais_shape(cluster: Deployed) -> None:
    unknown = cluster.http.post("/v1/chat/completions", json=chat("x", model="other"))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    malformed = cluster.http.post(
        "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert malformed.status_code == 400
    assert malformed.json()["error"]["message"]
    empty = cluster.http.post("/v1/chat/completions", json=chat("x", messages=[]))
    assert empty.status_code == 400
    large = cluster.http.post(
        "/v1/completions", json={"model": "sim", "prompt": "x" * 560_000, "max_tokens": 1}
    )
    assert large.status_code == 400
    assert "131072" in large.json()["error"]["message"]
    assert "140000" in large.json()["error"]["message"]


def test_a_body_of_a_mebibyte_routes(deploy_sim: Callable[..., Deployed], cluster: Deployed) -> None:
    body = {"model": "sim", "prompt": "y" * 400_000, "max_tokens": 1, "user": "z" * 700_000}
    answer = cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 100_000


def test_simultaneous_distinct_prompts_spread_evenly(deploy_sim: Callable[..., Deployed]) -> None:
    # Slow ones: none is computed before all of them have come.
    cluster = deploy_sim(engine={"sim": {"prefill_tokens_per_s": 5000, "virtual_replicas": 4}})
    cluster.ready_replicas(8)

    def ask(number: int) -> str:
        body = {"model": "sim", "prompt": f"{number:04}" + "word" * 3999, "max_tokens": 4}
        return httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=120).headers[
            "x-manta-replica"
        ]

    with ThreadPoolExecutor(64) as pool:
        answered = list(pool.map(ask, range(64)))
    counts = [answered.count(replica["id"]) for replica in cluster.replicas()]
    assert len(counts) == 8
    assert all(7 <= count <= 9 for count in counts), counts


def test_killed_replicas_leave_their_requests_to_others(deploy_sim: Callable[..., Deployed]) -> None:
    # Each prompt takes two seconds to prefill, so that the kill finds none with a token.
    cluster = deploy_sim(engine={"sim": {"prefill_tokens_per_s": 1000, "virtual_replicas": 1}})
    cluster.ready_replicas(2)
    victim, pid = next(iter(cluster.pids("unified").items()))
    started = threading.Barrier(5)

    def ask(number: int) -> httpx.Response:
        body = {"model": "sim", "prompt": [number * 10_000 + i for i in range(2000)], "max_tokens": 2}
        started.wait()
        return httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, number) for number in range(4)]
        started.wait()
        wait_for(
            "requests at the victim",
            lambda: at(cluster, victim)["waiting"] + at(cluster, victim)["running"] > 0,
        )
        os.kill(pid, signal.SIGKILL)
        results = [answer.result() for answer in answers]
    assert [result.status_code for result in results] == [200] * 4
    assert not any(victim in result.headers["x-manta-replica"] for result in results)
    cluster.ready_replicas(2)
    assert victim not in cluster.pids("unified")


def at(cluster: Deployed, replica: str) -> dict[str, Any]:
    return next(r for r in cluster.replicas() if replica in r["id"])


def test_a_replica_killed_mid_stream_cuts_the_answer_short(deploy_sim: Callable[..., Deployed]) -> None:
    cluster = deploy_sim(**SLOW_DECODE)
    cluster.ready_replicas(2)
    body = chat("tell me all", max_tokens=400, stream=True)
    received = b""
    with httpx.stream("POST", f"{cluster.endpoint}/v1/chat/completions", json=body, timeout=60) as answer:
        replica = answer.headers["x-manta-replica"].removeprefix("unified-")
        pieces = answer.iter_bytes()
        received += next(pieces)
        os.kill(cluster.pids("unified")[replica], signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            for piece in pieces:
                received += piece
    assert b"[DONE]" not in received
    # The next request is answered by whoever is left.
    assert cluster.http.post("/v1/chat/completions", json=chat("and now?")).status_code == 200


def test_an_unhealthy_replica_is_replaced(deploy_sim: Callable[..., Deployed]) -> None:
    cluster = deploy_sim()
    sick = cluster.ready_replicas(2)[0]
    assert cluster.ask_replica(sick, "POST", "/sim/fault", json={"fault": "unhealthy"}).status_code == 200
    wait_for("the sick replica gone", lambda: sick["id"] not in [r["id"] for r in cluster.replicas()], 90)
    cluster.ready_replicas(2)


def test_a_stopping_replica_finishes_what_it_has(deploy_sim: Callable[..., Deployed]) -> None:
    cluster = deploy_sim(**SLOW_DECODE)
    cluster.ready_replicas(2)
    began = threading.Event()

    def long_answer() -> bytes:
        body = chat("tell me all", max_tokens=200, stream=True)
        with httpx.stream("POST", f"{cluster.endpoint}/v1/chat/completions", json=body, timeout=60) as answer:
            parts = []
            for part in answer.iter_bytes():
                parts.append(part)
                began.set()
            return b"".join(parts)

    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(long_answer)
        assert began.wait(30)
        before = set(cluster.pids("unified"))
        cluster.redeploy(engine={"sim": {"decode_tokens_per_s": 21}})
        data = stream.result(timeout=60)
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b'"content"') >= 200
    wait_for("new replicas", lambda: not before & set(cluster.pids("unified")), 60)


def test_live_settings_restart_nothing(deploy_sim: Callable[..., Deployed]) -> None:
    cluster = deploy_sim()
    cluster.ready_replicas(2)
    before = cluster.pids("unified"), cluster.pids("router")
    body = {"model": "sim", "prompt": "x" * 4000, "max_tokens": 1}
    assert cluster.http.post("/v1/completions", json=body).status_code == 200
    cluster.redeploy(router={"limits": {"max_body_bytes": 2048}, "tenants": {"a": {"api_keys": ["key-a"]}}})

    def limited() -> bool:
        answer = cluster.http.post("/v1/completions", json=body, headers={"authorization": "Bearer key-a"})
        return answer.status_code == 413

    wait_for("the new limit", limited)
    assert cluster.http.post("/v1/completions", json=body).status_code == 401
    assert (cluster.pids("unified"), cluster.pids("router")) == before


def test_a_restarted_router_knows_what_the_old_one_knew(deploy_sim: Callable[..., Deployed]) -> None:
    cluster = deploy_sim()
    cluster.ready_replicas(2)
    prompt = "remember this " * 200
    first = cluster.http.post("/v1/chat/completions", json=chat(prompt))
    wait_for("its chunks in the index", lambda: chunks(cluster) > 0)
    cluster.wait_idle()
    known = {r["id"]: r["chunks"] for r in cluster.replicas()}
    old = cluster.pids("router")
    os.kill(next(iter(old.values())), signal.SIGKILL)
    wait_for("another router", lambda: cluster.pids("router") and cluster.pids("router") != old, 60)

    def exact() -> bool:
        try:
            return {r["id"]: r["chunks"] for r in cluster.replicas()} == known
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    wait_for("an exact index", exact, 60)
    cluster.wait_idle()
    again = cluster.http.post("/v1/chat/completions", json=chat(prompt))
    assert again.headers["x-manta-replica"] == first.headers["x-manta-replica"]
    assert not again.headers["x-manta-cached"].startswith("hbm=0,")


def test_forwarded_streams_alone_scale_a_pool_up_and_down(deploy_sim: Callable[..., Deployed]) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 3, "target_requests": 2,
        "upscale_delay_s": 0.5, "downscale_delay_s": 2, "look_back_s": 2,
    }  # fmt: skip
    pool = {"role": "unified", "replicas": 1, "drain_timeout_s": 30, "autoscaling": scaling}
    cluster = deploy_sim(pools=[pool], **SLOW_DECODE)
    cluster.ready_replicas(1)
    stop = threading.Event()

    def stream(number: int) -> bool:
        body = chat(f"stream {number}", max_tokens=2000, stream=True)
        with httpx.stream("POST", f"{cluster.endpoint}/v1/chat/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_bytes():
                if stop.is_set():
                    return answer.status_code == 200
        return False

    with ThreadPoolExecutor(6) as threads:
        streams = [threads.submit(stream, number) for number in range(6)]
        try:
            cluster.ready_replicas(3)
        finally:
            stop.set()
        assert all(each.result(timeout=60) for each in streams)
    cluster.ready_replicas(1)


def test_a_pool_at_zero_starts_for_a_request_that_waits(deploy_sim: Callable[..., Deployed]) -> None:
    scaling = {
        "min_replicas": 0,
        "max_replicas": 1,
        "target_requests": 2,
        "downscale_delay_s": 1,
        "look_back_s": 2,
    }
    pool = {"role": "unified", "replicas": 0, "drain_timeout_s": 5, "autoscaling": scaling}
    cluster = deploy_sim(pools=[pool])
    wait_for("an empty pool", lambda: cluster.replicas() == [], 60)
    answer = cluster.http.post("/v1/chat/completions", json=chat("wake up"))
    assert answer.status_code == 200
