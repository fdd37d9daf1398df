"""The history of one session, as the endpoint takes it."""

from __future__ import annotations

from typing import NamedTuple

from cluster.bench.config import Target
from cluster.bench.prompts import PromptWriter, Span
from cluster.bench.workloads import Session


class Planned(NamedTuple):
    """A request, ready to be sent."""

    prompt: str | list[int] | list[dict[str, str]]
    """Text or token ids for completions, messages for a chat."""
    input_tokens: int
    output_tokens: int


class Conversation:
    """Call order: `ask`, then `answered` or `failed`, for every turn in order."""

    def __init__(self, session: Session, writer: PromptWriter, target: Target) -> None:
        self._session = session
        self._writer = writer
        self._chat = target.endpoint == "chat"
        self._with_ids = target.prompt_form == "ids"
        self._turn = -1
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []
        self._tokens = 0
        if session.system is not None:
            self._add("system", (session.system,))

    def ask(self) -> Planned:
        """The next turn with all that was said before it."""
        self._turn += 1
        self._before = len(self._messages), len(self._text), len(self._ids), self._tokens
        turn = self._session.turns[self._turn]
        self._add("user", turn.spans)
        if self._chat:
            return Planned(list(self._messages), self._tokens, turn.output_tokens)
        prompt = list(self._ids) if self._with_ids else self._text
        return Planned(prompt, self._tokens, turn.output_tokens)

    def answered(self, text: str, tokens: int) -> None:
        """The answer becomes part of the history. A history of token ids gets as many others in its place, since
        endpoints answer in text."""
        if self._with_ids:
            self._add("assistant", (Span(f"answer/{self._session.name}/{self._turn}", tokens),))
            return
        self._tokens += tokens
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._text += text

    def failed(self) -> None:
        """The turn is taken back: chat templates want an answer between two questions."""
        messages, text, ids, self._tokens = self._before
        del self._messages[messages:], self._ids[ids:]
        self._text = self._text[:text]

    def _add(self, role: str, spans: tuple[Span, ...]) -> None:
        self._tokens += sum(span.tokens for span in spans)
        if self._with_ids:
            self._ids += self._writer.ids(spans)
        elif self._chat:
            self._messages.append({"role": role, "content": self._writer.text(spans)})
        else:
            self._text += self._writer.text(spans)
