"""`manta simulate`: what a cluster would do with a trace, and how large it would have to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

INTERRUPTED = 130

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Requests as JSON lines in Mooncake's form."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="What is simulated, YAML; see docs/simulate.md."),
]


def simulate_command(
    trace: TraceFile = None,
    config: ConfigFile = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="KIND", help="Repeatable; the configuration's if not said."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="NAME=A,B,...",
            help="dram, disk, remote (sizes), replicas or blocks; every combination is simulated. Repeatable.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests of the trace.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots.")] = None,
) -> None:
    """Play a trace against a modelled cluster with the router's own policies, and print what came of it.

    Nothing is started: engines and tiers are models, and time is simulated. Equal input gives equal figures.
    """
    with _failures_explained():
        from rich.console import Console

        from cluster.simulation.study import ask
        from cluster.simulation.tables import progress

        study = ask(trace, config, policy or (), sweep or (), limit)
        with progress(Console(stderr=True), study.requests, study.runs) as show:
            answer = study.run(show)
        if json:
            sys.stdout.write(answer.to_json() + "\n")
        else:
            answer.print(Console())
        if html is not None:
            html.write_text(answer.to_html(), encoding="utf-8")
            typer.echo(f"written to {html}", err=True)


@contextmanager
def _failures_explained() -> Iterator[None]:
    # Here and not above: numpy takes a while, and other commands do without.
    from cluster import interrupts
    from cluster.simulation.study import Refused

    try:
        with interrupts.as_ctrl_c():
            yield
    except Refused as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
