"""Prints where each node's cache of an application says that it is. Runs on a host of its Ray.

python cache_addresses.py APPLICATION
"""

from __future__ import annotations

import sys

import msgspec
import ray
from ray.util import list_named_actors

from cache_store.cache_messages import CacheInfo
from cache_store.node_actor import NAMESPACE, node_of

PREFIX = "cache:"
"""Of the lines that are meant; Ray writes others between them."""


def main() -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    for named in list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and node_of(sys.argv[1], named["name"]) is not None:
            info, _ = ray.get(ray.get_actor(named["name"], NAMESPACE).describe.remote(), timeout=30)
            print(PREFIX, msgspec.convert(info, CacheInfo).address)


if __name__ == "__main__":
    main()
