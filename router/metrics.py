"""A router's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cache_store.events import Tier

PREFIX = "manta_router_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0)


class RouterMetrics:
    """What one router counts. Several of them in one process do not meet."""

    def __init__(self, known_paths: Collection[str] = ()) -> None:
        """`known_paths`: paths with a label of their own; clients must not be able to make up series."""
        self._known_paths = frozenset(known_paths)
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered.", "path", "status")
        self._decisions = self._counter("decisions", "Choices of a replica.", "outcome")
        self._matched = self._counter(
            "matched_tokens", "Prompt tokens that the chosen replica was expected to have."
        )
        self._prompt = self._counter("decided_tokens", "Prompt tokens of all decisions.")
        self._cached = self._counter("cached_tokens", "Prompt tokens that replicas reported as not computed.")
        self._computed = self._counter("computed_tokens", "Prompt tokens that replicas reported as computed.")
        self._retries = self._counter(
            "retries", "Requests sent to a further replica before their first token."
        )
        self._upstream_errors = self._counter("upstream_errors", "Failures of replicas.", "kind")
        self._unrendered = self._counter(
            "unrendered", "Requests whose prompt this router can't tokenise.", "form"
        )
        self._ttft = self._histogram("ttft_seconds", "From the request's arrival to its first token.")
        self._total = self._histogram(
            "request_seconds", "From the request's arrival to the end of its answer."
        )
        self._error = Histogram(
            PREFIX + "ttft_error_ratio",
            "Difference of predicted and measured seconds to the first token, as a part of the measured.",
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._predicted_s = self._counter(
            "predicted_ttft_seconds", "Predicted, from the decision to the first token."
        )
        self._measured_s = self._counter(
            "served_ttft_seconds", "Measured, from the decision to the first token."
        )
        self._prefills = self._counter(
            "prefills",
            "Requests where there is a prefill pool: `disaggregated`, `local`, `fallback` where it was asked in vain.",
            "outcome",
            "reason",
        )
        self._shipped = self._counter("shipped_tokens", "Prompt tokens whose KV came from the prefill pool.")
        self._prefill_predicted_s = self._counter(
            "prefill_predicted_seconds", "Predicted, of prompts that the prefill pool has computed."
        )
        self._prefill_measured_s = self._counter("prefill_measured_seconds", "Measured, of the same.")
        self._queue = Gauge(
            PREFIX + "queue_length", "Requests that wait for a replica.", registry=self.registry
        )
        self._unheard = Gauge(
            PREFIX + "unheard_at_start",
            "Replicas that had not told what they hold when this router began to decide.",
            registry=self.registry,
        )
        self._index = Gauge(
            PREFIX + "index_chunks", "Distinct chunks in the index.", ["tier"], registry=self.registry
        )

    def answered(self, path: str, status: int, total_s: float) -> None:
        """A request is over; a client that left early counts with the status that it was sent, or 499."""
        self._requests.labels(path if path in self._known_paths else OTHER, str(status)).inc()
        self._total.observe(total_s)

    def decided(self, prompt_tokens: int, matched_tokens: int) -> None:
        self._decisions.labels("placed").inc()
        self._prompt.inc(prompt_tokens)
        self._matched.inc(matched_tokens)

    def not_decided(self, outcome: str) -> None:
        """`outcome`: why there was no replica, such as `queue_full`, `queue_timeout`, `no_replica`."""
        self._decisions.labels(outcome).inc()

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def predicted(self, predicted_s: float, measured_s: float) -> None:
        """From the decision to the first token."""
        self._predicted_s.inc(max(0.0, predicted_s))
        self._measured_s.inc(max(0.0, measured_s))
        if measured_s > 0:
            self._error.observe(abs(predicted_s - measured_s) / measured_s)

    def prompt_served(self, cached_tokens: int, computed_tokens: int) -> None:
        """What the replica said of a prompt."""
        self._cached.inc(cached_tokens)
        self._computed.inc(computed_tokens)

    def stayed_local(self, reason: str) -> None:
        """Whoever answers computes the prompt, and this was planned; `reason` is `router.disaggregation.Verdict`'s."""
        self._prefills.labels("local", reason).inc()

    def in_halves(self, reason: str, tokens: int) -> None:
        """Planned for that reason, and so many tokens have come."""
        self._prefills.labels("disaggregated", reason).inc()
        self._shipped.inc(tokens)

    def fell_back(self, reason: str) -> None:
        """Whoever answers computes the prompt, since the prefill pool did not: `router.first_half.NotKept.reason`."""
        self._prefills.labels("fallback", reason).inc()

    def prefilled(self, predicted_s: float, measured_s: float) -> None:
        """The prefill pool has computed a prompt."""
        self._prefill_predicted_s.inc(max(0.0, predicted_s))
        self._prefill_measured_s.inc(max(0.0, measured_s))

    def retried(self) -> None:
        self._retries.inc()

    def upstream_failed(self, kind: str) -> None:
        """`kind`: `connect`, `reset`, `timeout` and the like; the router's word, never a client's."""
        self._upstream_errors.labels(kind).inc()

    def not_rendered(self, form: str) -> None:
        """`form`: what about the request could not be tokenised here, a word of the router's."""
        self._unrendered.labels(form).inc()

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Ask `length` at every scrape."""
        self._queue.set_function(length)

    def watch_start(self, unheard: Callable[[], int]) -> None:
        """Ask `unheard` at every scrape."""
        self._unheard.set_function(unheard)

    def watch_index(self, tier: Tier, chunks: Callable[[], int]) -> None:
        """Ask `chunks` at every scrape."""
        self._index.labels(tier).set_function(chunks)

    def render(self) -> bytes:
        """Prometheus text format; serve it as `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=_SECONDS, registry=self.registry)
