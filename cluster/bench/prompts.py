"""From spans to a prompt's text or token ids.

A span is a number of tokens from the start of a named stream. Equal names give equal tokens, so what two prompts
share is exactly what their spans say, and a prompt of 100,000 tokens is a few small values until it is sent.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

# With a space before it each is one token of every usual BPE vocabulary, and four bytes, which is one token of
# the simulated engine.
_WORD_LIST = """
the and for are but not you all can had her was one our out day get has him his how man new now old see two way who
boy did its let put say she too use any may try ask end few got run own set far act add age ago air arm art bad bag
bar bed big bit box bus buy car cat cup cut dog dry ear eat egg eye fan fat fit fly fun gas gun hat hit hot ice job
key kid law lay led leg lie lot low map mix net nor off oil pay per pop red row sea sit six sky son sun tax tea ten
tie tip top toy war wet win yes yet
"""
WORDS = tuple(_WORD_LIST.split())
_CACHED_TOKENS = 4_000_000

T = TypeVar("T")


class Span(NamedTuple):
    """The first `tokens` tokens of the stream `stream`."""

    stream: str
    tokens: int


class PromptWriter:
    """Writes spans down. Equal seeds, vocabularies and spans give equal prompts, in any process."""

    def __init__(self, seed: int, words: Sequence[str] = WORDS, vocabulary: int = 32_000) -> None:
        """`vocabulary`: ids are drawn from [vocabulary // 4, vocabulary), clear of special tokens and bytes."""
        self._seed = seed
        self._pieces = [" " + word for word in words]
        self._ids = range(vocabulary // 4, vocabulary)
        self._texts: _Recent[str] = _Recent()
        self._id_lists: _Recent[int] = _Recent()

    def text(self, spans: Sequence[Span]) -> str:
        """One word, with a space before it, per token."""
        return "".join("".join(self._stream(self._texts, self._pieces, span)) for span in spans)

    def ids(self, spans: Sequence[Span]) -> list[int]:
        return [token for span in spans for token in self._stream(self._id_lists, self._ids, span)]

    def _stream(self, recent: _Recent[T], population: Sequence[T], span: Span) -> list[T]:
        known = recent.get(span.stream)
        if known is None or len(known) < span.tokens:
            # A shorter draw is the start of a longer one: `choices` takes one number per item, in order.
            source = random.Random(f"{self._seed}/{span.stream}")
            known = source.choices(population, k=span.tokens)
            recent.put(span.stream, known)
        return known if len(known) == span.tokens else known[: span.tokens]


class _Recent(Generic[T]):
    """Streams used lately, bounded in tokens."""

    def __init__(self) -> None:
        self._streams: OrderedDict[str, list[T]] = OrderedDict()
        self._tokens = 0

    def get(self, stream: str) -> list[T] | None:
        known = self._streams.get(stream)
        if known is not None:
            self._streams.move_to_end(stream)
        return known

    def put(self, stream: str, tokens: list[T]) -> None:
        self._tokens += len(tokens) - len(self._streams.get(stream, ()))
        self._streams[stream] = tokens
        self._streams.move_to_end(stream)
        while self._tokens > _CACHED_TOKENS and len(self._streams) > 1:
            self._tokens -= len(self._streams.popitem(last=False)[1])
