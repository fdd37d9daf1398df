"""Which words prompts are written with, by what an endpoint's tokenizer says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from cluster.bench.client import Client
from cluster.bench.conversation import Planned
from cluster.bench.lengths import Lengths, measure_lengths
from cluster.bench.prompts import WORDS
from cluster.bench.result import describe_lengths

TEMPLATE = 5


class Tokenizer:
    """Stands in for a client: counts a prompt word by word, and adds a chat template."""

    def __init__(self, tokens_of: Callable[[str], int] | None) -> None:
        self._tokens_of = tokens_of
        self.asked = 0

    async def count_tokens(self, planned: Planned) -> int | None:
        self.asked += 1
        if self._tokens_of is None:
            return None
        if isinstance(planned.prompt, str):
            return sum(map(self._tokens_of, planned.prompt.split()))
        (message,) = cast(list[dict[str, Any]], planned.prompt)
        return TEMPLATE + sum(map(self._tokens_of, message["content"].split()))


async def lengths(tokenizer: Tokenizer, chat: bool = False) -> Lengths:
    return await measure_lengths(cast(Client, tokenizer), chat)


@pytest.mark.parametrize(("chat", "template"), [(False, 0), (True, TEMPLATE)])
async def test_where_every_word_is_a_token_two_questions_suffice(chat: bool, template: int) -> None:
    tokenizer = Tokenizer(lambda word: 1)
    assert await lengths(tokenizer, chat) == Lengths(WORDS, exact=True, template_tokens=template)
    assert tokenizer.asked == 2


async def test_words_of_several_tokens_are_not_used() -> None:
    found = await lengths(Tokenizer(lambda word: 2 if word[0] in "tb" else 1), chat=True)
    words = tuple(word for word in WORDS if word[0] not in "tb")
    assert found == Lengths(words, exact=True, template_tokens=TEMPLATE)


async def test_without_a_word_of_one_token_lengths_are_approximate() -> None:
    assert not (await lengths(Tokenizer(len))).exact


async def test_without_tokenize_lengths_are_approximate() -> None:
    found = await lengths(Tokenizer(None))
    assert found == Lengths(WORDS, exact=False)
    assert describe_lengths(found, "text") == "approximate, one word for a token"
    assert describe_lengths(found, "ids") == "exact, in token ids"
