"""From a generation's outputs to the bytes of an answer."""

from __future__ import annotations

from typing import Any

from workers.sim import answers
from workers.sim.answers import Answer, Choice, Usage
from workers.sim.connection import Connection
from workers.sim.generation import EngineStoppedError, Generation
from workers.sim.requests import GenerationRequest
from workers.sim.sequence import Output
from workers.sim.tokens import TOKEN_BYTES, decode


class _Reply:
    """What streams and whole answers have in common. Call order: run, or start alone."""

    def __init__(
        self, connection: Connection, request: GenerationRequest, answer: Answer, generation: Generation
    ) -> None:
        self._connection = connection
        self._request = request
        self._answer = answer
        self._generation = generation
        self._tokens = [0] * len(generation.streams)

    def _prompt(self, number: int) -> list[int]:
        return self._request.prompts[number // len(self._request.choices)].tokens.tolist()

    def _usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        first_choices = self._generation.streams[:: len(self._request.choices)]
        return Usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self._request.prompts),
            completion_tokens=sum(self._tokens),
            cached_tokens=sum(stream.cached_tokens for stream in first_choices),
        )


class StreamReply(_Reply):
    """Server-sent events. The head goes out before prefill, as vLLM's does."""

    async def start(self) -> None:
        await self._connection.start(200, b"text/event-stream; charset=utf-8")

    async def run(self, die_after: int | None = None) -> None:
        """Write the answer; with `die_after`, break the connection once so many tokens are sent."""
        await self.start()
        try:
            opened = False
            async for outputs in self._generation.outputs():
                if not opened:
                    await self._open()
                    opened = True
                for number, output in outputs:
                    if die_after is not None:
                        output = _first_tokens(output, die_after - sum(self._tokens))
                    await self._connection.send(answers.event(self._chunk(number, output)))
                    if die_after is not None and sum(self._tokens) >= die_after:
                        await self._connection.drop()
        except EngineStoppedError as error:
            await self._connection.send(answers.event(answers.error(500, "InternalServerError", str(error))))
        else:
            if self._request.include_usage:
                await self._connection.send(answers.event(self._answer.usage_chunk(self._usage())))
        await self._connection.send(answers.DONE)
        await self._connection.send(b"", more=False)

    async def _open(self) -> None:
        prompt = self._prompt(0) if self._request.return_token_ids else None
        for chunk in self._answer.opening(len(self._request.choices), prompt):
            await self._connection.send(answers.event(self._with_usage(0, chunk)))

    def _chunk(self, number: int, output: Output) -> dict[str, Any]:
        first = not self._tokens[number]
        self._tokens[number] += len(output.token_ids)
        with_ids = self._request.return_token_ids
        if first and self._request.echo:
            output = output._replace(text=decode(self._prompt(number)) + output.text)
        chunk = self._answer.chunk(
            number,
            output,
            output.token_ids if with_ids else None,
            self._prompt(number) if with_ids and first else None,
        )
        return self._with_usage(number, chunk)

    def _with_usage(self, number: int, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._request.continuous_usage:
            prompt_tokens = self._generation.streams[number].prompt_tokens
            chunk["usage"] = Usage(prompt_tokens, self._tokens[number]).as_dict(full=False)
        return chunk


def _first_tokens(output: Output, count: int) -> Output:
    if len(output.token_ids) < count:
        return output
    return Output(output.text[: count * TOKEN_BYTES], output.token_ids[:count])


class WholeReply(_Reply):
    """One JSON object, when all is done."""

    async def start(self) -> None:
        """Nothing goes out before the end."""

    async def run(self, die_after: int | None = None) -> None:
        """Write the answer; with `die_after`, break the connection once so many tokens are made."""
        count = len(self._tokens)
        texts, token_ids = [""] * count, [list[int]() for _ in range(count)]
        last: list[Output | None] = [None] * count
        async for outputs in self._generation.outputs():
            for number, output in outputs:
                texts[number] += output.text
                token_ids[number] += output.token_ids
                self._tokens[number] += len(output.token_ids)
                last[number] = output
            if die_after is not None and sum(self._tokens) >= die_after:
                await self._connection.drop()
        choices = [
            self._choice(number, texts[number], token_ids[number], output)
            for number, output in enumerate(last)
            if output is not None and output.finish_reason is not None
        ]
        if len(choices) == count:
            whole = self._answer.whole(choices, self._usage(), self._request.return_token_ids)
            await self._connection.json(whole)

    def _choice(self, number: int, text: str, token_ids: list[int], last: Output) -> Choice:
        prompt = self._prompt(number) if self._request.echo or self._request.return_token_ids else []
        echoed = decode(prompt) if self._request.echo else ""
        return Choice(echoed + text, token_ids, last.finish_reason, last.stop_reason, prompt)
