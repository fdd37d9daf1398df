"""`manta demo`: a real model, real chats, and what routing by prefix is worth, measured here and now."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from cluster.chat import ChatError, Message, ask
from cluster.config import ClusterConfig
from cluster.conversation import Conversation, conversations, in_turns
from cluster.demo_report import Measured, Run, closing_lines, short_names, table
from cluster.ray_cluster import logs_of
from cluster.state import ClusterState
from cluster.status import ask as ask_status
from cluster.up import Launcher, UpError

CONFIG = Path(__file__).parent / "configs" / "local-cpu.yaml"
SEED = 1
TURNS = 3
DAYS = 28
"""Lines of each chat's text: about 650 tokens, more than a second of prefill on one core."""
ANSWER_TOKENS = 16

# An odd number of chats, so that round robin over an even number of replicas moves each of them at every turn.
AFFINITY_CHATS = ("bakery", "harbour", "library", "orchard", "theatre")
ROUND_ROBIN_CHATS = ("airport", "brewery", "factory", "nursery", "station")


def run_demo(config: ClusterConfig, config_path: Path, keep: bool) -> int:
    """Start the cluster, measure both runs, print them, and stop the cluster unless it is to be kept.

    Returns the exit code. Raises UpError, RayStartError or KeyboardInterrupt, with nothing left running.
    """
    progress, output = Console(stderr=True, highlight=False), _output()
    launcher = Launcher(config, config_path)
    with launcher.running(progress, keep) as cluster:
        try:
            runs = Demo(config, cluster, launcher, progress, output).run()
        except ChatError as error:
            raise UpError(f"the demo broke off: {error}; Ray's logs are in {logs_of(cluster)}") from error
        output.print()
        for line in closing_lines(*runs):
            output.print(line)
        if keep:
            launcher.change(config)
            output.print(f"\n{kept(config)}", soft_wrap=True)
    return 0


class Demo:
    """Two runs of one workload on one cluster, whose engines are not restarted between them."""

    def __init__(
        self,
        config: ClusterConfig,
        cluster: ClusterState,
        launcher: Launcher,
        progress: Console,
        output: Console,
    ) -> None:
        self._config = config
        self._endpoint = cluster.endpoint
        self._launcher = launcher
        self._progress = progress
        self._output = output
        self._names = short_names(_ready_replicas(cluster, config))
        self._runs = (Run("prefix affinity"), Run("round robin"))
        self._shown = ""
        self._chats = tuple(
            conversations(names, TURNS, DAYS, SEED) for names in (AFFINITY_CHATS, ROUND_ROBIN_CHATS)
        )

    def run(self) -> tuple[Run, Run]:
        """Raises ChatError, UpError."""
        self._output.print(self._introduction())
        # Whatever an engine does once, at its first request, is no part of what routing costs or saves.
        for name in self._names:
            ask(self._endpoint, self._config.served_name, [_user(f"Hello, {name}!")], 4)
        with Live(console=self._output, refresh_per_second=8, transient=True) as live:
            for run, chats, kind in zip(
                self._runs, self._chats, ("prefix_affinity", "round_robin"), strict=True
            ):
                self._show(live, f"{run.policy}: telling the router")
                self._launcher.change(with_policy(self._config, kind))
                self._measure(live, run, chats)
        self._output.print(self._table())
        return self._runs

    def _measure(self, live: Live, run: Run, chats: Sequence[Conversation]) -> None:
        said: dict[str, list[Message]] = {chat.name: [_system(chat.text)] for chat in chats}
        for turn, chat in in_turns(chats):
            self._show(live, f"{run.policy}: turn {turn + 1} of {TURNS}")
            messages = said[chat.name]
            messages.append(_user(chat.questions[turn]))
            answer = ask(self._endpoint, self._config.served_name, messages, ANSWER_TOKENS)
            messages.append({"role": "assistant", "content": answer.text})
            run.requests.append(Measured.of(chat.name, turn + 1, answer))

    def _show(self, live: Live, message: str) -> None:
        if self._output.is_terminal:
            live.update(Group(self._table(), Spinner("dots", message)))
        elif message != self._shown:
            self._progress.print(message)
        self._shown = message

    def _table(self) -> Table:
        planned = [[(chat.name, turn + 1) for turn, chat in in_turns(chats)] for chats in self._chats]
        return table(self._runs, planned, self._names)

    def _introduction(self) -> str:
        replicas = ", ".join(f"{name} ({replica})" for replica, name in self._names.items())
        return (
            f"\n{self._config.served_name} on {len(self._names)} replicas: {replicas}.\n"
            f"{len(AFFINITY_CHATS)} chats take turns, each about a long text of its own; every request carries the "
            f"whole chat so far.\n"
            f"Left: the router sends a request where most of its prompt is cached. Right: {len(ROUND_ROBIN_CHATS)} "
            f"new chats of the same size, round robin.\n"
            f"Cached and computed are prompt tokens; TTFT is the time to the first token, seen by the client.\n"
        )


def with_policy(config: ClusterConfig, kind: str) -> ClusterConfig:
    """The same cluster with another routing policy, which may change while it runs."""
    policy = config.router.policy.model_copy(update={"kind": kind})
    return config.model_copy(update={"router": config.router.model_copy(update={"policy": policy})})


def kept(config: ClusterConfig) -> str:
    """How to go on with a cluster that stays."""
    body = {"model": config.served_name, "messages": [_user("What is the capital of France?")]}
    return (
        f"The cluster stays up, routing by {config.router.policy.kind}: {config.endpoint}\n\n"
        f"  curl {config.endpoint}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
        f"  manta status\n"
        f"  manta down"
    )


def _ready_replicas(cluster: ClusterState, config: ClusterConfig, timeout_s: float = 60.0) -> list[str]:
    """Ids, once the router sees as many as the pools have. Raises UpError when it does not in time."""
    wanted = sum(pool.replicas for pool in config.pools)
    deadline = time.monotonic() + timeout_s
    while True:
        status = ask_status(cluster)
        ready = sorted(each.id for each in status.answer.replicas if each.state == "ready")
        if len(ready) >= wanted:
            return ready
        if time.monotonic() > deadline:
            raise UpError(
                f"{len(ready)} of {wanted} replicas are ready after {timeout_s:.0f} s {status.problem}"
            )
        time.sleep(0.2)


def _output() -> Console:
    """A pipe has no width of its own; the table must not be cut there."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}
