"""The router's own pages."""

from __future__ import annotations

import io

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import decision_log
from tests.integration.in_process import Cluster, chat, running, until


async def test_a_router_is_alive_before_and_ready_once_a_replica_is() -> None:
    async with running(1) as cluster:
        (node,) = cluster.nodes
        assert (await cluster.http.get("/readyz")).json() == {"status": "ready", "replicas": 1}
        cluster.core.set_pool("unified", [])
        for path in ("/readyz", "/health"):
            unready = await cluster.http.get(path)
            assert unready.status_code == 503
            assert unready.headers["retry-after"] == "1"
            assert unready.json()["error"]["type"] == "ServiceUnavailableError"
        assert (await cluster.http.get("/healthz")).status_code == 200
        cluster.core.set_pool("unified", [node.info])
        await until(lambda: cluster.router.knows([node]))
        assert (await cluster.http.get("/readyz")).status_code == 200


async def metrics(cluster: Cluster) -> dict[tuple[str, ...], float]:
    text = (await cluster.http.get("/metrics")).text
    return {
        (sample.name.removeprefix("manta_router_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_can_be_parsed_and_say_what_happened(cluster: Cluster) -> None:
    streamed = await cluster.http.post("/v1/chat/completions", json=chat("a" * 800, stream=True))
    await until(lambda: cluster.router.knows(cluster.nodes))
    whole = await cluster.http.post("/v1/chat/completions", json=chat("a" * 800))
    await cluster.http.post("/v1/chat/completions", content=b"{")
    await cluster.http.get("/made-up-by-a-client")
    assert streamed.status_code == whole.status_code == 200
    found = await metrics(cluster)
    assert found["requests_total", "/v1/chat/completions", "200"] == 2
    assert found["requests_total", "/v1/chat/completions", "400"] == 1
    assert found["requests_total", "other", "404"] == 1
    assert found["decisions_total", "placed"] == 2
    usage = whole.json()["usage"]
    assert found["cached_tokens_total",] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["cached_tokens_total",] + found["computed_tokens_total",] == 2 * usage["prompt_tokens"]
    assert found["matched_tokens_total",] == 192
    assert found["index_chunks", "hbm"] == 3
    assert found["queue_length",] == 0
    # A whole answer's head comes at its end: it says nothing about the first token.
    assert found["ttft_seconds_count",] == 1


async def test_the_admin_key_opens_admin_pages_and_nothing_else_does() -> None:
    async with running(1, router={"admin_key": "env:ADMIN"}, env={"ADMIN": "open sesame"}) as cluster:
        for path in ("/admin/replicas", "/admin/decisions"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open sesame"}):
                refused = await cluster.http.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["type"] == "AuthenticationError"
        headers = {"authorization": "Bearer open sesame"}
        known = await cluster.http.get("/admin/replicas", headers=headers)
        assert known.json() == {"replicas": ["replica-0"]}
        assert (await cluster.http.get("/healthz")).status_code == 200


async def test_admin_is_open_where_no_key_is_configured(cluster: Cluster) -> None:
    assert (await cluster.http.get("/admin/replicas")).status_code == 200


async def test_the_decision_log_can_be_read_from_outside(cluster: Cluster) -> None:
    await cluster.http.post("/v1/chat/completions", json=chat("what was decided"))
    dump = await cluster.http.get("/admin/decisions")
    assert decision_log.load(io.BytesIO(dump.content)) == list(cluster.core.log)


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_a_client_may_name_its_request_if_the_name_is_short_and_printable(
    cluster: Cluster, given: str, kept: bool
) -> None:
    await cluster.http.post("/v1/chat/completions", json=chat("named"), headers={"x-request-id": given})
    (decision,) = cluster.core.log
    assert (decision.request.request_id == given) == kept
    assert 0 < len(decision.request.request_id) <= 128
