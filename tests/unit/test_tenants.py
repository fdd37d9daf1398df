"""Tenants: a key names its owner, and no caller can get at another tenant's KV."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import TenantConfig
from router.errors import ApiError
from router.tenants import ApiKeys, TenantError, Tenants, resolve_key, salt

SECRET = "cluster-secret"
TENANTS = Tenants(
    {"red": TenantConfig(api_keys=("red-1", "env:RED_KEY")), "blue": TenantConfig(api_keys=("blue-1",))},
    env={"RED_KEY": "red-2"},
)


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [(b"Bearer red-1", "red"), (b"Bearer red-2", "red"), (b"bearer  blue-1 ", "blue")],
)
def test_a_key_names_its_tenant(authorization: bytes, tenant: str) -> None:
    assert TENANTS.authenticate(authorization) == tenant


def test_anthropics_clients_send_their_key_in_a_header_of_its_own() -> None:
    assert TENANTS.authenticate(None, x_api_key=b"blue-1") == "blue"


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer red",
        b"Bearer red-1x",
        b"Basic red-1",
        b"red-1",
        b"Bearer env:RED_KEY",
        b"Bearer \xff\xfe",
    ],
)
def test_anything_else_is_a_401_in_openais_shape(authorization: bytes | None) -> None:
    with pytest.raises(ApiError) as refused:
        TENANTS.authenticate(authorization)
    assert refused.value.status == 401
    assert b'"type":"AuthenticationError"' in refused.value.body()
    assert b"www-authenticate" in dict(refused.value.headers())


def test_without_tenants_every_caller_is_the_one_tenant() -> None:
    nobody = Tenants({}, env={})
    assert nobody.authenticate(None) == ""
    assert nobody.authenticate(b"Bearer whatever") == ""


def test_a_tenant_without_keys_lets_nobody_in() -> None:
    closed = Tenants({"red": TenantConfig()}, env={})
    with pytest.raises(ApiError):
        closed.authenticate(b"Bearer x")
    with pytest.raises(ApiError):
        closed.authenticate(None)


@pytest.mark.parametrize(
    ("value", "env", "message"),
    [
        ("env:KEY", {}, "router.admin_key: found env:KEY, but the variable KEY is not set"),
        ("env:KEY", {"KEY": ""}, "router.admin_key: found env:KEY, but the variable KEY is empty"),
        ("", {}, "router.admin_key: found an empty key"),
    ],
)
def test_a_key_that_would_be_empty_is_refused_by_field(value: str, env: dict[str, str], message: str) -> None:
    with pytest.raises(TenantError, match=message):
        resolve_key(value, "router.admin_key", env)


def test_a_key_of_two_tenants_is_refused_without_showing_it() -> None:
    both = {"red": TenantConfig(api_keys=("secret-key",)), "blue": TenantConfig(api_keys=("env:K",))}
    with pytest.raises(TenantError, match="red and blue have a key in common") as refused:
        Tenants(both, env={"K": "secret-key"})
    assert "secret-key" not in str(refused.value)


def test_keys_can_guard_other_doors_too() -> None:
    admin = ApiKeys([("open-sesame", "admin")])
    assert admin.owner(b"Bearer open-sesame") == "admin"
    assert admin.owner(b"Bearer red-1") is None
    assert admin.owner(None) is None


def test_the_one_tenant_without_a_salt_of_its_own_has_none() -> None:
    assert salt("", None, SECRET) == ""
    assert salt("", "", SECRET) == ""


given_names = st.text(max_size=12)


@given(one=st.tuples(given_names, given_names), other=st.tuples(given_names, given_names))
def test_salts_are_equal_only_for_the_same_tenant_and_client_salt(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (salt(*one, SECRET) == salt(*other, SECRET)) == (one == other)


@given(tenant=given_names, client_salt=st.text(min_size=8, max_size=64))
def test_a_salt_never_shows_what_the_client_sent(tenant: str, client_salt: str) -> None:
    derived = salt(tenant, client_salt, SECRET)
    assert len(derived) == 64
    assert client_salt not in derived
    assert derived != salt(tenant, client_salt, "another-secret")
    assert derived != salt(tenant, derived, SECRET), "sending a salt that was seen does not lead to it"


def test_a_salt_needs_the_clusters_secret() -> None:
    with pytest.raises(ValueError, match="secret is empty"):
        salt("red", None, "")


def test_a_salt_is_the_same_in_every_process() -> None:
    program = f"from router.tenants import salt; print(salt('red', 'mine', {SECRET!r}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {salt("red", "mine", SECRET)}


def test_a_lone_surrogate_in_a_client_salt_is_a_salt_like_any_other() -> None:
    assert salt("red", "\ud800", SECRET) != salt("red", "?", SECRET)
