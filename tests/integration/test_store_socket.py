"""The cache actor's socket, spoken to by whatever can open it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from cache_store import store_connection
from cache_store.client import StoreClient
from cache_store.config import CacheConfig
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.private_socket import SocketInUse
from cache_store.staging import StagingArea
from cache_store.stream import Publisher
from cache_store.wire import (
    DRAM,
    MAX_OPEN_REQUESTS,
    Answer,
    Corrupt,
    Found,
    Load,
    Loaded,
    Lookup,
    MessageReader,
    Register,
    Registered,
    Release,
    Request,
    Save,
    Saved,
    encode,
)
from tests.integration.tiny_store import (
    DEADLINE_S,
    SLOT_BYTES,
    ServerThread,
    TinyStore,
    header_of,
    key_of,
    payload_of,
    scheduler,
    wait_until,
    worker,
)


class Peer:
    """Sends any bytes and descriptors, and reads answers."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self._reader: MessageReader[Answer] = MessageReader(Answer)
        self._answers: list[Answer] = []

    def send(self, *messages: Request | bytes, fds: Sequence[int] = ()) -> None:
        data = b"".join(m if isinstance(m, bytes) else encode(m) for m in messages)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.socket.sendmsg([data], ancillary)
        if data[sent:]:
            self.socket.sendall(data[sent:])

    def answer(self) -> Answer:
        while not self._answers:
            data = self.socket.recv(65536)
            assert data, "the connection ended"
            self._answers += self._reader.feed(data)
        return self._answers.pop(0)

    def ended(self) -> bool:
        """Wait for the connection's end; answers before it are dropped."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass
        return True

    def close(self) -> None:
        self.socket.close()


class Stage:
    """A server, its store, and a peer that has registered a staging area of four slots."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.store = TinyStore(range(4))
        self.thread = ServerThread(lambda: self.store, path, **options)
        self.area = StagingArea.create(4, SLOT_BYTES)
        self._peers: list[Peer] = []
        self.registered = self.peer()
        self.registered.send(worker(), fds=[self.area.fd])
        assert self.registered.answer() == Registered("node")

    def peer(self) -> Peer:
        self._peers.append(Peer(self.path))
        return self._peers[-1]

    def hold(self) -> Callable[[], None]:
        """Let loads and saves wait. Gives what lets them go on."""
        gate = self.thread.call(asyncio.Event)

        async def wait() -> None:
            await gate.wait()

        self.store.pause = wait
        return lambda: self.thread.call(gate.set)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.thread.close(drain_s=0.05)
        self.area.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "app" / "cache.sock")
    yield stage
    stage.close()


def open_descriptors() -> int:
    gc.collect()  # Loops of earlier tests.
    return len(os.listdir("/proc/self/fd"))


# What engines ask


def test_a_part_is_saved_from_a_slot_and_loaded_into_another(stage: Stage) -> None:
    peer = stage.registered
    stage.area.slot(1)[:] = payload_of(9)
    peer.send(Save(1, header_of(9), 1))
    assert peer.answer() == Saved(1, "stored")
    peer.send(Load(2, key_of(9), 3))
    assert peer.answer() == Loaded(2, "loaded", DRAM, header_of(9))
    assert bytes(stage.area.slot(3)) == payload_of(9)
    peer.send(Load(3, key_of(77), 0))
    assert peer.answer() == Loaded(3, "missing")


def test_answers_come_in_any_order_and_requests_do_not_wait_for_each_other(stage: Stage) -> None:
    go_on = stage.hold()
    peer = stage.registered
    peer.send(Load(1, key_of(1), 0), Load(2, key_of(2), 1), Lookup(3, key_of(3), 1))
    found = peer.answer()
    assert isinstance(found, Found)
    assert found.id == 3
    assert stage.thread.stats().open_requests == 2
    go_on()
    assert sorted(peer.answer().id for _ in range(2)) == [1, 2]  # type: ignore[union-attr]
    assert stage.thread.stats().open_requests == 0


def test_requests_may_follow_a_registration_at_once(stage: Stage) -> None:
    peer = stage.peer()
    peer.send(worker(), Load(1, key_of(1), 2), fds=[stage.area.fd])
    assert peer.answer() == Registered("node")
    assert isinstance(peer.answer(), Loaded)


def test_a_scheduler_half_registers_without_memory(stage: Stage) -> None:
    peer = stage.peer()
    peer.send(scheduler(), Lookup(1, key_of(1) + key_of(99), 1), Corrupt(key_of(2), DRAM))
    assert isinstance(peer.answer(), Registered)
    found = peer.answer()
    assert isinstance(found, Found)
    assert (found.tiers, found.lease) == (bytes([DRAM, 0]), 1)
    wait_until(lambda: stage.store.corrupted == [key_of(2)], "the corrupt chunk is reported")


def test_leases_end_when_released_and_with_their_connection(stage: Stage) -> None:
    first, second = stage.registered, stage.peer()
    second.send(scheduler())
    second.answer()
    first.send(Lookup(1, key_of(1), 1), Lookup(2, key_of(2), 1))
    second.send(Lookup(1, key_of(1), 1))
    leases = [peer.answer().lease for peer in (first, first, second)]  # type: ignore[union-attr]
    assert stage.store.leases == set(leases)
    second.send(Release(leases[0]), Release(leases[2]), Release(leases[2]), Release(10**6), Lookup(2, b"", 1))
    second.answer()
    assert stage.store.leases == {leases[0], leases[1]}, "only its own are released"
    first.close()
    wait_until(lambda: not stage.store.leases, "leases end with the connection")


@pytest.mark.parametrize(
    "other",
    [
        {"identity": b"j" * 32},
        {"rank": 1, "world_size": 2},
        {"world_size": 2},
        {"checksum": b"short"},
        {"tokens": 0},
    ],
    ids=str,
)
def test_a_save_whose_header_is_not_of_this_connection_is_refused(
    stage: Stage, other: dict[str, Any]
) -> None:
    stage.registered.send(Save(1, header_of(9, **other), 0))
    assert stage.registered.answer() == Saved(1, "refused")
    assert key_of(9) not in stage.store.parts


def test_a_store_that_fails_is_a_miss(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    def fail_at_once(*args: object) -> None:
        raise RuntimeError("broken")

    stage.store.pause = fail
    for name in ("lookup", "corrupt", "release"):
        monkeypatch.setattr(stage.store, name, fail_at_once)
    peer = stage.registered
    peer.send(
        Load(1, key_of(1), 0), Save(2, header_of(1), 1), Lookup(3, key_of(1) * 2, 1), Corrupt(key_of(1), 1)
    )
    answers = {answer.id: answer for answer in (peer.answer() for _ in range(3))}  # type: ignore[union-attr]
    assert answers == {
        1: Loaded(1, "missing"),
        2: Saved(2, "dropped"),
        3: Found(3, bytes(2), 0, 0),
    }
    wait_until(lambda: stage.thread.stats().counters.store_errors == 4, "errors are counted")


def test_a_part_that_is_longer_than_the_slot_is_a_miss(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_long(*args: object) -> object:
        return "loaded", DRAM, header_of(1, SLOT_BYTES + 1)

    monkeypatch.setattr(stage.store, "load_into", too_long)
    stage.registered.send(Load(1, key_of(1), 0))
    assert stage.registered.answer() == Loaded(1, "missing")


def test_a_store_that_keeps_a_view_of_a_slot_costs_the_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    async def keep(key: object, rank: int, target: memoryview, limit_s: float) -> object:
        kept.append(np.frombuffer(target, np.uint8))
        return "loaded", DRAM, header_of(1)

    monkeypatch.setattr(stage.store, "load_into", keep)
    stage.registered.send(Load(1, key_of(1), 0))
    assert stage.registered.ended()
    assert stage.thread.stats().counters.slots_held == 1


# What nobody may send


KEY = key_of(1)
CONVERSATIONS: dict[str, tuple[Any, ...]] = {
    "no message": (b"\x03\x00\x00\x00abc",),
    "a message too long": (b"\xff\xff\xff\xff",),
    "an answer": (encode(Registered("n")),),
    "a look-up first": (Lookup(1, KEY, 1),),
    "a load first": (Load(1, KEY, 0),),
    "several before Register": (Release(1), Lookup(1, KEY, 1), scheduler()),
    "another version": (Register(2, "e", KEY),),
    "Register twice": (scheduler(), scheduler()),
    "no memory for slots": (worker(),),
    "rank beyond the world": (worker(slots=0, rank=1),),
    "a load without memory": (scheduler(), Load(1, KEY, 0)),
    "half a key": (scheduler(), Lookup(1, KEY[:16], 1)),
}
WITH_MEMORY: dict[str, tuple[Any, ...]] = {
    "memory without slots": (worker(slots=0),),
    "memory of a scheduler half": (worker(rank=-1),),
    "fewer slots than memory": (worker(slots=3),),
    "more slots than memory": (worker(slots=5),),
    "slots of another size": (worker(slot_bytes=SLOT_BYTES * 2),),
    "an endless area": (worker(slots=2**40, slot_bytes=2**60),),
    "a slot out of range": (worker(), Load(1, KEY, 4)),
    "a slot far out of range": (worker(), Load(1, KEY, 2**62)),
    "a negative slot": (worker(), Load(1, KEY, -1)),
    "a save from a slot out of range": (worker(), Save(1, header_of(1), 4)),
    "a payload longer than a slot": (worker(), Save(1, header_of(1, SLOT_BYTES + 1), 0)),
    "a payload of negative length": (worker(), Save(1, msgspec.structs.replace(header_of(1), nbytes=-1), 0)),
    "a slot in use": (worker(), Load(1, KEY, 0), Load(2, KEY, 0)),
    "a slot in use by a save": (worker(), Save(1, header_of(1), 0), Load(2, KEY, 0)),
    "an id in use": (worker(), Load(1, KEY, 0), Load(1, KEY, 1)),
    "an id in use by a load": (worker(), Load(1, KEY, 0), Lookup(1, KEY, 1)),
    "no time at all": (worker(), Load(1, KEY, 0, 0.0)),
}


@pytest.mark.parametrize(
    ("messages", "memory"),
    [pytest.param(m, False, id=name) for name, m in CONVERSATIONS.items()]
    + [pytest.param(m, True, id=name) for name, m in WITH_MEMORY.items()],
)
def test_what_does_not_fit_ends_that_connection_and_is_counted(
    stage: Stage, messages: tuple[Any, ...], memory: bool
) -> None:
    stage.thread.stats()
    before = open_descriptors()
    peer = stage.peer()
    peer.send(*messages, fds=[stage.area.fd] if memory else ())
    assert peer.ended()
    peer.close()
    wait_until(lambda: stage.thread.stats().open_requests == 0, "the store is left alone")
    stats = stage.thread.stats()
    assert (stats.counters.protocol_errors, stats.connections) == (1, 1)
    assert open_descriptors() == before
    stage.registered.send(Load(1, KEY, 0))
    assert isinstance(stage.registered.answer(), Loaded), "others go on"


def test_more_than_one_descriptor_ends_the_connection(stage: Stage) -> None:
    before = open_descriptors()
    for fds in ([stage.area.fd] * 2, [stage.area.fd] * 9):
        peer = stage.peer()
        peer.send(worker(), fds=fds)
        assert peer.ended()
        peer.close()
    peer = stage.peer()
    peer.send(encode(worker())[:3], fds=[stage.area.fd])
    peer.send(encode(worker())[3:], fds=[stage.area.fd])
    assert peer.ended()
    peer.close()
    assert stage.thread.stats().counters.protocol_errors == 3
    assert open_descriptors() == before


def test_descriptors_after_the_registration_go_nowhere(stage: Stage) -> None:
    before = open_descriptors()
    stage.registered.send(Load(1, KEY, 0), fds=[stage.area.fd] * 5)
    assert isinstance(stage.registered.answer(), Loaded)
    assert open_descriptors() == before


def test_a_registration_may_come_byte_by_byte(stage: Stage) -> None:
    peer = stage.peer()
    data = encode(worker())
    peer.send(data[:1], fds=[stage.area.fd])
    for i in range(1, len(data)):
        peer.send(data[i : i + 1])
    assert peer.answer() == Registered("node")


def test_too_many_open_requests_end_the_connection(stage: Stage) -> None:
    stage.hold()
    area = StagingArea.create(MAX_OPEN_REQUESTS + 1, 1)
    peer = stage.peer()
    peer.send(worker(slots=area.slots, slot_bytes=area.slot_bytes), fds=[area.fd])
    peer.answer()
    peer.send(*(Load(i, KEY, i) for i in range(MAX_OPEN_REQUESTS)))
    wait_until(lambda: stage.thread.stats().open_requests == MAX_OPEN_REQUESTS, "all are taken")
    peer.send(Load(MAX_OPEN_REQUESTS, KEY, MAX_OPEN_REQUESTS))
    assert peer.ended()
    assert stage.thread.stats().counters.protocol_errors == 1
    area.close()


def test_a_peer_that_does_not_read_its_answers_is_cut_off(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_connection, "_MAX_UNSENT_BYTES", 4096)
    question = Lookup(1, bytes(32 * 1000), 1)
    with contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            stage.registered.send(question)
    assert stage.thread.stats().counters.protocol_errors == 1


# Who comes and goes


def test_a_connection_that_does_not_register_is_closed(tmp_path: Path) -> None:
    thread = ServerThread(TinyStore, tmp_path / "app" / "s", register_timeout_s=0.05)
    peer = Peer(tmp_path / "app" / "s")
    assert peer.ended()
    assert thread.stats().counters.protocol_errors == 1
    peer.close()
    thread.close()


def test_connections_over_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "app" / "s", max_connections=2)
    second, third = stage.peer(), stage.peer()
    assert third.ended()
    assert (stage.thread.stats().connections, stage.thread.stats().counters.crowded) == (2, 1)
    second.close()
    wait_until(lambda: stage.thread.stats().connections == 1, "the place is free again")
    fourth = stage.peer()
    fourth.send(scheduler())
    assert isinstance(fourth.answer(), Registered)
    stage.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_word_even_where_the_folder_lets_him_in() -> None:
    folder = Path(tempfile.mkdtemp())
    thread = ServerThread(TinyStore, folder / "s")
    folder.chmod(0o755)
    (folder / "s").chmod(0o666)
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); print(s.recv(1))"
    )
    called = subprocess.run(
        [sys.executable, "-c", program, str(folder / "s")], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert called.stdout == "b''\n", called.stderr
    assert thread.stats().counters.foreign == 1
    assert thread.stats().counters.accepted == 0
    thread.close()
    shutil.rmtree(folder)


def test_a_second_server_on_the_socket_is_an_error(stage: Stage) -> None:
    with pytest.raises(SocketInUse):
        ServerThread(TinyStore, stage.path)
    stage.registered.send(Load(1, KEY, 0))
    assert isinstance(stage.registered.answer(), Loaded)


def test_work_that_outlives_its_connection_has_memory_to_write_to(stage: Stage) -> None:
    go_on = stage.hold()
    before = open_descriptors()
    area = StagingArea.create(4, SLOT_BYTES)
    peer = stage.peer()
    peer.send(worker(), Load(1, key_of(1), 0), Save(2, header_of(2), 1), fds=[area.fd])
    peer.answer()
    wait_until(lambda: stage.thread.stats().open_requests == 2, "both are taken")
    peer.close()
    wait_until(lambda: stage.thread.stats().connections == 1, "the connection has ended")
    assert stage.thread.stats().open_requests == 2
    go_on()
    wait_until(lambda: stage.thread.stats().open_requests == 0, "the work has ended")
    assert bytes(area.slot(0)) == payload_of(1)
    assert stage.thread.stats().counters.store_errors == 0
    area.close()
    assert open_descriptors() == before


def test_mapped_memory_goes_with_the_connection(stage: Stage) -> None:
    before = open_descriptors()
    for _ in range(3):
        area = StagingArea.create(4, SLOT_BYTES)
        peer = stage.peer()
        peer.send(worker(), Load(1, key_of(1), 0), fds=[area.fd])
        peer.answer()
        assert stage.thread.stats().staging_bytes == 8 * SLOT_BYTES
        peer.answer()
        peer.close()
        area.close()
        wait_until(lambda: stage.thread.stats().connections == 1, "the connection has ended")
    assert stage.thread.stats().staging_bytes == 4 * SLOT_BYTES
    assert open_descriptors() == before


def test_closing_waits_for_the_stores_work_only_so_long(stage: Stage) -> None:
    stage.hold()
    stage.registered.send(Load(1, key_of(1), 0), Lookup(2, key_of(2), 1))
    stage.registered.answer()
    stage.thread.run(stage.thread.server.close(drain_s=0.01))
    stage.thread.run(stage.thread.server.close())
    assert stage.registered.ended()
    assert stage.thread.stats().open_requests == 0
    assert stage.store.leases == set()
    assert not stage.path.exists()


# With the node's store behind it


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_the_nodes_store_serves_engines_through_the_socket(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    stores: list[NodeStore] = []

    def node_store() -> NodeStore:
        publisher = Publisher(holder="n", epoch=1, identity=b"", chunk_tokens=16, tiers=["dram"])
        stores.append(
            NodeStore(
                node="n",
                config=CacheConfig(),
                dram_bytes=64 * SLOT_BYTES,
                space=HeapSpace(),
                publisher=publisher,
            )
        )
        return stores[0]

    thread = ServerThread(node_store, tmp_path / "app" / "s", loop=loop)
    thread.run(stores[0].start())
    client = StoreClient(tmp_path / "app" / "s", worker())
    assert client.wait_alive(DEADLINE_S)
    for number in range(8):
        slot = client.take_slot()
        assert slot is not None
        slot.view[:] = payload_of(number)
        assert client.save(header_of(number), slot).result(DEADLINE_S).outcome == "stored"
        slot.release()
    found = client.lookup(b"".join(map(key_of, range(9))), 1).result(DEADLINE_S)
    assert found.tiers == bytes([DRAM] * 8 + [0])
    for number in range(8):
        slot = client.take_slot()
        assert slot is not None
        loaded = client.load(key_of(number), slot).result(DEADLINE_S)
        assert (loaded.outcome, loaded.tier, loaded.header) == ("loaded", DRAM, header_of(number))
        assert bytes(slot.view) == payload_of(number)
        slot.release()
    assert thread.call(stores[0].stats).leased == 8
    client.close()
    wait_until(lambda: thread.call(stores[0].stats).leased == 0, "leases end with the connection")
    thread.call(stores[0].check_integrity)
    assert thread.stats().counters.slots_held == 0
    thread.run(stores[0].close())
    thread.close()
