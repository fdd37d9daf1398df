"""A cache actor's numbers for Prometheus, read from the store at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache_store.store_socket import SocketStats
from cache_store.store_stats import StoreCounters, StoreStats

_LABELLED = {
    # field of StoreCounters -> (metric, label, help)
    "found": ("manta_cache_lookup_keys", "tier", "Chunks looked up, by the tier they were found in."),
    "saves": ("manta_cache_saves", "outcome", "Chunk parts that engines gave to keep."),
    "drops": ("manta_cache_dropped_saves", "reason", "Saves that were dropped."),
    "loads": ("manta_cache_loads", "outcome", "Chunk parts that engines asked for."),
    "loaded_bytes": ("manta_cache_loaded_bytes", "tier", "Bytes handed to engines, by origin."),
    "moved": ("manta_cache_moved", "tier", "Chunk parts brought to memory, by origin."),
    "moves_failed": ("manta_cache_failed_moves", "reason", "Moves to memory that failed."),
    "corrupt": ("manta_cache_corrupt", "tier", "Chunk parts that were not what their header says."),
    "writes": ("manta_cache_writes", "tier", "Chunk parts written."),
    "writes_dropped": ("manta_cache_dropped_writes", "tier", "Chunk parts admitted and not written."),
    "evicted": ("manta_cache_evicted", "tier", "Chunks that left to make room."),
}
_PLAIN = {
    "lookups": ("manta_cache_lookups", "Look-ups of engines."),
    "saved_bytes": ("manta_cache_saved_bytes", "Bytes kept."),
    "peer_failures": ("manta_cache_peer_failures", "Requests to other nodes that failed or came late."),
    "prefetched": ("manta_cache_prefetched", "Chunks that routers had brought to memory or kept there."),
    "prefetches_refused": (
        "manta_cache_refused_prefetches",
        "Chunks over what memory keeps for requests that have not come.",
    ),
    "lent": ("manta_cache_lent", "Chunk parts lent to other nodes."),
    "expired": ("manta_cache_expired", "Chunks dropped because nobody used them."),
}


_CONNECTIONS = {
    "accepted": "Connections of engines.",
    "foreign": "Connections of other users, refused.",
    "crowded": "Connections over the limit, refused.",
    "protocol_errors": "Connections that ended because of what the engine sent.",
    "store_errors": "Requests in which the store failed.",
    "slots_held": "Connections that ended because a slot was still in use after its answer.",
}


class StoreCollector(Collector):
    """Of a store and of the socket at which engines reach it."""

    def __init__(self, store: Callable[[], StoreStats], socket: Callable[[], SocketStats]) -> None:
        self._store = store
        self._socket = socket

    def describe(self) -> Iterable[Metric]:
        """Nothing: the store need not have started when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        stats, socket = self._store(), self._socket()
        yield from _counters(stats.counters)
        yield from _gauges(stats)
        for field, help in _CONNECTIONS.items():
            name = f"manta_cache_connections_{field}"
            yield CounterMetricFamily(name, help, getattr(socket.counters, field))
        yield GaugeMetricFamily("manta_cache_connections", "Engines connected.", socket.connections)
        yield GaugeMetricFamily("manta_cache_staging_bytes", "Shared with engines.", socket.staging_bytes)


def registry(store: Callable[[], StoreStats], socket: Callable[[], SocketStats]) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(StoreCollector(store, socket))
    return made


def _counters(counters: StoreCounters) -> Iterable[Metric]:
    for field, (name, label, help) in _LABELLED.items():
        family = CounterMetricFamily(name, help, labels=[label])
        for value, count in getattr(counters, field).items():
            if value != "absent" or field == "found":
                family.add_metric([value], count)
        yield family
    for field, (name, help) in _PLAIN.items():
        yield CounterMetricFamily(name, help, getattr(counters, field))


def _gauges(stats: StoreStats) -> Iterable[Metric]:
    chunks = GaugeMetricFamily("manta_cache_chunks", "Complete chunks.", labels=["tier"])
    used = GaugeMetricFamily("manta_cache_bytes", "Bytes of chunks.", labels=["tier"])
    capacity = GaugeMetricFamily("manta_cache_capacity_bytes", "0 for no limit.", labels=["tier"])
    healthy = GaugeMetricFamily("manta_cache_tier_healthy", "1 while the tier works.", labels=["tier"])
    for tier, each in stats.tiers.items():
        chunks.add_metric([tier], each.chunks)
        used.add_metric([tier], each.bytes)
        capacity.add_metric([tier], each.capacity)
        healthy.add_metric([tier], each.healthy)
    yield from (chunks, used, capacity, healthy)
    tenants = GaugeMetricFamily("manta_cache_tenant_bytes", "Bytes in memory by tenant.", labels=["tenant"])
    for tenant, size in stats.tenants.items():
        tenants.add_metric([tenant], size)
    yield tenants
    for name, value, help in (
        (
            "manta_cache_memory_in_use_bytes",
            stats.dram_in_use,
            "Bytes that count against the memory's budget.",
        ),
        ("manta_cache_saving_bytes", stats.saving, "Bytes of saves in flight."),
        ("manta_cache_leases", stats.leases, "Look-ups whose chunks may not leave."),
        ("manta_cache_pinned", stats.pinned, "Pinned chunks."),
        ("manta_cache_flights", stats.flights, "Chunk parts on their way to memory."),
    ):
        yield GaugeMetricFamily(name, help, value)
