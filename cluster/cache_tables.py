"""What `manta cache` shows to a person: tables that fold on a terminal and stay plain in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cache_store.store_stats import StoreCounters, TierStats
from cluster.cache_prompts import Summary
from router.cache_answers import Changed, ChunkPlaces, Listing, Lookup, NamedChunks, Problems, Stats

_KEY_SHOWN = 16
_NODE_SHOWN = 8
_FAILED_SHOWN = 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes with three digits or so."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def print_stats(stats: Stats, console: Console) -> None:
    table = _table(
        "node", "tier", numbers=("chunks", "bytes", "capacity", "full", "hits", "loaded", "evicted")
    )
    for node in stats.nodes:
        for name, tier in node.tiers.items():
            table.add_row(node.node[:_NODE_SHOWN], name, *_tier_cells(name, tier, node.counters))
    if len(stats.nodes) > 1:
        table.add_section()
        for name, tier in stats.totals.tiers.items():
            table.add_row("all", name, *_tier_cells(name, tier, stats.totals.counters))
    console.print(table)
    counters = stats.totals.counters
    for label, counts in (("saves", counters.saves), ("drops", counters.drops), ("loads", counters.loads)):
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        console.print(f"{label:<6} {told}", soft_wrap=True)
    if corrupt := sum(counters.corrupt.values()):
        console.print(f"{corrupt} corrupt parts were dropped", soft_wrap=True)
    if stats.hbm:
        held = ", ".join(f"{replica} {chunks}" for replica, chunks in sorted(stats.hbm.items()))
        console.print(f"chunks in the engines' own blocks (hbm): {held}", soft_wrap=True)


def _tier_cells(name: str, tier: TierStats, counters: StoreCounters) -> tuple[str, ...]:
    full = f"{tier.bytes / tier.capacity:.0%}" if tier.capacity else ""
    capacity = size(tier.capacity) if tier.capacity else "no limit"
    return (
        str(tier.chunks),
        size(tier.bytes),
        capacity if tier.healthy else f"{capacity} (off: it fails)",
        full,
        str(counters.found.get(name, 0)),
        size(counters.loaded_bytes.get(name, 0)),
        str(counters.evicted.get(name, 0)),
    )


def print_listing(listing: Listing, console: Console) -> None:
    table = _table("chunk", "node", "tiers", "tenant", numbers=("bytes", "idle"), more=("",))
    for chunk in listing.chunks:
        marks = " ".join(name for name, on in (("pinned", chunk.pinned), ("in use", chunk.leased)) if on)
        table.add_row(
            chunk.key[:_KEY_SHOWN], chunk.node[:_NODE_SHOWN], ",".join(chunk.tiers), chunk.tenant,
            size(chunk.nbytes), f"{chunk.idle_s:.0f} s", marks,
        )  # fmt: skip
    console.print(table)
    if listing.more:
        console.print("there are more; --limit shows them, --json gives whole keys", soft_wrap=True)


def print_lookup(lookup: Lookup, console: Console) -> None:
    several = len(lookup.engines) > 1
    for kind in lookup.engines:
        if several:
            console.print(f"engines {kind.identity[:_KEY_SHOWN]}: {', '.join(kind.replicas)}", soft_wrap=True)
        if kind.chunks:
            console.print(_places(kind))
        if lookup.prompt_tokens:
            console.print(_covered(lookup, kind), soft_wrap=True)


def _places(kind: NamedChunks) -> Table:
    table = _table("chunk", "hbm", "dram", "disk", "remote", numbers=("tokens",))
    for chunk in kind.chunks:
        table.add_row(chunk.key[:_KEY_SHOWN], *_holders(chunk), str(chunk.tokens) if chunk.tokens else "")
    return table


def _holders(chunk: ChunkPlaces) -> Iterator[str]:
    yield ", ".join(chunk.hbm) or "-"
    for nodes in (chunk.dram, chunk.disk, chunk.remote):
        yield ", ".join(node[:_NODE_SHOWN] for node in nodes) or "-"


def _covered(lookup: Lookup, kind: NamedChunks) -> str:
    said = f"{kind.covered_tokens} of {lookup.prompt_tokens} prompt tokens are held"
    if not kind.chunks:
        said += f": the prompt has no whole chunk of {kind.chunk_tokens} tokens"
    elif lookup.shareable_tokens < lookup.prompt_tokens:
        said += f"; only the first {lookup.shareable_tokens} can be shared"
    return said


def print_changed(changed: Changed, done: str, console: Console) -> None:
    """`done`: as in "pinned"."""
    asked = "" if changed.chunks is None else f" of {changed.chunks} chunks"
    for node, chunks in changed.nodes.items():
        console.print(f"{node[:_NODE_SHOWN]}: {chunks}{asked} {done}", soft_wrap=True)
    if changed.chunks == 0:
        console.print("the prompt has no whole chunk", soft_wrap=True)


def print_problems(problems: Problems, console: Console) -> None:
    for node, problem in problems.items():
        console.print(f"node {node[:_NODE_SHOWN]}: {problem}", soft_wrap=True, markup=False)


def print_summary(summary: Summary, console: Console) -> None:
    cached = _counts(summary.cached)
    total = sum(summary.cached.values())
    console.print(f"prompts  {summary.prompts} warmed, {len(summary.failed)} failed", soft_wrap=True)
    console.print(
        f"tokens   {summary.computed} computed, {total} already cached{f' ({cached})' if cached else ''}",
        soft_wrap=True,
    )
    console.print(f"chunks   {summary.stored} stored, {summary.chunks - summary.stored} not", soft_wrap=True)


def print_failed(summary: Summary, console: Console) -> None:
    failed = sorted(summary.failed)
    for each in failed[:_FAILED_SHOWN]:
        console.print(f"line {each.line}: {each.problem}", soft_wrap=True, markup=False)
    if len(failed) > _FAILED_SHOWN:
        console.print(f"and {len(failed) - _FAILED_SHOWN} more", soft_wrap=True)


@contextmanager
def progress(console: Console, prompts: int, summary: Summary) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing in a pipe. Call what it gives after each prompt."""
    bar = Progress(
        TextColumn("warming"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[computed]} tokens computed, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task("warming", total=prompts, computed=0, failed=0)
    with bar:
        yield lambda: bar.update(task, advance=1, computed=summary.computed, failed=len(summary.failed))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {tokens}" for tier, tokens in counts.items() if tokens)


def _table(*names: str, numbers: Iterable[str] = (), more: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    for name in more:
        table.add_column(name)
    return table
