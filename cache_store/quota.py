"""How many bytes of a tier each tenant may have."""

from __future__ import annotations

from collections.abc import Mapping


class Quotas:
    """Bytes in use by tenant, and what their limits leave.

    The tenant "" stands for nobody: it has no limit. Charging does not ask for room, because bytes that are there
    count whatever the limit is; ask `room` before making more.
    """

    def __init__(self, limits: Mapping[str, int], default: int | None = None) -> None:
        """`limits` in bytes; `default` for tenants that it does not name, None for no limit."""
        self._limits = dict(limits)
        self._default = default
        self._used: dict[str, int] = {}

    def limit(self, tenant: str) -> int | None:
        """Bytes; None for no limit."""
        return self._limits.get(tenant, self._default) if tenant else None

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def usage(self) -> dict[str, int]:
        """Bytes by tenant, of those that have any."""
        return dict(self._used)

    def room(self, tenant: str, nbytes: int) -> bool:
        """Whether a tenant may have so many bytes more."""
        limit = self.limit(tenant)
        return limit is None or self.used(tenant) + nbytes <= limit

    def charge(self, tenant: str, nbytes: int) -> None:
        assert nbytes >= 0, nbytes
        self._set(tenant, self.used(tenant) + nbytes)

    def credit(self, tenant: str, nbytes: int) -> None:
        """Bytes that were charged are gone. Raises ValueError for more than the tenant has; nothing changes."""
        assert nbytes >= 0, nbytes
        if nbytes > self.used(tenant):
            raise ValueError(f"{nbytes} bytes less for tenant {tenant!r}, who has {self.used(tenant)}")
        self._set(tenant, self.used(tenant) - nbytes)

    def _set(self, tenant: str, used: int) -> None:
        # Tenants come and go: one that has nothing leaves nothing behind.
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        assert all(used > 0 for used in self._used.values()), self._used
