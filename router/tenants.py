"""Who a caller is, and the salt that keeps one tenant's KV apart from another's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from blake3 import blake3

from router import errors
from router.config import TenantConfig

_ENV_PREFIX = "env:"
_SALT_CONTEXT = "manta.router.tenants cache salt v1"


class TenantError(ValueError):
    """Keys that can't be used. The message names the field, what was found and what is needed."""


def resolve_key(value: str, field: str, env: Mapping[str, str]) -> str:
    """The key itself, or for `env:NAME` the variable's value. Raises TenantError when that is empty."""
    if not value.startswith(_ENV_PREFIX):
        if not value:
            raise TenantError(f"{field}: found an empty key; needed: a key or env:NAME")
        return value
    name = value.removeprefix(_ENV_PREFIX)
    resolved = env.get(name, "")
    if not resolved:
        state = "empty" if name in env else "not set"
        raise TenantError(f"{field}: found {value}, but the variable {name} is {state}")
    return resolved


class ApiKeys:
    """Key -> owner. Holds digests only, and compares every one of them whatever it is shown."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        """`keys`: pairs of key and owner. Raises TenantError for a key of two owners."""
        self._owners: dict[bytes, str] = {}
        for key, owner in keys:
            other = self._owners.setdefault(_digest(key.encode()), owner)
            if other != owner:
                raise TenantError(f"{other} and {owner} have a key in common; needed: keys of their own")

    def owner(self, authorization: bytes | None, x_api_key: bytes | None = None) -> str | None:
        """Of the key in `Authorization: Bearer KEY`, or in `x-api-key` as Anthropic's clients send it."""
        presented = _bearer(authorization) or x_api_key
        if not presented:
            return None
        digest, found = _digest(presented), None
        for known, owner in self._owners.items():
            if hmac.compare_digest(known, digest):
                found = owner
        return found


class Tenants:
    """The tenants of a configuration. With none, every caller is the one tenant, whose name is empty."""

    def __init__(self, tenants: Mapping[str, TenantConfig], env: Mapping[str, str]) -> None:
        """`env`: where `env:NAME` is looked up. Raises TenantError."""
        self._names = tuple(tenants)
        self._keys = ApiKeys(
            (resolve_key(key, f"router.tenants.{name}.api_keys.{number}", env), name)
            for name, tenant in tenants.items()
            for number, key in enumerate(tenant.api_keys)
        )

    def authenticate(self, authorization: bytes | None, x_api_key: bytes | None = None) -> str:
        """Name of the caller's tenant, from the request's headers. Raises ApiError 401."""
        if not self._names:
            return ""
        if not authorization and not x_api_key:
            raise errors.unauthorized("No API key: send it as `Authorization: Bearer KEY`.")
        tenant = self._keys.owner(authorization, x_api_key)
        if tenant is None:
            raise errors.unauthorized(
                "The API key is not known here: send a valid one as `Authorization: Bearer KEY`."
            )
        return tenant


def salt(tenant: str, client_salt: str | None, cluster_secret: str) -> str:
    """Cache salt for the KV namespace: 64 hex digits, or empty for the one tenant without a salt of its own.

    A client's salt separates further inside its tenant; as only a digest of both gets out, no client can name
    another tenant's salt. Raises ValueError for an empty secret, with which anyone could.
    """
    if not tenant and not client_salt:
        return ""
    if not cluster_secret:
        raise ValueError("the cluster's secret is empty; needed: a random one, to derive cache salts from")
    key = blake3(cluster_secret.encode(), derive_key_context=_SALT_CONTEXT).digest()
    hasher = blake3(key=key)
    for part in (tenant, client_salt or ""):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, value = (authorization or b"").partition(b" ")
    return value.strip() if scheme.lower() == b"bearer" else b""
