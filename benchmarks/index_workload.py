"""What the prefix indexes are measured on. Plain Python, since peers run it in environments of their own.

1,000 sequences of 4k tokens, each on one of 16 replicas, are the background. The prompt of 16k tokens is there too,
up to another depth on every replica, so that a lookup walks all of it and loses a holder every now and then.
"""

from __future__ import annotations

import random
from typing import NamedTuple

REPLICAS = 16
SEQUENCES = 1000
SEQUENCE_TOKENS = 4096
PROMPT_TOKENS = 16384
VOCABULARY = 50_000
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
MEMORY_CHUNKS = 65_536
"""Distinct chunks, each on every replica, whose memory is measured."""


class Workload(NamedTuple):
    background: list[list[int]]
    """Sequence number modulo REPLICAS is its replica."""
    prompt: list[int]

    def held(self, replica: int) -> list[int]:
        """The prompt's tokens that a replica has."""
        return self.prompt[: PROMPT_TOKENS * (replica + 1) // REPLICAS]


def workload(sequences: int = SEQUENCES, seed: int = 1) -> Workload:
    draw = random.Random(seed)
    background = [draw.choices(range(VOCABULARY), k=SEQUENCE_TOKENS) for _ in range(sequences)]
    return Workload(background, draw.choices(range(VOCABULARY), k=PROMPT_TOKENS))
