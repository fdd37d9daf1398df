"""A router's core with replicas that are ready and an index that is full, without sockets."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from cache_store.events import PROTOCOL_VERSION, Hello, Load, Share
from cache_store.keys import chunk_keys, namespace
from router.config import RouterConfig
from router.core import Query, RouterCore
from router.others_load import OthersLoad
from router.render import Rendered
from workers.messages import ReplicaInfo

MODEL = "sim"
SALT = "the-tenant"
IDENTITY = bytes(range(32))
_BUSY = Load(
    waiting=1, running=12, prefill_tokens=3000, kv_used=0.6, prefill_rate=20e3, decode_rate=50.0,
    http_requests=13, prefilling=1,
)  # fmt: skip


def core_with(replicas: int, chunk_tokens: int) -> RouterCore:
    """All ready, all busy with requests of this router and of others."""
    core = RouterCore(RouterConfig(), "the-secret-of-no-cluster", clock=lambda: 0.0)
    for number in range(replicas):
        info = ReplicaInfo(f"unified-{number}", "unified", "node", f"127.0.0.1:{20000 + number}", (MODEL,))
        hello = Hello(PROTOCOL_VERSION, info.id, number, IDENTITY, chunk_tokens)
        entry = core.directory._entries[info.id] = core.directory._entry(info)
        entry.load, entry.stream.hello, entry.stream.connected = _BUSY, hello, True
        entry.others = OthersLoad.of(_BUSY, Share(core.ledger.router))
        for request in range(number % 8):
            core.ledger.reserve(info.id, f"open-{number}-{request}", 500)
    core.directory.settled.set()
    assert len(core.directory.ready()) == replicas
    return core


def fill(
    core: RouterCore, chunk_tokens: int, sequences: int, sequence_tokens: int, draw: random.Random
) -> None:
    """Sequences that no prompt has to do with, each on one replica."""
    replicas = [entry.info.id for entry in core.directory]
    root = namespace(IDENTITY, "", SALT)
    for number in range(sequences):
        keys = chunk_keys(root, _tokens(sequence_tokens, draw), chunk_tokens)
        core.index.apply(replicas[number % len(replicas)], "hbm", keys)


def prompts(
    core: RouterCore, chunk_tokens: int, tokens: int, count: int, draw: random.Random
) -> Iterator[array[int]]:
    """Prompts that begin alike and part at some depth, held up to some depth by a few replicas each."""
    shared = _tokens(tokens, draw)
    replicas = [entry.info.id for entry in core.directory]
    root = namespace(IDENTITY, "", SALT)
    for _ in range(count):
        fork = draw.randrange(tokens // 10, tokens)
        prompt = shared[:fork] + _tokens(tokens - fork, draw)
        keys = chunk_keys(root, prompt, chunk_tokens)
        for replica in draw.sample(replicas, min(4, len(replicas))):
            core.index.apply(replica, "hbm", keys[: draw.randrange(len(keys) + 1)])
        yield prompt


def query(number: int, prompt: array[int]) -> Query:
    """A request as the router has it once it is rendered."""
    rendered = Rendered(MODEL, [prompt], shareable=(len(prompt),), stream=True, max_tokens=200)
    return Query(f"request-{number}", MODEL, rendered, SALT, 4 * len(prompt))


def _tokens(count: int, draw: random.Random) -> array[int]:
    return array("I", draw.choices(range(50_000), k=count))
