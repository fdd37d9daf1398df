"""Metrics: what a router did, countable from outside, and bounded in what clients can add to it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RouterMetrics


def samples(metrics: RouterMetrics) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value, read from the rendered text."""
    return {
        (sample.name.removeprefix("manta_router_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_what_happened_is_counted() -> None:
    metrics = RouterMetrics(["/v1/chat/completions"])
    metrics.decided(prompt_tokens=1000, matched_tokens=768)
    metrics.decided(prompt_tokens=500, matched_tokens=0)
    metrics.not_decided("queue_full")
    metrics.first_token(0.3)
    metrics.prompt_served(cached_tokens=700, computed_tokens=300)
    metrics.retried()
    metrics.upstream_failed("connect")
    metrics.not_rendered("image")
    metrics.answered("/v1/chat/completions", 200, total_s=1.2)
    found = samples(metrics)
    assert found["decisions_total", "placed"] == 2
    assert found["decisions_total", "queue_full"] == 1
    assert found["decided_tokens_total",] == 1500
    assert found["matched_tokens_total",] == 768
    assert found["cached_tokens_total",] == 700
    assert found["computed_tokens_total",] == 300
    assert found["retries_total",] == 1
    assert found["upstream_errors_total", "connect"] == 1
    assert found["unrendered_total", "image"] == 1
    assert found["requests_total", "/v1/chat/completions", "200"] == 1
    assert found["ttft_seconds_count",] == 1
    assert found["ttft_seconds_bucket", "0.25"] == 0
    assert found["ttft_seconds_bucket", "0.5"] == 1
    assert found["request_seconds_sum",] == 1.2


def test_predictions_stand_beside_what_was_measured() -> None:
    metrics = RouterMetrics()
    metrics.predicted(1.2, 1.0)
    metrics.predicted(0.5, 2.0)
    metrics.predicted(1.0, 0.0)
    found = samples(metrics)
    assert found["predicted_ttft_seconds_total",] == 2.7
    assert found["served_ttft_seconds_total",] == 3.0
    assert found["ttft_error_ratio_count",] == 2, "nothing is a part of nothing"
    assert found["ttft_error_ratio_bucket", "0.25"] == 1
    assert found["ttft_error_ratio_bucket", "0.8"] == 2


def test_sizes_are_asked_for_at_every_scrape() -> None:
    metrics, waiting, chunks = RouterMetrics(), [1, 2, 3], {"a", "b"}
    metrics.watch_queue(lambda: len(waiting))
    metrics.watch_index("hbm", lambda: len(chunks))
    assert samples(metrics)["queue_length",] == 3
    waiting.clear()
    chunks.add("c")
    assert samples(metrics)["queue_length",] == 0
    assert samples(metrics)["index_chunks", "hbm"] == 3


def test_clients_cannot_make_up_series() -> None:
    metrics = RouterMetrics(["/v1/models"])
    for number in range(100):
        metrics.answered(f"/made/up/{number}", 404, 0.001)
    found = {key: value for key, value in samples(metrics).items() if key[0] == "requests_total"}
    assert found == {("requests_total", "other", "404"): 100}


def test_every_name_has_the_prefix() -> None:
    families = list(text_string_to_metric_families(RouterMetrics().render().decode()))
    assert len(families) >= 10
    assert all(family.name.startswith("manta_router_") for family in families)


def test_two_routers_in_one_process_do_not_meet() -> None:
    one, other = RouterMetrics(), RouterMetrics()
    one.retried()
    assert samples(one)["retries_total",] == 1
    assert samples(other)["retries_total",] == 0
