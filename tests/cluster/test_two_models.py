"""Two clusters on one Ray: each at a prefix of its own, and neither in the other's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from cluster.config import ClusterConfig
from cluster.deploy import DeployError, deploy
from tests.cluster.deployed import Deployed, merged
from tests.published_addresses import published_addresses

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def general(deploy_sim: Callable[..., Deployed]) -> Deployed:
    return deploy_sim(name="general", model={"name": "general-1"})


@pytest.fixture(scope="module")
def law(general: Deployed) -> Iterator[Deployed]:
    changes = {"name": "law", "model": {"name": "law-1"}, "http": {"route_prefix": "/law"}}
    deployed = Deployed(changed(general, changes))
    yield deployed
    deployed.delete()


def changed(cluster: Deployed, changes: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.parse(merged(cluster.config.model_dump(mode="json"), changes))


def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="any", max_retries=0)


def answer(cluster: Deployed, model: str) -> str | None:
    messages: list[Any] = [{"role": "user", "content": "who are you"}]
    made = client(cluster).chat.completions.create(model=model, messages=messages, max_tokens=4)
    return made.choices[0].message.content


def test_each_model_answers_at_its_own_endpoint_on_the_same_node(general: Deployed, law: Deployed) -> None:
    assert law.endpoint == f"{general.endpoint}/law"
    assert answer(general, "general-1")
    assert answer(law, "law-1")
    for cluster, model in ((general, "general-1"), (law, "law-1")):
        assert [each.id for each in client(cluster).models.list()] == [model]
        other = "law-1" if model == "general-1" else "general-1"
        with pytest.raises(openai.NotFoundError):
            answer(cluster, other)


def test_streams_come_whole_from_below_a_prefix(law: Deployed) -> None:
    messages: list[Any] = [{"role": "user", "content": "who are you"}]
    stream = client(law).chat.completions.create(model="law-1", messages=messages, max_tokens=4, stream=True)
    pieces = [piece.choices[0].delta.content or "" for piece in stream if piece.choices]
    assert "".join(pieces) == answer(law, "law-1")


def test_each_has_pages_and_replicas_of_its_own(general: Deployed, law: Deployed) -> None:
    here, there = ({each["id"] for each in cluster.ready_replicas(2)} for cluster in (general, law))
    assert not here & there
    admin = [cluster.http.get("/admin/replicas").json() for cluster in (general, law)]
    assert [each["endpoint"] for each in admin] == [general.endpoint, law.endpoint]
    assert {router["address"] for each in admin for router in each["routers"]} == {"127.0.0.1"}
    assert len(set(published_addresses(admin[0])) & set(published_addresses(admin[1])) - {"127.0.0.1"}) == 0
    assert law.http.get("/readyz").status_code == 200
    assert b"manta_router" in law.http.get("/metrics").content


def test_a_drain_in_one_is_none_in_the_other(general: Deployed, law: Deployed) -> None:
    theirs = law.ready_replicas(2)[0]["id"]
    assert general.http.post("/admin/replicas/drain", json={"name": theirs}).status_code == 404
    told = law.http.post("/admin/replicas/drain", json={"name": theirs})
    assert told.status_code == 200
    general.ready_replicas(2)
    law.http.post("/admin/replicas/drain", json={"name": theirs, "undo": True})
    law.ready_replicas(2)


def test_a_third_may_take_neither_prefix_nor_another_port(general: Deployed, law: Deployed) -> None:
    with pytest.raises(DeployError, match=r"http\.route_prefix: found /law, which the application law has"):
        deploy(changed(law, {"name": "third"}), timeout_s=10)
    port = general.config.http.port + 1
    with pytest.raises(DeployError, match=f"listens at 127.0.0.1:{general.config.http.port}"):
        deploy(
            changed(law, {"name": "third", "http": {"route_prefix": "/third", "port": port}}), timeout_s=10
        )


def test_one_that_ends_leaves_the_other_alone(general: Deployed, law: Deployed) -> None:
    processes = general.pids("router"), general.pids("unified")
    law.delete()
    assert answer(general, "general-1")
    assert (general.pids("router"), general.pids("unified")) == processes
