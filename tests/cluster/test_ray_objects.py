"""Payloads in a real Ray object store: the contract, who owns them, and when their memory is free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from cache_store.object_space import ObjectGone, ObjectSpace
from cache_store.ray_objects import RayObjectSpace
from cluster.state import ClusterState
from tests.object_space_kit import CONTRACT, payload

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_head")]


@ray.remote(num_cpus=0)
class Neighbour:
    """Another node's actor, which puts, lends and borrows as a store does."""

    def __init__(self) -> None:
        self.space = RayObjectSpace()
        self.held: Any = None

    def put(self) -> list[Any]:
        self.held = self.space.put(memoryview(payload()))
        return [self.held.ref]

    def borrow(self, refs: list[Any]) -> bool:
        self.held = self.space.pull(refs[0], 30.0)
        return bool(self.held.view == payload())

    def free(self) -> None:
        self.held.free()
        self.held = None

    def lingering(self) -> int:
        return self.space.lingering()


@pytest.fixture
def neighbour(ray_head: ClusterState) -> Any:
    actor = Neighbour.remote()  # type: ignore[attr-defined]
    yield actor
    ray.kill(actor)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_ray(promise: Callable[[ObjectSpace], None]) -> None:
    promise(RayObjectSpace())


def test_bytes_that_another_process_borrowed_count_until_it_has_let_go(neighbour: Any) -> None:
    space = RayObjectSpace()
    held = space.put(memoryview(payload()))
    assert ray.get(neighbour.borrow.remote([held.ref]), timeout=60)
    held.free()
    assert space.lingering() == len(payload())
    ray.get(neighbour.free.remote(), timeout=60)
    wait_until(lambda: space.lingering() == 0)


def test_a_part_of_another_process_is_pulled_and_gone_with_its_owner(neighbour: Any) -> None:
    space = RayObjectSpace()
    (ref,) = ray.get(neighbour.put.remote(), timeout=60)
    pulled = space.pull(ref, 30.0)
    assert pulled.view == payload()
    pulled.free()

    ray.kill(neighbour)

    def gone() -> bool:
        try:
            space.pull(ref, 1.0).free()
        except ObjectGone:
            return True
        except TimeoutError:
            pass
        return False

    wait_until(gone)


def test_waiting_for_an_object_has_a_limit() -> None:
    @ray.remote(num_cpus=0)
    def never() -> None:
        import threading

        threading.Event().wait()

    ref = never.remote()
    with pytest.raises(TimeoutError):
        RayObjectSpace().pull(ref, 0.1)
    ray.cancel(ref, force=True)


def test_what_is_no_payload_is_gone() -> None:
    space = RayObjectSpace()
    with pytest.raises(ObjectGone):
        space.pull(ray.put({"not": "a payload"}), 10.0)
    with pytest.raises(ObjectGone):
        space.pull("not a ref", 10.0)
