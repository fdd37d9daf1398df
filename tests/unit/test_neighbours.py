"""Several clusters on one Ray: what each needs for itself, and what they share."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig, ConfigError
from cluster.neighbours import collisions


def config(name: str = "law", **http: Any) -> ClusterConfig:
    return ClusterConfig.parse({"name": name, "engine": {"kind": "sim"}, "http": http})


SERVE: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": {"manta": {"route_prefix": "/"}, "code": {"route_prefix": "/code"}},
}


def test_a_prefix_of_its_own_at_the_shared_port_collides_with_nothing() -> None:
    assert collisions(config(route_prefix="/law"), SERVE) == []


def test_a_prefix_that_another_application_has_is_named_with_its_owner() -> None:
    (line,) = collisions(config(route_prefix="/code"), SERVE)
    assert line.startswith("http.route_prefix: found /code, which the application code has; needed: ")
    (line,) = collisions(config(), SERVE)
    assert "the application manta has" in line


def test_an_application_does_not_collide_with_itself() -> None:
    assert collisions(config("manta"), SERVE) == []


@pytest.mark.parametrize("http", [{"port": 8001}, {"host": "0.0.0.0"}])
def test_an_address_that_serve_does_not_listen_at_is_refused(http: dict[str, Any]) -> None:
    (line,) = collisions(config(route_prefix="/law", **http), SERVE)
    assert "127.0.0.1:8000" in line


def test_a_serve_that_runs_nothing_yet_has_room_for_everything() -> None:
    assert collisions(config(), {}) == []
    assert (
        collisions(config(), {"applications": {}, "http_options": {"host": "127.0.0.1", "port": 8000}}) == []
    )


@pytest.mark.parametrize("prefix", ["", "law", "/law/", "//", "/-", "/-/routes", "/a b", "/{x}", "/Law"])
def test_a_prefix_that_clients_could_not_use_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.route_prefix"):
        config(route_prefix=prefix)


@pytest.mark.parametrize(
    ("http", "endpoint"),
    [
        ({}, "http://10.0.0.3:8000"),
        ({"host": "0.0.0.0", "port": 80, "route_prefix": "/law/v2"}, "http://10.0.0.3:80/law/v2"),
        ({"host": "10.0.0.9", "route_prefix": "/law"}, "http://10.0.0.9:8000/law"),
    ],
)
def test_an_endpoint_is_at_the_node_unless_one_address_is_listened_at(
    http: dict[str, Any], endpoint: str
) -> None:
    assert config(**({"host": "0.0.0.0"} | http)).endpoint_at("10.0.0.3") == endpoint


def test_the_endpoint_from_this_machine_has_the_prefix_too() -> None:
    assert config(host="0.0.0.0", route_prefix="/law").endpoint == "http://127.0.0.1:8000/law"
    assert config(host="::").endpoint_at("fd00::3") == "http://[fd00::3]:8000"
