"""What is wrong with manifests is found: by KubeRay's schema, by Kubernetes', or by the checks in code."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from k8s_manifests import OVERLAYS, overlay, ray_service, secrets, versions
from k8s_mutations import MUTATIONS, places
from k8s_schemas import KUBERNETES, crd_errors, kubernetes_errors, needs_crds

from cluster.k8s.checks import check

pytestmark = needs_crds


def found(objects: list[dict[str, Any]]) -> list[str]:
    """The first finding, and which of the three it is from; nothing where all three are content."""
    for name, findings in (
        ("checks", lambda: check(objects, versions(), secrets())),
        ("CRD", lambda: crd_errors(ray_service(objects))),
        ("Kubernetes", lambda: kubernetes_errors(objects, KUBERNETES[-1])),
    ):
        if errors := findings():
            return [f"{name}: {errors[0]}"]
    return []


@pytest.mark.parametrize("name", OVERLAYS)
def test_mistakes_are_found(name: str) -> None:
    assert found(overlay(name)) == []
    made, missed = [], []
    for mistake, change in MUTATIONS.items():
        objects = overlay(name)
        try:
            change(objects)
        except (LookupError, StopIteration):
            # The overlay has nothing of the kind.
            continue
        assert objects != overlay(name), f"{mistake} changed nothing"
        made.append(mistake)
        if not found(objects):
            missed.append(mistake)
    print(f"{name}: {len(made) - len(missed)} of {len(made)} mistakes found; missed: {missed or 'none'}")
    assert len(made) >= 30
    assert len(missed) * 30 <= 2 * len(made), f"of 30 at least 28 are to be found; missed: {missed}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_typing_error_in_any_field_of_the_service_is_found(name: str) -> None:
    service = ray_service(overlay(name))
    chosen = random.Random(name).sample(sorted(places(service["spec"]), key=str), 60)
    missed = []
    for path in chosen:
        changed = copy.deepcopy(service)
        place = changed["spec"]
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        if not crd_errors(changed):
            missed.append(".".join(map(str, path)))
    assert missed == []
