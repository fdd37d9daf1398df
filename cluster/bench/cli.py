"""`manta bench`: measure a serving endpoint, and compare what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from cluster import state
from cluster.bench.config import (
    Arrival,
    BenchConfig,
    BenchConfigError,
    MultiTurn,
    RandomLengths,
    SharedPrefix,
    Target,
    TraceReplay,
    bench_config,
    parse_goodput,
)

INTERRUPTED = 130
_WORKLOAD_FIELDS = {
    name: None for kind in (MultiTurn, SharedPrefix, TraceReplay, RandomLengths) for name in kind.model_fields
}
_LOAD, _TARGET, _OUTPUT = "Load", "Endpoint", "Output"

app = typer.Typer(no_args_is_help=True, help=__doc__)

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Results of `manta bench serve --json`.")
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a page with plots.", rich_help_panel=_OUTPUT)
]


def _load(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_LOAD)


def _target(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_TARGET)


def _output(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_OUTPUT)


@app.command("serve")
def serve_command(
    workload: Annotated[str, typer.Argument(help="multi-turn, shared-prefix, trace or random.")] = "random",
    conversations: Annotated[int | None, _load("multi-turn: how many.")] = None,
    turns: Annotated[int | None, _load("multi-turn: requests per conversation.")] = None,
    system_tokens: Annotated[int | None, _load("multi-turn: system prompt that all share.")] = None,
    think_s: Annotated[
        float | None, _load("multi-turn: mean pause before a further turn, seconds.", "--think")
    ] = None,
    groups: Annotated[int | None, _load("shared-prefix: how many prefixes.")] = None,
    users: Annotated[int | None, _load("shared-prefix: users per prefix.")] = None,
    prefix_tokens: Annotated[int | None, _load("shared-prefix: length of a prefix.")] = None,
    suffix_tokens: Annotated[int | None, _load("shared-prefix: length of what a user adds.")] = None,
    input_tokens: Annotated[int | None, _load("multi-turn: tokens per turn; random: prompt.")] = None,
    output_tokens: Annotated[int | None, _load("All but trace: tokens of an answer.")] = None,
    range_ratio: Annotated[float | None, _load("random: lengths vary by this part, 0 to 1.")] = None,
    path: Annotated[Path | None, _load("trace: a JSONL file in Mooncake's form.", "--trace")] = None,
    limit: Annotated[int | None, _load("trace: only so many requests.")] = None,
    time_scale: Annotated[float | None, _load("trace: 2 replays at half the speed.")] = None,
    length_scale: Annotated[float | None, _load("trace: 0.1 makes all lengths a tenth.")] = None,
    max_input_tokens: Annotated[int | None, _load("trace: longer prompts are cut.")] = None,
    arrival: Annotated[
        str | None, _load("closed, poisson or trace; by the workload and --rate if not said.")
    ] = None,
    concurrency: Annotated[int | None, _load("closed: sessions at a time (16); else a bound.")] = None,
    rate: Annotated[float | None, _load("poisson: requests per second.")] = None,
    burstiness: Annotated[float | None, _load("poisson: 1; less comes in bursts, more is even.")] = None,
    num_requests: Annotated[int | None, _load("How many; the workload's size if not said.")] = None,
    duration_s: Annotated[float | None, _load("Send nothing after so many seconds.", "--duration")] = None,
    warmup: Annotated[int, _load("Requests before, unmeasured.")] = 0,
    seed: Annotated[int, _load("Same seed, same load.")] = 0,
    url: Annotated[str | None, _target("The cluster that runs here if not said.")] = None,
    model: Annotated[str, _target("The endpoint's first if not said.")] = "",
    endpoint: Annotated[str | None, _target("chat or completions (with token ids).")] = None,
    prompt_form: Annotated[str, _target("text or ids.")] = "text",
    vocabulary: Annotated[int | None, _target("ids: token ids are below this.")] = None,
    header: Annotated[list[str] | None, _target("NAME=VALUE; $OPENAI_API_KEY is sent anyway.")] = None,
    temperature: Annotated[float | None, _target("The endpoint's default if not said.")] = None,
    ignore_eos: Annotated[bool, _target("Ask for answers of exactly the given length.")] = True,
    extra_body: Annotated[str | None, _target("JSON object with further fields of every request.")] = None,
    timeout_s: Annotated[float | None, _target("Limit on one request, seconds.", "--timeout")] = None,
    retry_429: Annotated[bool, _target("Wait as Retry-After says and ask again.", "--retry-429")] = False,
    label: Annotated[str, _output("Name of this run.")] = "",
    goodput: Annotated[
        list[str] | None, _output("METRIC:MS for ttft, tpot, itl or e2el; repeatable.")
    ] = None,
    json: Annotated[Path | None, _output("Write the result.", "--json")] = None,
    save_requests: Annotated[bool, _output("With every request in the JSON.", "--save-requests")] = False,
    html: Html = None,
) -> None:
    """Send a load to an OpenAI endpoint and measure it as `vllm bench serve` does.

    Ctrl-C ends it and prints what was measured so far. Exit code 1 when no request succeeded.
    """
    given = locals()
    try:
        config = _config(given)
    except BenchConfigError as error:
        _fail(str(error))
    _measure(config, json, html, save_requests)


@app.command("compare")
def compare_command(files: Files, html: Html = None) -> None:
    """Results side by side; changes are against the first."""
    from rich.console import Console

    from cluster.bench.page import comparison_page
    from cluster.bench.result import ResultError, load_result
    from cluster.bench.tables import print_comparison

    try:
        results = [load_result(file) for file in files]
    except ResultError as error:
        _fail(str(error))
    print_comparison(results, Console(highlight=False))
    if html is not None:
        _write(html, comparison_page(results).encode())


def _measure(config: BenchConfig, json: Path | None, html: Path | None, save_requests: bool) -> None:
    from rich.console import Console

    from cluster.bench.client import EndpointError
    from cluster.bench.page import result_page
    from cluster.bench.result import save_result
    from cluster.bench.serve import serve
    from cluster.bench.tables import print_errors, print_result
    from cluster.bench.trace import TraceError

    try:
        result, errors = serve(config, Console(stderr=True), save_requests)
    except (EndpointError, TraceError) as error:
        _fail(str(error))
    print_result(result, Console(highlight=False))
    print_errors(errors, Console(stderr=True, highlight=False))
    try:
        if json is not None:
            save_result(result, json)
    except OSError as error:
        _fail(f"{json}: can't be written: {error.strerror or error}")
    if html is not None:
        _write(html, result_page(result).encode())
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.metrics.completed:
        raise typer.Exit(1)


def _config(options: dict[str, Any]) -> BenchConfig:
    """From the options of `serve`, whose names are those of the fields. Raises BenchConfigError."""
    ids = options["prompt_form"] == "ids"
    timed = "trace" if options["workload"] == "trace" else "closed"
    target = {
        "url": options["url"] or _endpoint_here(),
        "endpoint": options["endpoint"] or ("completions" if ids else "chat"),
        "headers": _headers(options["header"] or []),
        "extra_body": _json_object(options["extra_body"]),
    }
    arrival = options["arrival"] or (timed if options["rate"] is None else "poisson")
    return bench_config(
        _given(options, BenchConfig.model_fields)
        | {
            "workload": _given(options, _WORKLOAD_FIELDS) | {"kind": options["workload"]},
            "arrival": _given(options, Arrival.model_fields) | {"kind": arrival},
            "target": _given(options | target, Target.model_fields),
            "goodput": parse_goodput(options["goodput"] or []),
        }
    )


def _given(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _endpoint_here() -> str:
    try:
        cluster = state.only(None)
    except state.StateError as error:
        _fail(f"{error}; or say which endpoint with --url")
    return "http://127.0.0.1:8000" if cluster is None else cluster.endpoint


def _headers(given: list[str]) -> dict[str, str]:
    parts = [each.partition("=") for each in given]
    for each, (name, equals, _) in zip(given, parts, strict=True):
        if not name or not equals:
            raise BenchConfigError(f"header: found {each!r}; needed: NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in parts}


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BenchConfigError(f"extra-body: {error}; needed: a JSON object") from error


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        _fail(f"{path}: can't be written: {error.strerror or error}")
    typer.echo(f"wrote {path}")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
