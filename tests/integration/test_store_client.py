"""An engine's client of the store, over real sockets: what it promises when the other side does not do its part."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache_store import client as client_module
from cache_store import client_session
from cache_store.chunk import verify
from cache_store.client import Slot, StoreClient, StoreTimeout, StoreUnavailable
from cache_store.staging import StagingArea
from cache_store.wire import (
    DRAM,
    MAX_OPEN_REQUESTS,
    Found,
    Loaded,
    MessageReader,
    Registered,
    Request,
    Saved,
    encode,
)
from tests.integration.tiny_store import (
    DEADLINE_S,
    IDENTITY,
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

Clients = Callable[..., StoreClient]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app" / "cache.sock"


@pytest.fixture
def clients(path: Path) -> Iterator[Clients]:
    made: list[StoreClient] = []

    def make(register: Any = None, **options: Any) -> StoreClient:
        made.append(StoreClient(path, register or worker(), **options))
        return made[-1]

    yield make
    for client in made:
        client.check_integrity()
        client.close()


class Server:
    """A tiny store behind a socket whose loads and saves can be held up."""

    def __init__(self, path: Path, parts: range = range(8)) -> None:
        self.store = TinyStore(parts)
        self.thread = ServerThread(lambda: self.store, path)

    def hold(self) -> Callable[[], None]:
        """Gives what lets loads and saves go on. Those that are asked after that do not wait."""
        gate = self.thread.call(asyncio.Event)

        async def wait() -> None:
            await gate.wait()

        self.store.pause = wait
        return lambda: self.thread.call(gate.set)

    def close(self) -> None:
        self.thread.close(drain_s=0.05)


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    server = Server(path)
    yield server
    server.close()


def ready(client: StoreClient) -> StoreClient:
    assert client.wait_alive(DEADLINE_S)
    return client


def slot_of(client: StoreClient) -> Slot:
    slot = client.take_slot()
    assert slot is not None
    return slot


def failure(future: Future[Any]) -> type[BaseException]:
    return type(future.exception(DEADLINE_S))


# What it is for


def test_look_ups_loads_saves_and_leases(server: Server, clients: Clients) -> None:
    client = ready(clients())
    assert (client.alive, client.node) == (True, "node")
    slot = slot_of(client)
    slot.view[:] = payload_of(9)
    assert client.save(header_of(9), slot).result(DEADLINE_S).outcome == "stored"
    slot.view[:] = bytes(SLOT_BYTES)
    loaded = client.load(key_of(9), slot).result(DEADLINE_S)
    assert (loaded.outcome, loaded.tier) == ("loaded", DRAM)
    assert loaded.header is not None
    verify(loaded.header, slot.view, key=key_of(9), identity=IDENTITY, rank=0, world_size=1)
    slot.release()
    found = client.lookup(key_of(9) + key_of(99), 1).result(DEADLINE_S)
    assert found.tiers == bytes([DRAM, 0])
    assert len(server.store.leases) == 1
    client.release(found.lease)
    client.release(found.lease)
    client.corrupt(key_of(9), DRAM)
    wait_until(lambda: server.store.corrupted == [key_of(9)], "the report has come")
    assert server.store.leases == set()
    assert client.stats().free_slots == 4


def test_a_slot_is_one_callers_until_released(server: Server, clients: Clients) -> None:
    client = ready(clients())
    slots = [slot_of(client) for _ in range(4)]
    assert client.take_slot() is None
    assert len({slot.index for slot in slots}) == 4
    slots[2].release()
    slots[2].release()
    again = slot_of(client)
    assert again.index == slots[2].index
    assert client.take_slot() is None
    with pytest.raises(ValueError, match="released"):
        client.load(key_of(1), slots[2])
    with pytest.raises(ValueError, match="released"):
        slots[2].view[0]
    again.release()
    client.check_integrity()


def test_a_slot_serves_one_request_at_a_time(server: Server, clients: Clients) -> None:
    client = ready(clients())
    go_on = server.hold()
    slot = slot_of(client)
    first = client.load(key_of(1), slot)
    with pytest.raises(ValueError, match="in use"):
        client.load(key_of(2), slot)
    go_on()
    assert first.result(DEADLINE_S).outcome == "loaded"
    assert client.load(key_of(2), slot).result(DEADLINE_S).outcome == "loaded"
    slot.release()


def test_a_slot_released_early_is_free_only_when_the_store_has_answered(
    server: Server, clients: Clients
) -> None:
    client = ready(clients(worker(slots=1)))
    go_on = server.hold()
    slot = slot_of(client)
    loading = client.load(key_of(1), slot)
    slot.release()
    assert client.take_slot() is None
    go_on()
    loading.result(DEADLINE_S)
    assert client.take_slot() is not None


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, slot: client.load(b"short", slot),
        lambda client, slot: client.load(key_of(1), slot, 0.0),
        lambda client, slot: client.load(key_of(1), slot, float("nan")),
        lambda client, slot: client.save(header_of(1, SLOT_BYTES + 1), slot),
        lambda client, slot: client.lookup(b"short", 1),
        lambda client, slot: client.lookup(key_of(1), 1, lease_s=-1.0),
    ],
    ids=["key", "no time", "no number", "payload", "keys", "lease"],
)
def test_what_the_store_would_end_the_connection_for_is_not_sent(
    server: Server, clients: Clients, ask: Callable[[StoreClient, Slot], object]
) -> None:
    client = ready(clients())
    slot = slot_of(client)
    with pytest.raises(ValueError, match="needed"):
        ask(client, slot)
    assert client.load(key_of(1), slot).result(DEADLINE_S).outcome == "loaded"
    assert client.stats().sessions == 1


def test_too_many_open_requests_are_refused_here(server: Server, clients: Clients) -> None:
    client = ready(clients(worker(slots=MAX_OPEN_REQUESTS + 1, slot_bytes=1)))
    go_on = server.hold()
    server.store.parts.clear()
    slots = [slot_of(client) for _ in range(MAX_OPEN_REQUESTS + 1)]
    futures = [client.load(key_of(1), slot) for slot in slots]
    assert failure(futures.pop()) is StoreUnavailable
    go_on()
    assert {future.result(DEADLINE_S).outcome for future in futures} == {"missing"}
    assert client.stats().sessions == 1


# When the store is slow


def test_an_answer_after_the_limit_costs_the_request_but_not_the_connection(
    server: Server, clients: Clients
) -> None:
    client = ready(clients(worker(slots=1), patience_s=DEADLINE_S))
    go_on = server.hold()
    slot = slot_of(client)
    assert failure(client.load(key_of(1), slot, 0.01)) is StoreTimeout
    slot.release()
    assert client.take_slot() is None, "the store may still write there"
    go_on()
    wait_until(lambda: client.stats().free_slots == 1, "the late answer gives the slot back")
    assert (client.stats().sessions, client.stats().timeouts) == (1, 1)


def test_what_the_store_writes_after_it_was_given_up_reaches_no_later_load(
    server: Server, clients: Clients
) -> None:
    client = ready(clients(worker(slots=1), patience_s=0.01))
    go_on = server.hold()
    given_up = slot_of(client)
    assert failure(client.load(key_of(1), given_up, 0.01)) is StoreTimeout
    given_up.release()
    wait_until(lambda: client.stats().sessions == 2, "another connection")
    server.store.pause = None
    slot = slot_of(client)
    assert slot.area is not given_up.area
    assert client.load(key_of(2), slot).result(DEADLINE_S).outcome == "loaded"
    go_on()
    wait_until(lambda: server.thread.stats().open_requests == 0, "the store has written at last")
    assert bytes(slot.view) == payload_of(2)
    assert client.stats().areas == 1
    slot.release()


def test_a_late_look_up_leaves_no_lease(path: Path, clients: Clients) -> None:
    with Script(path) as script:
        client = clients(scheduler(), patience_s=DEADLINE_S)
        script.accept()
        ready(client)
        assert failure(client.lookup(key_of(1), 1, limit_s=0.01)) is StoreTimeout
        (asked,) = script.read(1)
        script.send(Found(asked.id, b"\x01", 1, 77))  # type: ignore[union-attr]
        (release,) = script.read(1)
        assert release.lease == 77  # type: ignore[union-attr]


def test_a_stopped_store_costs_time_limits_and_then_works_again(path: Path, clients: Clients) -> None:
    with StoreProcess(path) as process:
        client = ready(clients(patience_s=0.05))
        process.send_signal(signal.SIGSTOP)
        slots = [slot_of(client) for _ in range(3)]
        futures = [client.load(key_of(i), slot, 0.05) for i, slot in enumerate(slots)]
        assert failure(futures[0]) is StoreTimeout
        assert {failure(future) for future in futures} <= {StoreTimeout, StoreUnavailable}
        wait_until(lambda: not client.alive, "the connection is given up")
        assert failure(client.load(key_of(1), slots[0])) is StoreUnavailable
        assert failure(client.lookup(key_of(1), 1)) is StoreUnavailable
        assert client.take_slot() is None
        for slot in slots:
            slot.release()
        process.send_signal(signal.SIGCONT)
        ready(client)
        slot = slot_of(client)
        assert client.load(key_of(1), slot).result(DEADLINE_S).outcome == "loaded"
        assert bytes(slot.view) == payload_of(1)
        slot.release()
        wait_until(lambda: client.stats().areas == 1, "old areas are gone")


# When the store goes


def test_a_client_waits_for_a_store_that_is_not_there_yet(path: Path, clients: Clients) -> None:
    client = clients()
    assert not client.alive
    assert client.take_slot() is None
    assert failure(client.lookup(key_of(1), 1)) is StoreUnavailable
    client.release(1)
    client.corrupt(key_of(1), DRAM)
    server = Server(path)
    ready(client)
    server.close()


def test_a_killed_store_fails_what_is_open_at_once_and_is_found_again(path: Path, clients: Clients) -> None:
    with StoreProcess(path) as process:
        client = ready(clients())
        process.send_signal(signal.SIGSTOP)
        slot = slot_of(client)
        future = client.load(key_of(1), slot, 3000.0)
        looking = client.lookup(key_of(1), 1, limit_s=3000.0)
        process.kill()
        assert failure(future) is StoreUnavailable
        assert failure(looking) is StoreUnavailable
    assert path.exists(), "a dead server leaves its socket"
    with StoreProcess(path):
        wait_until(lambda: client.stats().sessions == 2, "another connection")
        assert failure(client.load(key_of(1), slot)) is StoreUnavailable, "its slot is of the old one"
        slot.release()
        slot = slot_of(client)
        assert client.load(key_of(1), slot).result(DEADLINE_S).outcome == "loaded"
        slot.release()


def test_a_lease_of_an_earlier_connection_is_never_taken_for_one_of_now(
    server: Server, clients: Clients, path: Path
) -> None:
    client = ready(clients(scheduler()))
    before = client.lookup(key_of(1), 1).result(DEADLINE_S)
    server.close()
    wait_until(lambda: not client.alive, "the connection has ended")
    again = Server(path)
    ready(client)
    now = client.lookup(key_of(1), 1).result(DEADLINE_S)
    client.release(before.lease)
    client.lookup(b"", 1).result(DEADLINE_S)
    assert again.store.leases == {1}
    client.release(now.lease)
    client.lookup(b"", 1).result(DEADLINE_S)
    assert again.store.leases == set()
    again.close()


def test_memory_is_prepared_once_and_given_back_when_the_last_slot_has_come(
    path: Path, clients: Clients
) -> None:
    prepared: list[StagingArea] = []
    undone: list[StagingArea] = []

    def prepare(area: StagingArea) -> Callable[[], None]:
        prepared.append(area)
        return lambda: undone.append(area)

    server = Server(path)
    client = ready(clients(prepare=prepare))
    slots = [slot_of(client), slot_of(client)]
    assert [slot.area for slot in slots] == prepared * 2
    server.close()
    wait_until(lambda: not client.alive, "the connection has ended")
    slots[0].release()
    slots[1].view[:5] = b"still"
    assert undone == []
    slots[1].release()
    assert undone == prepared
    server = Server(path)
    ready(client)
    assert len(prepared) == 2
    client.close()
    assert undone == prepared
    server.close()


def test_memory_that_cannot_be_prepared_is_used_as_it_is(server: Server, clients: Clients) -> None:
    def prepare(area: StagingArea) -> Callable[[], None]:
        raise RuntimeError("no GPU")

    client = ready(clients(prepare=prepare))
    slot = slot_of(client)
    assert client.load(key_of(1), slot).result(DEADLINE_S).outcome == "loaded"


# When what answers is no store


class Script:
    """A server whose every message the test writes itself."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    def accept(self, register: bool = True) -> None:
        self._socket, _ = self._listener.accept()
        self._socket.settimeout(DEADLINE_S)
        self._reader: MessageReader[Request] = MessageReader(Request)
        self._messages: list[Request] = []
        if register:
            self.read(1)
            self.send(Registered("node"))

    def read(self, count: int) -> list[Request]:
        while len(self._messages) < count:
            data = self._socket.recv(65536)
            assert data, "the client left"
            self._messages += self._reader.feed(data)
        taken, self._messages = self._messages[:count], self._messages[count:]
        return taken

    def send(self, *answers: Any) -> None:
        self._socket.sendall(b"".join(a if isinstance(a, bytes) else encode(a) for a in answers))

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda id: b"\x03\x00\x00\x00abc",
        lambda id: b"\xff\xff\xff\xff",
        lambda id: Loaded(id + 1, "missing"),
        lambda id: Saved(id, "stored"),
        lambda id: Found(id, b"\x01", 1, 0),
        lambda id: Registered("again"),
        lambda id: Loaded(id, "loaded", DRAM),
        lambda id: Loaded(id, "missing", DRAM, header_of(1)),
        lambda id: Loaded(id, "loaded", DRAM, header_of(1, SLOT_BYTES + 1)),
    ],
    ids=[
        "garbage",
        "endless",
        "of another request",
        "of another kind",
        "found",
        "registered",
        "no header",
        "a header without bytes",
        "longer than the slot",
    ],
)
def test_an_answer_that_cannot_be_ends_the_connection_and_its_memory(
    path: Path, clients: Clients, answer: Callable[[int], Any]
) -> None:
    with Script(path) as script:
        client = clients()
        script.accept()
        ready(client)
        slot = slot_of(client)
        future = client.load(key_of(1), slot)
        (load,) = script.read(1)
        script.send(answer(load.id))  # type: ignore[union-attr]
        assert failure(future) is StoreUnavailable
        slot.release()
        script.accept()
        ready(client)
        assert slot_of(client).area is not slot.area


def test_a_look_up_answered_for_other_keys_ends_the_connection(path: Path, clients: Clients) -> None:
    with Script(path) as script:
        client = clients(scheduler())
        script.accept()
        future = ready(client).lookup(key_of(1) + key_of(2), 1)
        (lookup,) = script.read(1)
        script.send(Found(lookup.id, b"\x01", 1, 0))  # type: ignore[union-attr]
        assert failure(future) is StoreUnavailable


def test_a_store_that_does_not_read_makes_no_caller_wait(
    path: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_session, "_MAX_UNSENT_BYTES", 256 * 1024)
    with Script(path) as script:
        client = clients(scheduler())
        script.accept()
        ready(client)
        keys = bytes(32 * 2000)
        futures = [client.lookup(keys, 1, limit_s=600.0) for _ in range(50)]
        refused = [future for future in futures if future.done()]
        assert {failure(future) for future in refused} == {StoreUnavailable}
        sent = [future for future in futures if not future.done()]
        assert refused
        assert sent
        asked = script.read(len(sent))
        script.send(*(Found(lookup.id, bytes(2000), 0, 0) for lookup in asked))  # type: ignore[union-attr]
        assert {future.result(DEADLINE_S).tiers for future in sent} == {bytes(2000)}


# The end


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


def test_closing_fails_what_is_open_and_can_be_done_twice(server: Server, clients: Clients) -> None:
    before = set(threading.enumerate())
    client = ready(clients())
    server.hold()
    slot = slot_of(client)
    future = client.load(key_of(1), slot)
    client.close()
    client.close()
    assert failure(future) is StoreUnavailable
    assert failure(client.load(key_of(1), slot)) is StoreUnavailable
    slot.release()
    assert client.stats().areas == 0
    assert not new_threads(before)


def test_closing_does_not_wait_for_a_store_that_answers_no_registration(path: Path, clients: Clients) -> None:
    with Script(path) as script:
        before = set(threading.enumerate())
        client = clients()
        script.accept(register=False)
        script.read(1)
        client.close(DEADLINE_S)
        assert not new_threads(before)


def test_a_callback_may_use_and_close_the_client(server: Server, clients: Clients) -> None:
    client = ready(clients())
    slot = slot_of(client)
    done = threading.Event()

    def then(future: Future[Loaded]) -> None:
        slot.release()
        client.lookup(key_of(1), 1)
        client.close()
        done.set()

    client.load(key_of(1), slot).add_done_callback(then)
    assert done.wait(DEADLINE_S)
    wait_until(lambda: client.stats().areas == 0, "the thread has ended")


def test_a_forked_child_has_no_connection_and_its_parent_keeps_it(server: Server, clients: Clients) -> None:
    client = ready(clients())
    slot = slot_of(client)
    child = os.fork()
    if not child:
        outcome = 1
        try:
            dead = (
                not client.alive
                and client.take_slot() is None
                and type(client.lookup(key_of(1), 1).exception(1)) is StoreUnavailable
                and type(client.load(key_of(1), slot).exception(1)) is StoreUnavailable
            )
            slot.release()
            client.close()
            outcome = 0 if dead else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.load(key_of(1), slot).result(DEADLINE_S).outcome == "loaded"
    assert bytes(slot.view) == payload_of(1)
    slot.release()
    assert client.stats().sessions == 1
    assert server.thread.stats().connections == 1


# Everything at once


def test_random_delays_failures_and_deaths_never_give_wrong_bytes_or_lose_a_slot(
    path: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.02)
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    chunks, workers, servers = 24, 6, 8

    async def dawdle() -> None:
        dice = chance.random()
        if dice < 0.02:
            raise RuntimeError("broken")
        await asyncio.sleep(0.15 if dice < 0.05 else 0.002 * dice)

    def start() -> Server:
        server = Server(path, range(chunks // 2))
        server.store.pause = dawdle
        return server

    client = clients(worker(slots=workers - 2), patience_s=0.03)
    outcomes: dict[str, int] = {}
    over = threading.Event()

    def work(number: int) -> None:
        dice = random.Random(seed + number)
        while not over.is_set():
            slot = client.take_slot()
            if slot is None:
                time.sleep(0.001)
                continue
            chunk = dice.randrange(chunks)
            outcome = one_save(slot, chunk) if dice.random() < 0.3 else one_load(slot, chunk, dice)
            slot.release()
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def one_save(slot: Slot, chunk: int) -> str:
        slot.view[:] = payload_of(chunk)
        try:
            return client.save(header_of(chunk), slot, 0.05).result(DEADLINE_S).outcome
        except (StoreTimeout, StoreUnavailable) as error:
            return type(error).__name__

    def one_load(slot: Slot, chunk: int, dice: random.Random) -> str:
        slot.view[:] = bytes(SLOT_BYTES)
        try:
            loaded = client.load(key_of(chunk), slot, 0.05).result(DEADLINE_S)
        except (StoreTimeout, StoreUnavailable) as error:
            return type(error).__name__
        for _ in range(3):
            if loaded.outcome == "loaded":
                assert bytes(slot.view) == payload_of(chunk), f"wrong bytes of chunk {chunk}"
            time.sleep(dice.random() * 0.005)
        return loaded.outcome

    def reign() -> None:
        for _ in range(servers):
            server = start()
            over.wait(0.1 + 0.3 * chance.random())
            server.close()

    with ThreadPoolExecutor(workers + 1) as pool:
        deaths = pool.submit(reign)
        working = [pool.submit(work, number) for number in range(workers)]
        try:
            deaths.result(6 * DEADLINE_S)
        finally:
            over.set()
        for future in working:
            future.result(DEADLINE_S)

    server = start()
    server.store.pause = None
    ready(client)
    wait_until(lambda: client.stats().free_slots == workers - 2, "all slots are free")
    wait_until(lambda: client.stats().areas == 1, "old areas are gone")
    client.check_integrity()
    assert client.stats().open_requests == 0
    assert server.thread.stats().open_requests == 0
    assert outcomes.get("loaded", 0) > 0
    assert outcomes.get("StoreUnavailable", 0) + outcomes.get("StoreTimeout", 0) > 0
    server.close()


class StoreProcess:
    """A tiny store in a process that can be stopped and killed."""

    def __init__(self, path: Path) -> None:
        program = (
            "import sys; from pathlib import Path\n"
            "from tests.integration.tiny_store import ServerThread, TinyStore\n"
            "thread = ServerThread(lambda: TinyStore(range(8)), Path(sys.argv[1]))\n"
            "print('ready', flush=True)\n"
            "sys.stdin.read(); thread.close()\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.send_signal = self._process.send_signal

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)
