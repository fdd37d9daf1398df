"""The addresses that a cluster tells about itself, wherever in its answers they stand."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import Any

_AT = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):\d{1,5}(?:/.*)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(?:[:/].*)?")


def published_addresses(admin_json: Any) -> list[str]:
    """Every URL, host:port and IP address in the values of an answer of `/admin/...`, as it stands there."""
    return [text for text in _texts(admin_json) if host_of(text) is not None]


def on_this_machine_only(addresses: Iterable[str]) -> list[str]:
    """Those that lead another host to itself or nowhere: loopback names and addresses, and the unspecified one."""
    return [address for address in addresses if _leads_nowhere(host_of(address) or "")]


def host_of(text: str) -> str | None:
    """The host in an address; None for a text that is none."""
    found = _AT.fullmatch(text) or _URL.fullmatch(text)
    if found is not None:
        return found[1].strip("[]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _leads_nowhere(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.startswith("localhost.")
    return address.is_loopback or address.is_unspecified
