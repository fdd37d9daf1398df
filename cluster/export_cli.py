"""`manta export`: a configuration as files for Ray's own commands."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cluster.config import ClusterConfig, ConfigError
from cluster.export import ExportError, serve_text
from cluster.k8s.export import Naming
from cluster.k8s.folders import export_folder
from cluster.k8s.kustomize import KustomizeError
from cluster.ray_up import Host, OnPremises, Provider, RayUp, Shipping, ray_up_text

app = typer.Typer(no_args_is_help=True, help=__doc__)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A Manta configuration, YAML.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT", help="Instead of the standard output.")
]
_LOCAL = "Provider local"


@app.command("serve")
def serve_command(file: ConfigFile, output: Output = None) -> None:
    """A file for `serve deploy`, with every deployment of the application."""
    try:
        _write(serve_text(ClusterConfig.load(file)), output)
    except (ConfigError, ExportError) as error:
        _fail(error)


@app.command("ray-up")
def ray_up_command(
    file: ConfigFile,
    provider: Annotated[Provider, typer.Option(help="Machines of your own, or whose cloud.")],
    output: Output = None,
    head: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The head.", rich_help_panel=_LOCAL)
    ] = OnPremises.head,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS=ROLE[,ROLE]",
            help="A worker: `router` or the role of a pool. Again for each.",
            rich_help_panel=_LOCAL,
        ),
    ] = None,
    ssh_user: Annotated[
        str, typer.Option(help="On all hosts.", rich_help_panel=_LOCAL)
    ] = OnPremises.ssh_user,
    ssh_key: Annotated[
        str, typer.Option(help="Private key, copied to the head.", rich_help_panel=_LOCAL)
    ] = OnPremises.ssh_key,
    external_head: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="The head as seen from here, where that differs.", rich_help_panel=_LOCAL
        ),
    ] = OnPremises.external_head,
    wheel: Annotated[str | None, typer.Option(help="Manta's wheel; in dist/ where not given.")] = None,
    venv: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="An environment that all hosts have; nothing is installed then."),
    ] = "",
) -> None:
    """A file for `ray up`: head, router hosts, and hosts for every pool."""
    try:
        workers = tuple(_host(given) for given in worker or ())
        plan = RayUp(
            ClusterConfig.load(file),
            Shipping(wheel or ("" if venv else _wheel()), venv=venv),
            OnPremises(head, workers, ssh_user, ssh_key, external_head),
        )
        _write(ray_up_text(plan, provider), output)
    except (ConfigError, ExportError) as error:
        _fail(error)


@app.command("k8s")
def k8s_command(
    file: ConfigFile,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the overlay goes.")],
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The overlay to build on; the nearest of k8s/overlays where not given."
        ),
    ] = None,
    image: Annotated[
        str, typer.Option(help="Name of your image, without a tag; the base's where not given.")
    ] = "",
    namespace: Annotated[str, typer.Option(help="Instead of the base's.")] = "",
) -> None:
    """A kustomize overlay for KubeRay, over the manifests in k8s/."""
    try:
        config = ClusterConfig.load(file)
        written = export_folder(config, output, base, Naming(image, namespace))
    except (ConfigError, ExportError, KustomizeError) as error:
        _fail(error)
    typer.echo(f"{output}: {', '.join(written)}")


def _host(given: str) -> Host:
    address, _, roles = given.partition("=")
    if not address or not roles:
        raise ExportError(f"--worker is {given!r}; needed: ADDRESS=ROLE, as in 10.0.0.11=router")
    return Host(address, tuple(roles.split(",")))


def _wheel() -> str:
    try:
        return f"dist/manta_serve-{version('manta-serve')}-py3-none-any.whl"
    except PackageNotFoundError:
        raise ExportError(
            "manta-serve is not installed here, so its version is unknown; give --wheel"
        ) from None


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{output}: can't be written ({error.strerror})") from error


def _fail(error: Exception) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(1)
