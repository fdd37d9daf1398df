"""Quotas: bytes by tenant, and what their limits leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.quota import Quotas

TENANTS = ("", "acme", "globex", "initech")


def test_a_tenant_has_room_up_to_its_limit_and_not_beyond() -> None:
    quotas = Quotas({"acme": 100})
    quotas.charge("acme", 60)
    assert quotas.room("acme", 40)
    assert not quotas.room("acme", 41)
    quotas.credit("acme", 1)
    assert quotas.room("acme", 41)


def test_the_default_is_for_tenants_without_a_limit_of_their_own() -> None:
    quotas = Quotas({"acme": 100}, default=10)
    assert [quotas.limit(tenant) for tenant in ("acme", "globex")] == [100, 10]
    assert not quotas.room("globex", 11)
    assert Quotas({"acme": 100}).limit("globex") is None
    assert Quotas({"acme": 100}).room("globex", 2**60)


def test_nobody_has_no_limit_and_is_counted() -> None:
    quotas = Quotas({}, default=10)
    quotas.charge("", 1_000)
    assert quotas.limit("") is None
    assert quotas.room("", 1_000)
    assert quotas.used("") == 1_000


def test_a_limit_of_zero_leaves_no_room() -> None:
    assert not Quotas({"acme": 0}, default=10).room("acme", 1)


def test_bytes_that_are_there_count_over_the_limit_too() -> None:
    quotas = Quotas({"acme": 10})
    quotas.charge("acme", 15)
    assert quotas.used("acme") == 15
    assert not quotas.room("acme", 0)


def test_what_was_never_charged_can_not_be_given_back() -> None:
    quotas = Quotas({})
    quotas.charge("acme", 5)
    with pytest.raises(ValueError, match="6 bytes less for tenant 'acme', who has 5"):
        quotas.credit("acme", 6)
    with pytest.raises(ValueError, match="'globex', who has 0"):
        quotas.credit("globex", 1)
    assert quotas.usage() == {"acme": 5}


@given(
    changes=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-20, 20)), max_size=60),
    nbytes=st.integers(0, 50),
)
def test_any_changes_leave_the_sum_of_what_was_charged(changes: list[tuple[str, int]], nbytes: int) -> None:
    limits = {"acme": 30, "globex": 0}
    quotas, model = Quotas(limits, default=20), dict.fromkeys(TENANTS, 0)
    for tenant, change in changes:
        if change >= 0:
            quotas.charge(tenant, change)
        elif model[tenant] + change >= 0:
            quotas.credit(tenant, -change)
        else:
            continue
        model[tenant] += change
        quotas.check_integrity()
    assert quotas.usage() == {tenant: used for tenant, used in model.items() if used}
    for tenant in TENANTS:
        limit = limits.get(tenant, 20)
        assert quotas.used(tenant) == model[tenant]
        assert quotas.room(tenant, nbytes) == (not tenant or model[tenant] + nbytes <= limit)
