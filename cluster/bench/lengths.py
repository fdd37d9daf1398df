"""How exact the lengths of text prompts are: the endpoint's own tokenizer decides, where it can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cluster.bench.conversation import Planned
from cluster.bench.prompts import WORDS

if TYPE_CHECKING:
    from cluster.bench.client import Client

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

    first, total = await count(WORDS[:1]), await count(WORDS)
    if first is None or total is None:
        return Lengths(WORDS, exact=False)
    if total == first + len(WORDS) - 1:
        return Lengths(WORDS, exact=True, template_tokens=first - 1)
    counted = await asyncio.gather(*(count((WORDS[0], word)) for word in WORDS))
    words = tuple(word for word, tokens in zip(WORDS, counted, strict=True) if tokens == first + 1)
    if len(words) < _FEWEST_WORDS:
        return Lengths(WORDS, exact=False)
    first, total = await count(words[:1]), await count(words)
    if first is None or total != first + len(words) - 1:
        return Lengths(words, exact=False)
    return Lengths(words, exact=True, template_tokens=first - 1)
