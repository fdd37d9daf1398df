"""The simulated way of KV from one engine to another: nothing moves, but who has what and how long it takes is kept.

Engines of one process know each other. Of one in another process on this machine only whether that still runs is
known, and of one elsewhere nothing; what such an engine has handed over is taken to be there.
"""

from __future__ import annotations

import os
import socket
import uuid
from typing import Protocol
from weakref import WeakValueDictionary

import psutil

from cache_store.keys import EngineIdentity
from workers.handover import Handover
from workers.transfer import KVLayout, Transfer


class Keeper(Protocol):
    def keeps(self, name: str) -> bool:
        """Whether the KV of a hand-over is still there."""


_here: WeakValueDictionary[str, Keeper] = WeakValueDictionary()


def engine_id() -> str:
    """Another one with every call."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"


def appear(engine: str, keeper: Keeper) -> None:
    """`keeper` is that engine until it disappears."""
    _here[engine] = keeper


def disappear(engine: str) -> None:
    """Safe to call twice."""
    _here.pop(engine, None)


def is_there(handover: Handover) -> bool:
    """Whether the KV can be fetched."""
    host, _, rest = handover.engine.rpartition("/")[0].partition("/")
    if host != socket.gethostname():
        return True
    if rest != str(os.getpid()):
        return rest.isdigit() and psutil.pid_exists(int(rest))
    keeper = _here.get(handover.engine)
    return keeper is not None and keeper.keeps(handover.name)


def sim_transfer(engine: str, identity: EngineIdentity) -> Transfer:
    return Transfer("sim", engine, KVLayout.of(identity, "sim"))
