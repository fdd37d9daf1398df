"""What the stores are measured with. No import of Manta's, since peers run it in environments of their own."""

from __future__ import annotations

import random

CHUNK_BYTES = 4 * 1024 * 1024
CHUNKS = 16


def payload(number: int, nbytes: int = CHUNK_BYTES) -> bytes:
    """Bytes that nothing can compress."""
    return random.Random(number).randbytes(nbytes)
