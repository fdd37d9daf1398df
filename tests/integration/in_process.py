"""A whole cluster in one process, without Ray: simulated replicas and routers, each on a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from cache_store.app_server import AppServer, bound_socket
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from cluster.render_sim import SimRenderer
from router.config import RouterConfig
from router.core import RouterCore
from router.headers import parse_cached
from router.http import RouterApp
from router.routes import ROUTES
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.hosted import HostedReplica
from workers.messages import ReplicaInfo, Role
from workers.sim.block_cache import Content
from workers.sim.engine import SimEngine
from workers.sim.generation import Generation
from workers.transfer import TransferConfig

SECRET = "the-secret-of-this-cluster"
MODEL = "toy"
HOST = "127.0.0.1"
CHUNK_TOKENS = 64
DEADLINE_S = 10.0


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait for the condition; AssertionError when it does not come true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.002)


def http_client(base_url: str = "", headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Any number of connections; no certificates, which take longer to load than most tests run."""
    unbounded = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, verify=False, timeout=DEADLINE_S, limits=unbounded
    )


class RecordingEngine(SimEngine):
    """Remembers every sequence that it was given, so that its cache can be told in tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.contents: list[Content] = []

    def submit(self, *args: Any, **kwargs: Any) -> Generation:
        generation = super().submit(*args, **kwargs)
        self.contents += [stream.content for stream in generation.streams]
        return generation

    def chunks(self) -> set[ChunkKey]:
        """What is in the block cache now, block by block, without the help of any event."""
        identity, found = self.info.identity, set[ChunkKey]()
        for content in self.contents:
            content.extend_chain(len(content.tokens), identity.block_tokens)
            held = self.blocks.match(content.chain) * identity.block_tokens
            if content.shareable is not None and content.media:
                held = min(held, content.shareable)
            root = namespace(identity.digest(), content.adapter, content.salt)
            found |= set(chunk_keys(root, content.tokens[:held], identity.chunk_tokens))
        return found


@dataclass
class Node:
    """One replica and its server, which can die and come back at the same address."""

    hosted: HostedReplica
    engine: RecordingEngine
    server: AppServer
    info: ReplicaInfo
    make: Callable[[], tuple[HostedReplica, RecordingEngine]]
    alive: bool = True

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def url(self) -> str:
        return f"http://{self.info.address}"

    @property
    def busy(self) -> int:
        load = self.engine.load()
        return load.waiting + load.running

    async def stop_listening(self) -> None:
        """New connections are refused; those that are open go on."""
        for server in self.server._server.servers:
            server.close()

    async def silence(self) -> None:
        """From now on its streams tell no load."""
        reporter = self.hosted._reporter
        assert reporter is not None
        reporter.cancel()
        await asyncio.gather(reporter, return_exceptions=True)
        self.hosted.publisher._load = None

    async def kill(self) -> None:
        """As when the process dies: the port is closed and every connection is reset."""
        self.alive = False
        await self.server.stop()

    async def revive(self) -> None:
        """The same life goes on: what it held, it holds."""
        port = int(self.info.address.rpartition(":")[2])
        self.server = AppServer([self.hosted.app], [bound_socket(HOST, port)])
        await self.server.start()
        self.alive = True

    async def restart(self) -> None:
        """Another life at the same address, with an empty cache."""
        await self.hosted.stop()
        self.hosted, self.engine = self.make()
        await self.hosted.start()
        await self.revive()

    async def stop(self) -> None:
        await self.server.stop()
        await self.hosted.stop()


@dataclass
class RouterNode:
    """One router and its server."""

    core: RouterCore
    app: RouterApp
    server: AppServer
    renderer: SimRenderer
    wakes: list[float] = field(default_factory=list)
    """When a replica was asked for."""

    @property
    def url(self) -> str:
        return f"http://{self.server.addresses[0]}"

    def knows(self, nodes: Sequence[Node]) -> bool:
        """Whether these and no others are ready and indexed, each with exactly what its engine holds."""
        ready = {entry.info.id for entry in self.core.directory.ready()}
        return ready == self.core.index.holders() == {node.id for node in nodes} and all(
            self.core.index.held(node.id, "hbm") == node.engine.chunks() for node in nodes
        )

    def configure(self, **changes: Any) -> None:
        """As Serve's `user_config` does."""
        self.core.configure(RouterConfig.model_validate(self.core.config.model_dump() | changes))
        self.app.configure()

    async def stop(self) -> None:
        await self.server.stop()
        await self.app.close()


@dataclass
class Cluster:
    nodes: list[Node]
    routers: list[RouterNode]
    http: httpx.AsyncClient
    """To the first router."""
    _config: RouterConfig
    _env: dict[str, str]
    _max_model_len: int
    skew_s: float = 0.0
    """What the routers' clocks are ahead of the replicas'."""

    def _clock(self) -> float:
        return time.monotonic() + self.skew_s

    @property
    def router(self) -> RouterNode:
        return self.routers[0]

    @property
    def core(self) -> RouterCore:
        return self.routers[0].core

    def node(self, replica: str) -> Node:
        return next(node for node in self.nodes if node.id == replica)

    def openai(self, api_key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.router.url}/v1", api_key=api_key, max_retries=0)

    async def add_router(self, nodes: Sequence[Node] | None = None) -> RouterNode:
        core = RouterCore(self._config, SECRET, ROUTES, self._clock)
        renderer = SimRenderer(self._max_model_len)
        wakes: list[float] = []

        async def wake() -> None:
            wakes.append(time.monotonic())

        async def describe() -> dict[str, Any]:
            return {"replicas": [entry.info.id for entry in core.directory]}

        app = RouterApp(core, renderer, SECRET, (MODEL, "law"), wake, describe, self._env)
        server = AppServer([app], [bound_socket(HOST)])
        await server.start()
        router = RouterNode(core, app, server, renderer, wakes)
        self.routers.append(router)
        core.set_pool("unified", [node.info for node in (self.nodes if nodes is None else nodes)])
        return router

    async def talk_to(self, router: RouterNode) -> None:
        """`http` is a client of this router from here on."""
        await self.http.aclose()
        self.http = http_client(base_url=router.url)

    def serving(self) -> Node:
        """The one replica that has a request open."""
        (node,) = [node for node in self.nodes if node.hosted.app.open_requests]
        return node

    def at_rest(self) -> bool:
        """No request is open anywhere."""
        return not any(node.busy or node.hosted.app.open_requests for node in self.nodes) and not any(
            router.core.ledger.open_requests() or len(router.core.room) for router in self.routers
        )

    def check_integrity(self) -> None:
        """At rest. Raises AssertionError where something leaked or contradicts itself."""
        for node in self.nodes:
            node.engine.check_integrity()
            assert node.engine.open_streams == 0
            assert node.engine.load().kv_used == 0
            assert node.hosted.publisher.keys("hbm") == node.engine.chunks()
        for router in self.routers:
            router.core.ledger.check_integrity()
            router.core.room.check_integrity()
            router.core.index.check_integrity()
            router.core.log.check_integrity()
            router.app._relay.pool.check_integrity()


def make_replica(
    replica: str, sim: SimConfig, role: Role = "unified", transfer: TransferConfig | None = None
) -> tuple[HostedReplica, RecordingEngine]:
    cache = CacheConfig(chunk_tokens=CHUNK_TOKENS)
    model = ModelConfig(name=MODEL, adapters={"law": "x"})
    engine = RecordingEngine(EngineConfig(kind="sim", sim=sim), model, cache, transfer=transfer)
    return HostedReplica(replica, role, engine, cache, SECRET, loses=engine.faults.take_lost_delta), engine


async def start_node(
    replica: str, sim: SimConfig, role: Role = "unified", transfer: TransferConfig | None = None
) -> Node:
    make = functools.partial(make_replica, replica, sim, role, transfer)
    hosted, engine = make()
    await hosted.start()
    server = AppServer([hosted.app], [bound_socket(HOST)])
    await server.start()
    return Node(hosted, engine, server, hosted.describe("this-node", server.addresses[0]), make)


FAST: dict[str, Any] = {
    "prefill_tokens_per_s": 1e6,
    "prefill_overhead_s": 0.0,
    "decode_tokens_per_s": 2000.0,
    "decode_slowdown": 0.0,
}


@contextlib.asynccontextmanager
async def running(
    replicas: int = 2,
    *,
    routers: int = 1,
    limits: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    router: dict[str, Any] | None = None,
    roles: Sequence[Role] = (),
    **sim: Any,
) -> AsyncIterator[Cluster]:
    """A cluster whose routers know every replica. `sim` are fields of SimConfig that replace the fast ones; `roles` are
    those of the replicas, in their order, where they hand prompts over to each other.

    A test must leave it at rest, and then nothing may have leaked.
    """
    config = RouterConfig.model_validate({"limits": limits or {}, **(router or {})})
    settings = SimConfig(**{"block_tokens": 16, **FAST, **sim})
    if roles:
        nodes = [
            await start_node(f"{role}-{number}", settings, role, TransferConfig())
            for number, role in enumerate(roles)
        ]
    else:
        nodes = [await start_node(f"replica-{number}", settings) for number in range(replicas)]
    max_model_len = min(settings.max_model_len, settings.blocks * settings.block_tokens)
    cluster = Cluster(nodes, [], http_client(), config, env or {}, max_model_len)
    try:
        for _ in range(routers):
            await cluster.add_router()
        await cluster.talk_to(cluster.router)
        await until(lambda: all(router.knows(nodes) for router in cluster.routers))
        yield cluster
        await until(cluster.at_rest)
        cluster.check_integrity()
    finally:
        await cluster.http.aclose()
        stops = [*(each.stop() for each in cluster.routers), *(node.stop() for node in nodes)]
        await asyncio.gather(*stops)


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}


def prompt(text: str | list[int], **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 8} | options


def words(tokens: int, name: str) -> str:
    """A text of so many tokens, of which the first is `name`, cut to four characters."""
    return f"{name:4.4}" + "word" * (tokens - 1)


def cached_header(answer: httpx.Response) -> dict[str, int]:
    return parse_cached(answer.headers["x-manta-cached"])
