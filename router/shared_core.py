"""The router that lives in this process, for Serve's request routers, which Serve makes by itself and elsewhere.

Serve may run a request router in a thread of its own; the core belongs to the loop that made it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.core import RouterCore
    from router.remote_choice import RemoteChoices


DEPLOYMENT = "router"
"""Name of the router's deployment in its Serve application."""


class SharedCore(NamedTuple):
    core: RouterCore
    loop: asyncio.AbstractEventLoop
    choices: RemoteChoices


_shared: dict[str, SharedCore] = {}


def share(app: str, core: RouterCore, loop: asyncio.AbstractEventLoop, choices: RemoteChoices) -> None:
    """Make this the process's router of a Serve application."""
    _shared[app] = SharedCore(core, loop, choices)


def shared(app: str) -> SharedCore | None:
    return _shared.get(app)
