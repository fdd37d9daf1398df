"""One vLLM engine in a process of its own, asked by lines of JSON. See `benchmarks.engines.Engine`.

    python -m benchmarks.engine_process MODEL CORE ARGUMENTS

ARGUMENTS are vLLM's, as JSON by long name.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY

from benchmarks.line_process import READY
from workers.cores import running_on

VOCABULARY = range(1000, 40_000)


def main() -> None:
    # vLLM writes to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(answers, sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))


async def serve(answers: Any, model: str, core: int, arguments: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from workers.vllm.arguments import parse_engine_args

    args = parse_engine_args(model, "bench", arguments)
    with running_on((core,)):
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        asked = Asked(llm)
        print(READY, file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            answer = await getattr(asked, question.pop("do"))(**question)
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        await asyncio.to_thread(llm.shutdown)


class Asked:
    """A method per question."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._names = itertools.count()
        self._conversations: dict[int, list[int]] = {}
        self._draw = random.Random(os.getpid())

    async def run(
        self, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request: seconds to the first token and to the end, tokens, and tokens that were not computed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        began, ttft_s, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
        name = f"bench-{next(self._names)}"
        async for output in self._llm.generate({"prompt_token_ids": list(prompt)}, sampling, name):
            if not tokens:
                ttft_s = time.perf_counter() - began
            tokens += output.outputs[0].token_ids
            cached = output.num_cached_tokens or cached
        return {"ttft_s": ttft_s, "seconds": time.perf_counter() - began, "tokens": tokens, "cached": cached}

    async def talk(
        self,
        conversations: Sequence[int],
        history: int,
        turn: int,
        max_tokens: int,
        concurrency: int,
        seconds: float,
    ) -> dict[str, Any]:
        """So many conversations at once take a turn, drawn among those that nobody waits for; none begins after
        `seconds`, and each takes one where that is 0.

        Each has `history` tokens before its first turn, and a turn adds `turn` tokens and the answer.
        """
        idle = list(conversations)
        began = time.perf_counter()
        turns: list[dict[str, Any]] = []

        async def take_turns() -> None:
            while idle and (not seconds or time.perf_counter() - began < seconds):
                number = idle.pop(self._draw.randrange(len(idle)))
                prompt = self._conversations.setdefault(number, self._tokens(history, random.Random(number)))
                prompt += self._tokens(turn, self._draw)
                done = await self.run(prompt, max_tokens)
                turns.append(done | {"prompt": len(prompt)})
                prompt += done["tokens"]
                if seconds:
                    idle.append(number)

        await asyncio.gather(*(take_turns() for _ in range(concurrency)))
        return {"turns": turns, "seconds": time.perf_counter() - began}

    async def forget(self) -> bool:
        """All KV that the engine has itself."""
        return bool(await self._llm.reset_prefix_cache())

    async def metrics(self, prefix: str) -> dict[str, float]:
        """Samples by `name{labels}`, without the engine's own labels."""
        await self._llm.do_log_stats()
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith(prefix):
                    labels = ",".join(
                        f"{name}={value}"
                        for name, value in sorted(sample.labels.items())
                        if name not in ("engine", "model_name")
                    )
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    def _tokens(self, count: int, draw: random.Random) -> list[int]:
        return draw.choices(VOCABULARY, k=count)


if __name__ == "__main__":
    main()
