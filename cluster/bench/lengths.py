"""How exact the lengths of text prompts are: the endpoint's own tokenizer decides, where it can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from cluster.bench.client import Client, Planned
from cluster.bench.prompts import WORDS

_FEWEST_WORDS = 16


class Lengths(msgspec.Struct, frozen=True):
    """Words to write prompts with, and what is known of them."""

    words: tuple[str, ...]
    exact: bool
    """Every word is one token, also in a row."""
    template_tokens: int | None = None
    """What the endpoint adds to a prompt: the chat template or a first token. None where it was not asked."""


async def measure_lengths(client: Client, chat: bool) -> Lengths:
    """Keeps the words that the endpoint takes for one token each; all of them where it has no /tokenize."""

    async def count(words: Sequence[str]) -> int | None:
        text = "".join(" " + word for word in words)
        prompt = [{"role": "user", "content": text}] if chat else text
        return await client.count_tokens(Planned(prompt, len(words), 0))

    first = await count(WORDS[:1])
    if first is None:
        return Lengths(WORDS, exact=False)
    words = WORDS
    if await count(words) != first + len(words) - 1:
        counted = await asyncio.gather(*(count((WORDS[0], word)) for word in WORDS))
        words = tuple(word for word, tokens in zip(WORDS, counted, strict=True) if tokens == first + 1)
    if len(words) < _FEWEST_WORDS:
        return Lengths(WORDS, exact=False, template_tokens=first - 1)
    exact = await count(words) == first + len(words) - 1
    return Lengths(words, exact, template_tokens=first - 1)
