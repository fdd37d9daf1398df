"""Program of a process that writes parts at the cap until it is killed: ROOT CAPACITY SEED.

A line on standard output for the start, and one for each part written.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque

from cache_store.disk import DiskTier
from cache_store.tier_health import NoRoom
from tests.chunk_parts import Part, make_part

THREADS = 4
SIZES = (200_000, 500_000, 900_000)


def main(root: str, capacity: int, seed: int) -> None:
    tier = DiskTier(root, capacity, lock_wait_s=30)
    known = deque(tier.scan())
    parts = [make_part(number, SIZES[number % len(SIZES)]) for number in range(24)]
    print("started", flush=True)

    def write(chance: random.Random) -> None:
        while True:
            part: Part = chance.choice(parts)
            try:
                tier.write(part.header, part.view)
            except NoRoom:
                victim = known.popleft() if known else None
                if victim is not None:
                    tier.delete(victim.key, victim.identity, victim.rank)
                continue
            known.append(part.header)
            print("wrote", flush=True)

    for number in range(THREADS):
        threading.Thread(target=write, args=(random.Random(seed * THREADS + number),)).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
