"""A cluster's pages under /admin, asked over HTTP."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

import msgspec

from cluster.config import ClusterConfig, ConfigError
from cluster.state import ClusterState

KEY = "MANTA_ADMIN_KEY"
"""Variable with the admin key, for a cluster whose configuration is not here."""


class AdminError(RuntimeError):
    """The cluster refused, or did not answer. The message is for the person who asked."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Of the HTTP answer; None where there was none."""


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class Admin:
    """The admin pages of the cluster at an endpoint."""

    def __init__(self, endpoint: str, key: str = "", timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, cluster: ClusterState) -> Admin:
        return cls(cluster.endpoint, admin_key(cluster.config))

    @classmethod
    def at(cls, endpoint: str) -> Admin:
        """A cluster that this machine keeps no state of."""
        return cls(endpoint, os.environ.get(KEY, ""))

    def ask(self, path: str, body: object = None) -> bytes:
        """GET, or POST of `body` as JSON. Raises AdminError."""
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.endpoint + path, data, {"content-type": "application/json"})
        if self._key:
            request.add_header("authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            said = message_of(error.read(64 * 1024))
            raise AdminError(f"{request.full_url} answered {error.code}: {said}", error.code) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(f"{request.full_url} does not answer: {reason}") from error


def admin_key(config_path: str) -> str:
    """Empty where the configuration has none, or has gone since the start."""
    try:
        key = ClusterConfig.load(config_path).router.admin_key
    except ConfigError:
        return ""
    return os.environ.get(key.removeprefix("env:"), "") if key.startswith("env:") else key


def message_of(body: bytes) -> str:
    """Of an answer that is an error, in whatever form it came."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace").strip()
