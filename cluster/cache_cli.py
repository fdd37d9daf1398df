"""`manta cache`: what KV the cluster keeps, where a prompt's chunks are, and what is kept, dropped or made ahead."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console

from cluster import interrupts
from cluster.admin import AdminError
from cluster.cache_prompts import Failed, InputError, Line, Summary, name_chunks, read_prompts
from cluster.cache_tables import (
    print_changed,
    print_failed,
    print_listing,
    print_lookup,
    print_problems,
    print_stats,
    print_summary,
    progress,
)
from cluster.cache_target import Target, find_target
from cluster.config import ConfigError
from cluster.state import StateError
from router.cache_answers import Changed, Listing, Lookup, Stats

INTERRUPTED = 130
_STATS_PATH = "/admin/cache/stats"
_CLUSTER, _WHICH = "Cluster", "Which chunks"

A = TypeVar("A", Stats, Listing, Lookup, Changed)


class _Warming(NamedTuple):
    summary: Summary
    interrupted: bool


app = typer.Typer(no_args_is_help=True, help=__doc__)

Endpoint = Annotated[
    str | None,
    typer.Option(
        help="Of a cluster that was not started from here; its admin key is in MANTA_ADMIN_KEY.",
        rich_help_panel=_CLUSTER,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Its configuration: endpoint and admin key.", rich_help_panel=_CLUSTER),
]
Name = Annotated[
    str | None, typer.Option(help="Which one, where several run on this machine.", rich_help_panel=_CLUSTER)
]
Json = Annotated[bool, typer.Option("--json", help="Print what the cluster itself answers.")]
Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="A text, as the prompt of a completion.")
]
Chat = Annotated[bool, typer.Option("--chat", help="The text is a user's message.", rich_help_panel=_WHICH)]
Body = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON with prompt or messages as in a request, instead of PROMPT; `-` reads it.",
        rich_help_panel=_WHICH,
        allow_dash=True,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="A chunk by its whole key; repeatable.", rich_help_panel=_WHICH),
]
Model = Annotated[
    str | None, typer.Option(help="Or adapter; the cluster's own if not said.", rich_help_panel=_WHICH)
]
Tenant = Annotated[
    str | None, typer.Option(help="In whose name; needed where there are any.", rich_help_panel=_WHICH)
]


@app.command()
def stats(json: Json = False, endpoint: Endpoint = None, config: Config = None, name: Name = None) -> None:
    """Chunks, bytes and counters of every node's store. Exit code 1 where a node did not answer."""
    _show(_target(endpoint, config, name), _STATS_PATH, None, Stats, json, print_stats)


@app.command("ls")
def ls_command(
    limit: Annotated[int, typer.Option(help="So many chunks at most.", min=1)] = 50,
    node: Annotated[str | None, typer.Option(help="Of this node only; an id or its beginning.")] = None,
    json: Json = False,
    endpoint: Endpoint = None,
    config: Config = None,
    name: Name = None,
) -> None:
    """Some of the chunks that the nodes' stores hold, those used last first."""
    path = f"/admin/cache/ls?limit={limit}" + (f"&node={quote(node, safe='')}" if node is not None else "")
    _show(_target(endpoint, config, name), path, None, Listing, json, print_listing)


def _chunk_command(verb: str, help: str, act: Callable[[Target, dict[str, Any], bool], None]) -> None:
    """A command on the chunks that its options name: `act` gets the cluster, the body to ask with, and `--json`."""

    @app.command(verb, help=help)
    def command(
        prompt: Prompt = None,
        chat: Chat = False,
        body: Body = None,
        key: Keys = None,
        model: Model = None,
        tenant: Tenant = None,
        json: Json = False,
        endpoint: Endpoint = None,
        config: Config = None,
        name: Name = None,
    ) -> None:
        named = _given(prompt, chat, body, key, model, tenant)
        act(_target(endpoint, config, name), named, json)


_chunk_command(
    "lookup",
    "Where each chunk of a prompt is: which replicas have it in their blocks, which nodes in which tier.",
    lambda target, named, json: _show(target, "/admin/cache/lookup", named, Lookup, json, print_lookup),
)
_chunk_command(
    "pin",
    "Keep chunks where they are: no store evicts or expires them until `unpin`, or its own restart.",
    lambda target, named, json: _change(target, "pin", "pinned", named, json),
)
_chunk_command(
    "unpin",
    "Take `pin` back.",
    lambda target, named, json: _change(target, "unpin", "unpinned", named, json),
)


@app.command()
def evict(
    prompt: Prompt = None,
    chat: Chat = False,
    body: Body = None,
    key: Keys = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All chunks of all nodes.", rich_help_panel=_WHICH)
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    model: Model = None,
    tenant: Tenant = None,
    json: Json = False,
    endpoint: Endpoint = None,
    config: Config = None,
    name: Name = None,
) -> None:
    """Drop chunks from the stores' memory, disk and remote. Pinned ones and the engines' own blocks stay."""
    named = _given(prompt, chat, body, key, model, tenant, everything)
    target = _target(endpoint, config, name)
    if everything and not yes:
        typer.confirm(
            f"Drop all chunks that are not pinned from memory, disk and remote of {target.endpoint}?",
            abort=True,
            err=True,
        )
    _change(target, "evict", "evicted", named, json)


@app.command()
def warm(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON bodies of completions or chats, one a line; or a prompt a line. `-` reads it.",
            allow_dash=True,
        ),
    ],
    chat: Annotated[bool, typer.Option("--chat", help="A line of text is a user's message.")] = False,
    model: Annotated[str | None, typer.Option(help="For lines that name none.")] = None,
    tenant: Annotated[str | None, typer.Option(help="For lines that name none.")] = None,
    concurrency: Annotated[int, typer.Option(help="So many prompts at a time.", min=1, max=1024)] = 8,
    wait: Annotated[
        float, typer.Option(help="Longest wait for a prompt's chunks to be stored, seconds.", min=0, max=60)
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    endpoint: Endpoint = None,
    config: Config = None,
    name: Name = None,
) -> None:
    """Compute the KV of prompts and store it, before anybody asks for it.

    Exit code 1 when a line failed; Ctrl-C ends it, tells what was done so far, and is exit code 130.
    """
    with _failures_explained():
        prompts = read_prompts(file, chat)
    defaults = {"model": model, "tenant": tenant, "wait_s": wait}
    given = {field: value for field, value in defaults.items() if value is not None}
    lines = [line._replace(body=given | line.body) for line in prompts.lines]
    summary, interrupted = _warm(_target(endpoint, config, name), lines, prompts.failed, concurrency)
    print_failed(summary, Console(stderr=True, highlight=False))
    if json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        print_summary(summary, Console(highlight=False))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.failed:
        raise typer.Exit(1)


def _warm(target: Target, lines: Sequence[Line], failed: Sequence[Failed], concurrency: int) -> _Warming:
    from cluster.cache_warm import warm_all

    summary = Summary(failed=list(failed))
    try:
        with interrupts.as_ctrl_c(), _failures_explained():
            # A wrong key, or a cluster that keeps no KV, is one message and not one for every line.
            target.admin().ask(_STATS_PATH)
            with progress(Console(stderr=True), len(lines), summary) as advance:
                asyncio.run(warm_all(target, lines, summary, concurrency, advance))
    except KeyboardInterrupt:
        return _Warming(summary, True)
    return _Warming(summary, False)


def _show(
    target: Target,
    path: str,
    body: object,
    kind: type[A],
    json: bool,
    print_answer: Callable[[A, Console], None],
) -> None:
    """Ask, print, and exit with 1 where a node told nothing."""
    with _failures_explained():
        said = target.admin().ask(path, body)
    try:
        answer = msgspec.json.decode(said, type=kind)
    except msgspec.DecodeError as error:
        _fail(f"{target.endpoint}{path} is of another version: {error}")
    if json:
        sys.stdout.write(said.decode() + "\n")
    else:
        print_answer(answer, Console(highlight=False))
    print_problems(answer.problems, Console(stderr=True, highlight=False))
    if answer.problems:
        raise typer.Exit(1)


def _change(target: Target, verb: str, done: str, named: dict[str, Any], json: bool) -> None:
    _show(
        target,
        f"/admin/cache/{verb}",
        named,
        Changed,
        json,
        lambda answer, console: print_changed(answer, done, console),
    )


def _given(*named: Any) -> dict[str, Any]:
    with _failures_explained():
        return name_chunks(*named)


def _target(endpoint: str | None, config: Path | None, name: str | None) -> Target:
    with _failures_explained():
        return find_target(endpoint, config, name)


@contextmanager
def _failures_explained() -> Iterator[None]:
    try:
        yield
    except (AdminError, ConfigError, InputError, StateError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
