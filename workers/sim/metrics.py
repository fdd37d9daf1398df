"""The simulated engine's numbers in Prometheus' text format, by vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.sim.engine import SimEngine


def render_metrics(engine: SimEngine) -> str:
    load, totals, scheduler = engine.load(), engine.counters, engine.scheduler
    queried = scheduler.cached_tokens + scheduler.computed_tokens
    rows: tuple[tuple[str, str, float], ...] = (
        ("gauge", "vllm:num_requests_running", load.running),
        ("gauge", "vllm:num_requests_waiting", load.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", load.kv_used),
        ("counter", "vllm:prompt_tokens_total", totals.prompt_tokens),
        ("counter", "vllm:generation_tokens_total", totals.generated_tokens),
        ("counter", "vllm:prefix_cache_queries_total", queried),
        ("counter", "vllm:prefix_cache_hits_total", scheduler.cached_tokens),
        ("counter", "vllm:num_preemptions_total", scheduler.preemptions),
        ("counter", "vllm:request_success_total", totals.finished),
        ("counter", "vllm:request_aborted_total", totals.aborted),
    )
    model = engine.info.models[0].replace("\\", "\\\\").replace('"', '\\"')
    lines = []
    for kind, name, value in rows:
        lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="{model}"}} {value}']
    return "\n".join(lines) + "\n"
