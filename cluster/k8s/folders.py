"""Folders of manifests: those that ship, and those that `manta export k8s` writes."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.export import ExportError
from cluster.k8s.checks import Versions, check
from cluster.k8s.export import FILE, MARK, Naming, base_of, overlay
from cluster.k8s.kustomize import load_objects, ordered, render

EXAMPLE = "secrets.example.yaml"
CLONE = Path(__file__).resolve().parents[2]


def export_folder(
    config: ClusterConfig, output: Path, base: Path | None = None, naming: Naming | None = None
) -> list[str]:
    """Write the overlay, and tell the names of its files.

    Raises ExportError for what can't be exported or written, KustomizeError for a base that can't be rendered.
    """
    base = base or CLONE / "k8s" / "overlays" / base_of(config)
    if not (base / FILE).is_file():
        raise ExportError(
            f"{base} holds no {FILE}; needed: --base with an overlay of k8s/ in a clone of Manta"
        )
    _refuse_foreign(output)
    made = overlay(config, render(base), _path(base, output), versions_at(base), naming)
    if findings := check(made.objects, None, secrets_at(base)):
        raise ExportError("\n".join(map(str, findings)))
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{output}: can't be written ({error.strerror})") from error
    if ordered(render(output)) != ordered(made.objects):
        raise ExportError(f"{output}: renders to something else than was meant; this is a bug of Manta")
    return list(made.files)


def versions_at(folder: Path) -> Versions | None:
    """What the locks of the clone say that the folder is in; None outside of one."""
    for above in (folder.resolve(), *folder.resolve().parents):
        if (above / "requirements" / "gpu.lock").is_file():
            return Versions.of(above)
    return None


def secrets_at(folder: Path) -> list[str] | None:
    """Secrets that the clone's example tells operators to make; None outside of one."""
    for above in folder.resolve().parents:
        if (example := above / "base" / EXAMPLE).is_file():
            return [item["metadata"]["name"] for item in load_objects(example) if item["kind"] == "Secret"]
    return None


def _path(base: Path, output: Path) -> str:
    """kustomize takes no absolute paths."""
    return os.path.relpath(base.resolve(), output.resolve())


def _refuse_foreign(output: Path) -> None:
    there = output / FILE
    if there.is_file() and MARK not in there.read_text(encoding="utf-8"):
        raise ExportError(f"{there} is not of `manta export k8s`; needed: a folder for the overlay alone")
