"""The cluster's secret: what a router shows to a replica."""

from __future__ import annotations

import os
import secrets

VARIABLE = "MANTA_SECRET"
_KV_KEY = b"manta/cluster-secret"


class SecretError(ValueError):
    """A secret that can't protect anything."""


def cluster_secret() -> str:
    """`MANTA_SECRET` where it is set; else one that the first caller makes and keeps in Ray's own key-value store.

    Whoever can read that store can run code in the cluster anyway. Needs a connection to Ray. Raises SecretError for
    a variable that is too short to be a secret.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        if len(given) < 16:
            raise SecretError(f"{VARIABLE} has {len(given)} characters; needed: 16 or more")
        return given
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_KV_KEY, secrets.token_urlsafe(32).encode(), overwrite=False)
    stored: bytes = internal_kv._internal_kv_get(_KV_KEY)
    return stored.decode()
