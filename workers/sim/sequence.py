"""One sequence of the simulated engine: a prompt, the words that follow from it, and when they end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blake3 import blake3

from workers.sim.block_cache import Content, Lease
from workers.sim.tokens import encode

FinishReason = Literal["stop", "length", "abort"]

# Every word with its space is one token, so that an answer sent back as a message meets its own blocks.
_TEXT = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old "
    "see two way who boy did its let put say she too use sun sea sky air ice oak elm fox owl bee ant cat dog "
    "hen pig cow red tan big far low dry wet hot fig "
)
WORDS = tuple(_TEXT[start : start + 4] for start in range(0, len(_TEXT), 4))
_WORD_TOKENS = tuple(encode(word)[0] for word in WORDS)
_MEAN_ANSWER_TOKENS = 128


@dataclass(frozen=True)
class Sampling:
    """How one sequence is to be continued."""

    max_tokens: int
    keep: str = ""
    """Name under which the blocks stay after the end, for another engine to fetch; empty for none."""
    may_end: bool = False
    """Whether the text may end by itself, which it then does after 128 tokens in the mean."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    seed: int = 0
    choice: int = 0


class Output(NamedTuple):
    """What a sequence made since it was last asked."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Sequence:
    """Text is a function of the tokens so far, the adapter, the seed and the number of the choice, no more.

    So a prompt that already holds the first words of an answer is continued with the words that are missing.
    """

    def __init__(self, content: Content, sampling: Sampling, arrival: float) -> None:
        self.content = content
        self.sampling = sampling
        self.arrival = arrival
        self.prompt_tokens = len(content.tokens)
        self.generated = 0
        self.computed = 0
        """Leading tokens whose KV is in this sequence's blocks."""
        self.cached_tokens = 0
        """Prompt tokens that were found in the cache when the sequence was first admitted."""
        self.expected_tokens = self.prompt_tokens
        """Prompt tokens that will have to be computed, as guessed on arrival."""
        self.fetched_tokens = 0
        """Prompt tokens whose KV has come from another engine before the sequence was queued."""
        self.lease: Lease | None = None
        self.joined_at = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._text = _StopScanner(sampling.stop, sampling.include_stop)
        self._new_tokens: list[int] = []
        self._context = blake3(f"{content.adapter}\n{sampling.seed}\n{sampling.choice}\n".encode())
        self._context.update(content.tokens.tobytes())

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def sample(self) -> None:
        """Append the next token; sets `finish_reason` when it is the last."""
        digest = self._context.digest(length=2)
        word = digest[0] % len(WORDS)
        token = _WORD_TOKENS[word]
        self.content.tokens.append(token)
        self._context.update(array("I", (token,)).tobytes())
        self._new_tokens.append(token)
        self.generated += 1
        is_stop = token in self.sampling.stop_token_ids
        hidden = is_stop and not self.sampling.include_stop
        found = self._text.add("" if hidden else WORDS[word])
        ends = self.sampling.may_end and digest[1] % _MEAN_ANSWER_TOKENS == 0
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif is_stop:
            self.finish_reason, self.stop_reason = "stop", token
        elif ends:
            self.finish_reason = "stop"
        elif self.generated >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def take(self) -> Output:
        """What is new since the last call."""
        tokens, self._new_tokens = self._new_tokens, []
        return Output(self._text.take(self.finished), tokens, self.finish_reason, self.stop_reason)


@dataclass
class _StopScanner:
    """Holds text back for as long as it may be the start of a stop string."""

    stops: tuple[str, ...]
    include: bool
    _text: str = ""
    _ended: bool = False
    _keep: int = field(init=False)

    def __post_init__(self) -> None:
        self._keep = max((len(stop) - 1 for stop in self.stops), default=0)

    def add(self, text: str) -> str | None:
        """The stop string that `text` completes, cut off together with what follows it."""
        # What was there before holds no whole stop string, but what is not yet taken may be long.
        start = max(0, len(self._text) - self._keep)
        self._text += text
        found = [(at, stop) for stop in self.stops if (at := self._text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self.include else at]
        self._ended = True
        return stop

    def take(self, finished: bool) -> str:
        end = len(self._text) if finished or not self._keep else max(0, len(self._text) - self._keep)
        text, self._text = self._text[:end], self._text[end:]
        return text
