"""Reading a streamed answer: which events are tokens, what the text is, what was counted."""

from __future__ import annotations

from array import array

import msgspec

from cluster.bench.sse import DONE, EventParser

MAX_ANSWER_BYTES = 256 * 1024 * 1024


class AnswerError(Exception):
    """An answer that is not one. The message says what came."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


class StreamedAnswer:
    """Feed it the body as it comes, with the time; afterwards `finish` says whether it was whole."""

    def __init__(self, sent: float) -> None:
        """`sent`: when the request was sent, on the clock that `feed` is given."""
        self._sent = sent
        self._parser = EventParser()
        self._bytes = 0
        self._ended = False
        self._text: list[str] = []
        self._usage: _Usage | None = None
        self.token_s = array("d")

    def feed(self, data: bytes, now: float) -> int:
        """How many token chunks were in it. Raises AnswerError for what is no answer, or one without end."""
        self._bytes += len(data)
        if self._bytes > MAX_ANSWER_BYTES:
            raise AnswerError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        before = len(self.token_s)
        try:
            for payload in self._parser.feed(data):
                if payload == DONE:
                    self._ended = True
                else:
                    self._take(_decode(payload), now - self._sent)
        except (msgspec.MsgspecError, ValueError) as error:
            raise AnswerError(f"an event that is no chunk: {error}") from error
        return len(self.token_s) - before

    def _take(self, event: _Event, at_s: float) -> None:
        if event.usage is not None:
            self._usage = event.usage
        if event.choices:
            choice = event.choices[0]
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._text.append(text)
            if choice.finish_reason is not None:
                self._ended = True
            self.token_s.append(at_s)
        elif bytes(event.error) not in (b"", b"null"):
            raise AnswerError(
                f"the stream broke off with {bytes(event.error)[:500].decode('utf-8', 'replace')}"
            )

    def finish(self) -> None:
        """Raises AnswerError for an answer without a token or without its end."""
        if not self.token_s:
            raise AnswerError("the stream ended without a token")
        if not self._ended:
            raise AnswerError(
                f"the stream ended after {len(self.token_s)} chunks without a finish_reason or [DONE]"
            )

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def input_tokens(self) -> int | None:
        return None if self._usage is None else self._usage.prompt_tokens

    @property
    def output_tokens(self) -> int:
        counted = None if self._usage is None else self._usage.completion_tokens
        return counted or len(self.token_s)

    @property
    def cached_tokens(self) -> int | None:
        details = None if self._usage is None else self._usage.prompt_tokens_details
        return None if details is None else details.cached_tokens
