"""The sequences of one request, and the way of their outputs from the engine to who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from workers.request_record import RequestRecord
from workers.sim.sequence import Output
from workers.sim.sequence import Sequence as Stream


class EngineStoppedError(RuntimeError):
    """The engine stopped before the request was done."""


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            "of the input prompt."
        )
        self.tokens = tokens
        self.limit = limit


class Generation:
    """Sequences are numbered by prompt, then by choice. The engine delivers; one consumer reads."""

    def __init__(self, streams: Sequence[Stream], record: RequestRecord | None) -> None:
        self.streams = tuple(streams)
        self._numbers = {stream: number for number, stream in enumerate(self.streams)}
        self._record = record
        self._started: set[Stream] = set()
        self._left = len(self.streams)
        self._ready: list[tuple[int, Output]] = []
        self._error: Exception | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    async def outputs(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """What is new, with the sequence's number, until all sequences are done or the generation is closed.

        Raises EngineStoppedError when the engine stops before.
        """
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
            elif self._error is not None:
                raise self._error
            elif self._closed or not self._left:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def deliver(self, stream: Stream) -> int:
        """Called when a sequence has new output. Returns how many tokens that is."""
        if stream not in self._started:
            self._started.add(stream)
            if self._record is not None:
                tiers = {"hbm": stream.cached_tokens}
                if stream.fetched_tokens:
                    tiers["nixl"] = stream.fetched_tokens
                self._record.note_first_output(stream.prompt_tokens, sum(tiers.values()), tiers)
        output = stream.take()
        if output.finish_reason is not None:
            self._left -= 1
        self._ready.append((self._numbers[stream], output))
        self._wake()
        return len(output.token_ids)

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        self._ready.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
