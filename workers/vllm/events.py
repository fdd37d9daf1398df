"""Reads vLLM's KV events and says them in our words.

vLLM publishes over ZMQ: frames `[topic, number as big-endian uint64, msgpack [time, events, rank]]`. Events are read as
tolerant maps, since their fields grow with every vLLM release. A hole in the numbers is filled from the replay socket;
what can't be replayed is answered with `BlocksCleared`, after which blocks that were there before are unknown and are
never keyed: under-reporting costs a recompute, over-reporting would cost a request its plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from workers.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventSink

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 5.0


def translate(event: Mapping[str, Any]) -> KVEvent | None:
    """One event of vLLM as ours; None for what does not concern the engine's own blocks."""
    kind = event.get("type")
    if event.get("medium") not in (None, "GPU") or event.get("locality") == "REMOTE":
        return None
    if kind == "AllBlocksCleared":
        return BlocksCleared()
    if event.get("group_idx") not in (None, 0):
        return None
    if kind == "BlockRemoved":
        return BlocksRemoved(event["block_hashes"])
    if kind != "BlockStored":
        return None
    adapter = event.get("lora_name") or ""
    salt, shareable = read_extra_keys(
        event.get("extra_keys"), adapter, event.get("parent_block_hash") is None
    )
    return BlocksStored(
        hashes=event["block_hashes"],
        parent=event.get("parent_block_hash"),
        tokens=event["token_ids"],
        block_tokens=event["block_size"],
        adapter=adapter,
        salt=salt,
        shareable=shareable,
    )


def read_extra_keys(
    extra_keys: Sequence[Sequence[Any] | None] | None, adapter: str, at_start: bool
) -> tuple[str, int | None]:
    """Salt of the sequence, and how many leading blocks hold nothing but tokens, salt and adapter (None: all).

    Per block vLLM gives, untagged and in this order: the adapter's name, (content id, offset) of images and audio, the
    salt (a string, on a sequence's first block alone), digests of prompt embeddings (bytes).
    """
    salt = ""
    for index, keys in enumerate(extra_keys or ()):
        rest = list(keys or ())
        if adapter and rest and rest[0] == adapter:
            rest = rest[1:]
        if at_start and index == 0 and len(rest) == 1 and isinstance(rest[0], str):
            salt, rest = rest[0], []
        if rest:
            return salt, index
    return salt, None


class EventReader:
    """Follows the event socket of one engine."""

    def __init__(self, endpoint: str, replay_endpoint: str, sink: KVEventSink) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._sink = sink
        self._next = 0
        self.lost = 0
        """Batches that neither came nor could be replayed."""

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context.instance()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(self._endpoint)
        try:
            await self._replay(context)
            while True:
                _, number, payload = await socket.recv_multipart()
                await self._take(context, int.from_bytes(number, "big", signed=True), payload)
        finally:
            socket.close()

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number < self._next:
            return
        if number > self._next:
            await self._replay(context, until=number)
        if number > self._next:
            self.lost += number - self._next
            logger.warning(
                "%d KV event batches were lost; the engine's cache is reported as empty", self.lost
            )
            self._sink([BlocksCleared()])
        if number >= self._next:
            self._deliver(number, payload)

    async def _replay(self, context: zmq.asyncio.Context, until: int | None = None) -> None:
        """Deliver what was published since `_next`, as far as the engine still has it."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._replay_endpoint)
        try:
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), _REPLAY_TIMEOUT_S)
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0 or (until is not None and number >= until):
                    return
                if number == self._next:
                    self._deliver(number, frames[-1])
                elif number > self._next:
                    return
        except TimeoutError:
            logger.warning("the engine did not answer a replay request within %.0f s", _REPLAY_TIMEOUT_S)
        finally:
            socket.close()

    def _deliver(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        batch = msgspec.msgpack.decode(payload)
        events = [ours for event in batch[1] if (ours := translate(event)) is not None]
        if events:
            self._sink(events)
