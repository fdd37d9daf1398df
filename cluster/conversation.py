"""The demo's chats: each about a long text of its own, so that what a replica knows of it is worth something."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PEOPLE = ("Ada", "Ben", "Eva", "Hugo", "Ida", "Leo", "Mia", "Otto", "Rosa", "Tom")
GOODS = ("apples", "bricks", "candles", "chairs", "clocks", "lamps", "letters", "ropes", "shirts", "tiles")
WEATHER = ("dry", "cold", "mild", "rainy", "sunny", "warm", "windy")
QUESTIONS = (
    "Who came on day {day}?",
    "What was brought on day {day}?",
    "How was the weather on day {day}?",
    "How long did the work take on day {day}?",
)


@dataclass(frozen=True)
class Conversation:
    """What one client will say."""

    name: str
    text: str
    """The system message: instructions and the text that all questions are about."""
    questions: tuple[str, ...]

    @property
    def turns(self) -> int:
        return len(self.questions)


def conversations(names: Iterable[str], turns: int, days: int, seed: int) -> list[Conversation]:
    """One per name. Equal arguments give equal texts; other names or seeds give others, of nearly the same length.

    A text's first words already differ from those of the others, so no two share a chunk. A day is about 22 tokens.
    """
    return [_conversation(name, turns, days, random.Random(f"{seed} {name}")) for name in names]


def in_turns(chats: Iterable[Conversation]) -> Iterator[tuple[int, Conversation]]:
    """(turn, conversation) as clients that take turns ask: all first questions, then all second ones."""
    there = list(chats)
    for turn in range(max((chat.turns for chat in there), default=0)):
        yield from ((turn, chat) for chat in there if turn < chat.turns)


def _conversation(name: str, turns: int, days: int, random: random.Random) -> Conversation:
    lines = [f"The log of the {name}. Answer questions about it in one short sentence."]
    for day in range(1, days + 1):
        who, what, weather = random.choice(PEOPLE), random.choice(GOODS), random.choice(WEATHER)
        count, hours = random.randint(11, 99), random.randint(2, 9)
        lines.append(
            f"Day {day}: {who} brought {count} {what}, it was {weather}, the work took {hours} hours."
        )
    asked = random.sample(range(1, days + 1), turns)
    questions = (QUESTIONS[turn % len(QUESTIONS)].format(day=day) for turn, day in enumerate(asked))
    return Conversation(name, "\n".join(lines), tuple(questions))
