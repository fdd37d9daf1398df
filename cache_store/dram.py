"""The chunks that a node has in memory, and what counts against the budget for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from cache_store.chunk import Header
from cache_store.entries import MAX_WORLD_SIZE
from cache_store.events import ChunkKey
from cache_store.eviction import Eviction
from cache_store.leases import Leases
from cache_store.object_space import Held, ObjectSpace
from cache_store.quota import Quotas
from cache_store.stream import Publisher

Refusal = Literal["no_room", "quota"]


class Part:
    """One rank's payload in memory. Read `held.view` between `Dram.borrow` and `Dram.give_back` only."""

    __slots__ = ("chunk", "header", "held", "origin", "readers")

    def __init__(self, chunk: DramChunk, header: Header, held: Held, origin: int) -> None:
        self.chunk: DramChunk | None = chunk
        """None when it has left and only its readers keep it."""
        self.header = header
        self.held = held
        self.origin = origin
        """Tier code of where it came from, until it was loaded once."""
        self.readers = 0


class DramChunk:
    """The parts of a chunk, by rank."""

    __slots__ = ("identity", "key", "missing", "nbytes", "parts", "tenant", "used")

    def __init__(self, header: Header, tenant: str, used: float) -> None:
        self.key = ChunkKey(header.key)
        self.identity = header.identity
        self.parts: list[Part | None] = [None] * header.world_size
        self.missing = header.world_size
        """Ranks whose part is not there."""
        self.nbytes = 0
        self.tenant = tenant
        self.used = used

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def cost_s(self) -> float:
        return max((part.header.cost_s for part in self.parts if part is not None), default=0.0)


class Dram:
    """Belongs to the store's loop. Payloads are put and copied elsewhere; here is only who has what.

    In use are the bytes of all parts, of parts that left while somebody reads them, of reservations, and what the
    object space still keeps for borrowers. They never exceed the budget by anything reserved here.
    """

    def __init__(
        self,
        *,
        budget: int,
        space: ObjectSpace,
        eviction: Callable[[], Eviction],
        quotas: Quotas,
        leases: Leases,
        publisher: Publisher,
        clock: Callable[[], float],
        on_evicted: Callable[[int], None],
    ) -> None:
        """`eviction` makes an empty one; `on_evicted` is told how many chunks had to make room."""
        self.budget = budget
        self.chunks: dict[ChunkKey, DramChunk] = {}
        self.bytes = 0
        """Of the parts."""
        self.count = 0
        """Complete chunks."""
        self._space = space
        self._eviction = eviction()
        self._new_eviction = eviction
        self._by_tenant: dict[str, Eviction] = {}
        """The same chunks once more, of tenants that have a quota."""
        self._quotas = quotas
        self._leases = leases
        self._publisher = publisher
        self._clock = clock
        self._on_evicted = on_evicted
        self._reserved = 0
        self._leaving: set[Part] = set()
        self._leaving_bytes = 0

    @property
    def leaving(self) -> int:
        return self._leaving_bytes + self._space.lingering()

    @property
    def in_use(self) -> int:
        return self.bytes + self._reserved + self.leaving

    def part(self, key: ChunkKey, rank: int) -> Part | None:
        chunk = self.chunks.get(key)
        return chunk.parts[rank] if chunk is not None and 0 <= rank < len(chunk.parts) else None

    def complete(self, key: ChunkKey, world_size: int) -> DramChunk | None:
        """The chunk when all its parts are there, and are `world_size`."""
        chunk = self.chunks.get(key)
        return None if chunk is None or chunk.missing or len(chunk.parts) != world_size else chunk

    def sizes_if_complete(self, keys: Iterable[ChunkKey], world_size: int) -> list[int]:
        """Bytes of each such chunk, 0 for the others."""
        get = self.chunks.get
        return [
            chunk.nbytes
            if (chunk := get(key)) is not None and not chunk.missing and len(chunk.parts) == world_size
            else 0
            for key in keys
        ]

    def fits(self, header: Header) -> bool:
        """Whether the part can be one of the chunk: it is not there yet, and those that are there are like it."""
        if not 0 <= header.rank < header.world_size <= MAX_WORLD_SIZE:
            return False
        chunk = self.chunks.get(ChunkKey(header.key))
        return chunk is None or (
            len(chunk.parts) == header.world_size
            and chunk.identity == header.identity
            and chunk.parts[header.rank] is None
        )

    def touch(self, chunk: DramChunk) -> None:
        chunk.used = self._clock()
        self._eviction.touch(chunk.key)
        mine = self._by_tenant.get(chunk.tenant)
        if mine is not None:
            mine.touch(chunk.key)

    # Room

    def reserve(self, key: ChunkKey, nbytes: int, tenant: str) -> Refusal | None:
        """Make room for a part of `key`, evicting what is worth least; None when there is room and it is taken.

        Follow it with `place` or `cancel`, with the same bytes and tenant.
        """
        if not self._quotas.room(tenant, nbytes) and not self._evict_own(key, nbytes, tenant):
            return "quota"
        if not self._make_room(key, nbytes):
            return "no_room"
        self._quotas.charge(tenant, nbytes)
        self._reserved += nbytes
        return None

    def cancel(self, nbytes: int, tenant: str) -> None:
        self._reserved -= nbytes
        self._quotas.credit(tenant, nbytes)

    def reserve_copy(self, key: ChunkKey, nbytes: int) -> bool:
        """Room for bytes that will be gone soon and are no tenant's: a copy pulled from a peer."""
        if not self._make_room(key, nbytes):
            return False
        self._reserved += nbytes
        return True

    def cancel_copy(self, nbytes: int) -> None:
        self._reserved -= nbytes

    def _make_room(self, key: ChunkKey, nbytes: int) -> bool:
        over = self.in_use + nbytes - self.budget
        if over <= 0:
            return True
        if nbytes > self.budget:
            return False
        victims = self._eviction.victims(over, lambda other: other == key or self.must_stay(other))
        self._evict(victims)
        return self.in_use + nbytes <= self.budget

    def _evict_own(self, key: ChunkKey, nbytes: int, tenant: str) -> bool:
        mine, limit = self._by_tenant.get(tenant), self._quotas.limit(tenant)
        if mine is None or limit is None or nbytes > limit:
            return False
        over = self._quotas.used(tenant) + nbytes - limit
        self._evict(mine.victims(over, lambda other: other == key or self.must_stay(other)))
        return self._quotas.room(tenant, nbytes)

    def must_stay(self, key: ChunkKey) -> bool:
        """Whether a chunk that is there is leased, pinned or being read."""
        return self._leases.held(key) or any(
            part is not None and part.readers for part in self.chunks[key].parts
        )

    def _evict(self, victims: list[ChunkKey]) -> None:
        self.drop(victims)
        self._on_evicted(len(victims))

    # Coming and going

    def place(self, header: Header, held: Held, origin: int) -> Part:
        """Take in a part that `fits`, and for which `reserve` made room: for its bytes, and as its tenant's."""
        key, nbytes, tenant = ChunkKey(header.key), header.nbytes, header.tenant
        chunk = self.chunks.get(key)
        if chunk is None:
            chunk = self.chunks[key] = DramChunk(header, tenant, self._clock())
        assert chunk.parts[header.rank] is None
        assert held.nbytes == nbytes
        part = chunk.parts[header.rank] = Part(chunk, header, held, origin)
        chunk.missing -= 1
        chunk.nbytes += nbytes
        self._reserved -= nbytes
        self.bytes += nbytes
        if chunk.tenant != tenant:
            self._quotas.credit(tenant, nbytes)
            self._quotas.charge(chunk.tenant, nbytes)
        for eviction in self._evictions_of(chunk):
            eviction.add(key, chunk.nbytes, chunk.cost_s)
        if chunk.complete:
            self.count += 1
            self._publisher.apply("dram", added=[key])
        return part

    def drop(self, keys: Iterable[ChunkKey]) -> list[DramChunk]:
        """Chunks leave at once; bytes that somebody reads stay in use until given back."""
        gone = [self.chunks.pop(key) for key in keys]
        for chunk in gone:
            for eviction in self._evictions_of(chunk):
                eviction.remove(chunk.key)
            self._quotas.credit(chunk.tenant, chunk.nbytes)
            self.bytes -= chunk.nbytes
            self.count -= chunk.complete
            for part in chunk.parts:
                if part is not None:
                    self._let_go(part)
        self._publisher.apply("dram", removed=[chunk.key for chunk in gone if chunk.complete])
        return gone

    def _let_go(self, part: Part) -> None:
        part.chunk = None
        if part.readers:
            self._leaving.add(part)
            self._leaving_bytes += part.held.nbytes
        else:
            part.held.free()

    def borrow(self, part: Part) -> None:
        part.readers += 1

    def give_back(self, part: Part) -> None:
        part.readers -= 1
        if part in self._leaving and not part.readers:
            self._leaving.remove(part)
            self._leaving_bytes -= part.held.nbytes
            part.held.free()

    def _evictions_of(self, chunk: DramChunk) -> Iterator[Eviction]:
        yield self._eviction
        if self._quotas.limit(chunk.tenant) is not None:
            yield self._by_tenant.setdefault(chunk.tenant, self._new_eviction())

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        self._eviction.check_integrity()
        self._quotas.check_integrity()
        complete, by_tenant = set(), dict[str, int]()
        for key, chunk in self.chunks.items():
            parts = [part for part in chunk.parts if part is not None]
            assert parts
            assert chunk.key == key
            assert key in self._eviction
            assert chunk.missing == len(chunk.parts) - len(parts)
            assert chunk.nbytes == sum(part.held.nbytes for part in parts)
            assert all(part.chunk is chunk and part.readers >= 0 for part in parts)
            assert all(part.header.nbytes == part.held.nbytes == part.held.view.nbytes for part in parts)
            by_tenant[chunk.tenant] = by_tenant.get(chunk.tenant, 0) + chunk.nbytes
            if chunk.complete:
                complete.add(key)
        assert len(self._eviction) == len(self.chunks)
        assert self.bytes == sum(by_tenant.values())
        assert self._publisher.keys("dram") == complete
        assert self.count == len(complete)
        assert self._leaving_bytes == sum(part.held.nbytes for part in self._leaving)
        assert all(part.readers > 0 and part.chunk is None for part in self._leaving)
        assert self._reserved >= 0
        for tenant, used in by_tenant.items():
            assert self._quotas.used(tenant) >= used
        for tenant, eviction in self._by_tenant.items():
            eviction.check_integrity()
            assert len(eviction) == sum(chunk.tenant == tenant for chunk in self.chunks.values())

    def check_rest(self) -> None:
        """Raises AssertionError when anything is reserved or read: call it when nothing is under way."""
        assert not self._reserved
        assert not self._leaving
        for tenant in {chunk.tenant for chunk in self.chunks.values()}:
            used = sum(chunk.nbytes for chunk in self.chunks.values() if chunk.tenant == tenant)
            assert self._quotas.used(tenant) == used
        assert not any(part.readers for chunk in self.chunks.values() for part in chunk.parts if part)
