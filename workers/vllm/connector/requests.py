"""What the scheduler half knows of every request, and what follows from it. Plain state: no thread, clock or socket.

A request looks its chunks up, is told which of them are there, loads some into blocks that the engine gave it, and
offers others for saving as their tokens become certain:

    ask ──▶ looking ──▶ found ──▶ admitted ──▶ loading ──▶ load_done ──▶ computed ... ──▶ finished ──▶ closed

Any of these may be cut short: by a preemption, after which the request asks again, or by `finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache_store.events import ChunkKey
from cache_store.wire import DRAM, TIER_NAMES, Found
from workers.vllm.connector.known_chunks import KnownChunks
from workers.vllm.connector.metadata import LoadResult, LoadWork, Piece, RequestId, SaveWork
from workers.vllm.connector.request_state import (
    Admission,
    Facts,
    FoundChunks,
    Geometry,
    HashWanted,
    Loading,
    Looking,
    LookupWanted,
    RequestState,
)

_NEVER = float("inf")

Worth = Callable[[bytes, int, Sequence[float], int], int]
"""How many of the chunks in these tiers (none absent) are better loaded than computed, given the bytes of a chunk, the
seconds per byte by tier, and how many tokens of the first chunk need neither."""


class RequestTable:
    """Belongs to the scheduler's thread. `now` is any clock's seconds; effects are taken with `take_*`."""

    def __init__(
        self,
        geometry: Geometry,
        workers: int,
        worth: Worth,
        *,
        lookup_limit_s: float = 1.0,
        lease_s: float = 60.0,
    ) -> None:
        """Found chunks are believed for half of `lease_s`."""
        self.known = KnownChunks()
        self._geometry = geometry
        self._workers = workers
        self._worth = worth
        self._lookup_limit_s = lookup_limit_s
        self._believe_s = lease_s / 2
        self._requests: dict[RequestId, RequestState] = {}
        self._serial = 0
        self._saving: set[RequestId] = set()
        """Requests with pending saves."""
        self._held: set[RequestId] = set()
        """Finished, and the workers were not told yet that they should say when the blocks are free."""
        self._loads: list[LoadWork] = []
        self._cancelled: set[RequestId] = set()
        self._hashes: list[HashWanted] = []
        self._lookups: list[LookupWanted] = []
        self._leases: list[int] = []
        self._admissions: list[Admission] = []
        self._forgotten: list[RequestId] = []
        self.timed_out = 0
        """Look-ups that were given up."""

    def __contains__(self, request: RequestId) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    # Before the request runs.

    def add(self, request: RequestId, facts: Facts, tokens: int) -> None:
        """`tokens` are those of the prompt; the keys of its chunks are wanted at once."""
        state = self._requests[request] = RequestState(facts, facts.may_load)
        self._want_keys(request, state, self._whole_chunks(state, tokens))

    def ask(self, request: RequestId, local: int, total: int, now: float) -> int | None:
        """How many tokens to load beyond `local`, those in the engine's own blocks; None for not known yet.

        `total` are the request's tokens now. At least one is left to compute, and what is loaded ends with a block.
        """
        state = self._requests.get(request)
        if state is None:
            return 0
        state.local = local
        if not state.may_load:
            return 0
        chunks = self._whole_chunks(state, total)
        end = min(chunks * self._geometry.chunk_tokens, self._whole_blocks(total - 1))
        if end <= local:
            return 0
        first = local // self._geometry.chunk_tokens
        self._want_keys(request, state, chunks)
        believed = state.found is not None and state.found.first <= first and now < state.found.good_until
        if not believed and not self._look_up(request, state, first, chunks, now):
            return None
        return self._offer(state, first, local, end)

    def answered(self, request: RequestId, serial: int, found: Found | None, now: float) -> None:
        """The answer to a look-up; None when the store could not be asked."""
        state = self._requests.get(request)
        looking = state.looking if state is not None else None
        if state is None or looking is None or looking.serial != serial:
            self._release(found.lease if found is not None else 0)
            return
        state.looking = None
        if found is None:
            self.known.clear()
            state.found = FoundChunks(looking.first, b"", now + self._believe_s)
            return
        self.known.note(state.keys[looking.first : looking.first + len(found.tiers)], found.tiers)
        state.found = FoundChunks(
            looking.first,
            found.tiers,
            now + self._believe_s,
            found.bytes_per_chunk,
            found.seconds,
            found.lease,
        )

    def keys_known(self, request: RequestId, namespace: bytes, keys: Iterable[ChunkKey]) -> None:
        """The next keys, in order."""
        state = self._requests.get(request)
        if state is not None:
            state.namespace = namespace
            state.keys += keys

    def keys_failed(self, request: RequestId) -> None:
        """No more keys will come: what has one may still be saved, nothing is loaded."""
        state = self._requests.get(request)
        if state is not None:
            state.may_load = False
            state.facts = state.facts._replace(shareable=len(state.keys) * self._geometry.chunk_tokens)
            state.pending = [chunk for chunk in state.pending if chunk < len(state.keys)]

    def admitted(self, request: RequestId, external: int, blocks: Sequence[int]) -> None:
        """The engine gave the request all its `blocks`; `external` of its tokens it expects from here.

        Comes again without external tokens when a load has ended.
        """
        state = self._requests.get(request)
        if state is None or (state.loading is not None and not external):
            return
        if external:
            pieces = self._pieces(state, state.local, state.local + external, blocks)
            lease, state.found, state.loaded = (state.found.lease if state.found else 0), None, {}
            state.loading = Loading(pieces, lease, [0] * len(pieces))
            self._loads.append(LoadWork(request, pieces))
            return
        self._drop_lookup(state)

    def scheduled(self, request: RequestId, computed: int) -> None:
        """The request runs, with KV of its first `computed` tokens there."""
        state = self._requests.get(request)
        if state is None or state.ran:
            return
        state.ran = True
        if state.facts.tag:
            loaded = tuple(state.loaded.get(tier, 0) for tier in range(len(TIER_NAMES)))
            # The engine computes the last token anew where all of them were there.
            local = min(state.local, computed)
            elsewhere = max(computed - local - sum(loaded), 0)
            self._admissions.append(Admission(state.facts.tag, request, local, loaded, elsewhere))

    # While it runs.

    def set_blocks(self, request: RequestId, blocks: Sequence[int], more: bool) -> None:
        """The request's blocks; `more` for those that come behind the ones it has."""
        state = self._requests.get(request)
        if state is not None:
            if not more:
                state.blocks.clear()
            state.blocks += blocks

    def computed(self, request: RequestId, confirmed: int) -> None:
        """The KV of the first `confirmed` tokens is in the request's blocks and none of them will be taken back."""
        state = self._requests.get(request)
        if state is None or not state.facts.may_save:
            return
        chunks = self._whole_chunks(state, confirmed)
        if chunks <= state.next_save:
            return
        state.pending += range(max(state.next_save, state.facts.skip_save), chunks)
        state.next_save = chunks
        self._want_keys(request, state, chunks)
        if state.pending:
            self._saving.add(request)

    def preempted(self, request: RequestId) -> None:
        """Its blocks are others' now."""
        state = self._requests.get(request)
        if state is None:
            return
        state.blocks.clear()
        state.pending.clear()
        state.next_save = 0
        self._saving.discard(request)
        self._drop_lookup(state)

    def take_saves(self, cost_s: float) -> list[SaveWork]:
        """Saves whose keys are known, of chunks that the cluster is not known to have; it is believed to from now."""
        saves: list[SaveWork] = []
        for request in list(self._saving):
            state = self._requests[request]
            ready = [chunk for chunk in state.pending if chunk < len(state.keys)]
            state.pending = [chunk for chunk in state.pending if chunk >= len(state.keys)]
            if not state.pending:
                self._saving.discard(request)
            for chunk in ready:
                key, blocks = state.keys[chunk], self._blocks_of(state, chunk)
                if key in self.known or not blocks:
                    continue
                self.known.add(key)
                parent = state.keys[chunk - 1] if chunk else state.namespace
                saves.append(SaveWork(request, key, parent, blocks, state.facts.tenant, cost_s))
                state.gathering += self._workers
        return saves

    def gathered(self, request: RequestId, saves: int) -> None:
        """So many saves of the request read its blocks no longer, each counted once per worker."""
        state = self._requests.get(request)
        if state is not None:
            state.gathering -= saves

    def saved(self, key: ChunkKey, there: bool) -> None:
        if not there:
            self.known.discard(key)

    def loaded(self, result: LoadResult) -> None:
        """How a load ended in one worker."""
        state = self._requests.get(result.request)
        if state is not None and state.loading is not None:
            tiers = state.loading.tiers
            for index, tier in enumerate(result.tiers):
                tiers[index] = max(tiers[index], tier)

    def invalid(self, blocks: set[int]) -> None:
        """Blocks that some worker could not fill."""
        for state in self._requests.values():
            if state.loading is not None:
                for piece in state.loading.pieces:
                    state.loading.invalid |= blocks.intersection(piece.blocks)

    def load_done(self, request: RequestId) -> dict[int, int]:
        """All workers have ended the load. Tokens that were loaded by tier; empty where no load was under way."""
        state = self._requests.get(request)
        if state is None or state.loading is None:
            return {}
        loading, state.loading = state.loading, None
        self._release(loading.lease)
        tokens: dict[int, int] = {}
        for index, (piece, tier) in enumerate(zip(loading.pieces, loading.tiers, strict=True)):
            if loading.invalid.intersection(piece.blocks):
                # The engine asks again at once. The same answer would make it load the same again, for ever.
                state.may_load = False
                # Once it is computed it is saved in the place of what could not be loaded, whatever the plan says.
                for lost in loading.pieces[index:]:
                    self.known.discard(lost.key)
                first_lost = state.keys.index(piece.key)
                state.facts = state.facts._replace(skip_save=min(state.facts.skip_save, first_lost))
                break
            tokens[tier or DRAM] = (
                tokens.get(tier or DRAM, 0) + len(piece.blocks) * self._geometry.block_tokens
            )
        state.loaded = tokens
        self._cancelled.discard(request)
        if state.finished:
            self._forget(request)
        return tokens

    # At its end.

    def finished(self, request: RequestId, confirmed: int) -> bool:
        """Whether the request's blocks are still read, or will be. Then `closed` follows.

        `confirmed` as for `computed`; 0 for a request of which nothing more should be saved. The blocks of a load
        that is under way are kept by the engine itself until the load has ended.
        """
        state = self._requests.get(request)
        if state is None:
            return False
        state.finished = True
        self._drop_lookup(state)
        if state.loading is not None:
            self._cancelled.add(request)
            return False
        if confirmed:
            self.computed(request, confirmed)
        else:
            state.pending.clear()
            self._saving.discard(request)
        if state.pending or state.gathering > 0:
            self._held.add(request)
            return True
        self._forget(request)
        return False

    def closed(self, request: RequestId) -> None:
        """All workers have said that the blocks of a held request are free."""
        state = self._requests.get(request)
        if state is not None and state.closing:
            self._forget(request)

    def take_closing(self) -> set[RequestId]:
        """Held requests whose last saves are on their way."""
        closing = {request for request in self._held if not self._requests[request].pending}
        self._held -= closing
        for request in closing:
            self._requests[request].closing = True
        return closing

    # Effects.

    def take_loads(self) -> list[LoadWork]:
        loads, self._loads = self._loads, []
        return loads

    def take_cancelled(self) -> set[RequestId]:
        cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def take_hashes(self) -> list[HashWanted]:
        hashes, self._hashes = self._hashes, []
        return hashes

    def take_lookups(self) -> list[LookupWanted]:
        lookups, self._lookups = self._lookups, []
        return lookups

    def take_leases(self) -> list[int]:
        """Leases that are no longer needed."""
        leases, self._leases = self._leases, []
        return leases

    def take_admissions(self) -> list[Admission]:
        admissions, self._admissions = self._admissions, []
        return admissions

    def take_forgotten(self) -> list[RequestId]:
        """Requests of which nothing is known any more."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves or each other."""
        for request, state in self._requests.items():
            assert len(state.keys) <= state.hashing
            assert all(chunk < state.next_save for chunk in state.pending)
            assert bool(state.pending) == (request in self._saving)
            assert state.gathering >= 0
            assert not (state.looking and state.loading)
            assert not (state.loading and state.found)
            if state.finished:
                assert state.looking is None
                assert state.found is None
                assert state.loading or state.closing or request in self._held
            else:
                assert not state.closing
                assert request not in self._held
        assert self._saving <= self._requests.keys()
        assert self._held <= self._requests.keys()

    # Inside.

    def _whole_chunks(self, state: RequestState, tokens: int) -> int:
        shareable = state.facts.shareable
        return min(tokens, tokens if shareable is None else shareable) // self._geometry.chunk_tokens

    def _whole_blocks(self, tokens: int) -> int:
        return tokens // self._geometry.block_tokens * self._geometry.block_tokens

    def _want_keys(self, request: RequestId, state: RequestState, chunks: int) -> None:
        if chunks > state.hashing:
            self._hashes.append(HashWanted(request, state.hashing, chunks))
            state.hashing = chunks

    def _look_up(self, request: RequestId, state: RequestState, first: int, end: int, now: float) -> bool:
        """Whether the look-up has ended, if only by its limit."""
        if state.looking is None or state.looking.first > first:
            deadline = state.looking.deadline if state.looking else now + self._lookup_limit_s
            self._drop_lookup(state)
            self._serial += 1
            state.looking = Looking(self._serial, first, deadline)
            self._lookups.append(LookupWanted(request, self._serial, first, end, state.facts.sources))
        if now < state.looking.deadline:
            return False
        self.timed_out += 1
        self._drop_lookup(state)
        state.found = FoundChunks(0, b"", _NEVER)
        return True

    def _offer(self, state: RequestState, first: int, local: int, end: int) -> int:
        found = state.found
        assert found is not None
        chunk_tokens = self._geometry.chunk_tokens
        needed = -(-end // chunk_tokens) - first
        run = found.tiers[first - found.first :][:needed].partition(b"\0")[0]
        chunks = (
            self._worth(run, found.bytes_per_chunk, found.seconds, local - first * chunk_tokens) if run else 0
        )
        return max(min(end, (first + chunks) * chunk_tokens) - local, 0) if chunks else 0

    def _pieces(self, state: RequestState, start: int, end: int, blocks: Sequence[int]) -> tuple[Piece, ...]:
        """Tokens [start, end), both at the edge of a block."""
        first, last = start // self._geometry.block_tokens, end // self._geometry.block_tokens
        size = self._geometry.chunk_blocks
        pieces = []
        while first < last:
            chunk, skipped = divmod(first, size)
            stop = min((chunk + 1) * size, last)
            pieces.append(Piece(state.keys[chunk], skipped, tuple(blocks[first:stop])))
            first = stop
        return tuple(pieces)

    def _blocks_of(self, state: RequestState, chunk: int) -> tuple[int, ...]:
        """Empty where not all are there."""
        size = self._geometry.chunk_blocks
        blocks = tuple(state.blocks[chunk * size : (chunk + 1) * size])
        return blocks if len(blocks) == size else ()

    def _drop_lookup(self, state: RequestState) -> None:
        state.looking = None
        if state.found is not None:
            self._release(state.found.lease)
            state.found = None

    def _release(self, lease: int) -> None:
        if lease:
            self._leases.append(lease)

    def _forget(self, request: RequestId) -> None:
        del self._requests[request]
        self._forgotten.append(request)
        self._saving.discard(request)
        self._held.discard(request)
