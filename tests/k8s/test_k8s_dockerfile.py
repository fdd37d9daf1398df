"""The image is made by the scripts of `make setup`, runs as nobody in particular, and builds on nothing that moves."""

from __future__ import annotations

import re
import stat
from typing import NamedTuple

import pytest
from k8s_manifests import K8S, OVERLAYS, ROOT, overlay, ray_service
from k8s_mutations import container, head

DOCKERFILE = K8S / "images" / "Dockerfile"


class Instruction(NamedTuple):
    name: str
    text: str


def instructions() -> list[Instruction]:
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [instruction.text for instruction in instructions() if instruction.name == name]


def stages() -> list[list[Instruction]]:
    made: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction.name == "FROM":
            made.append([])
        if made:
            made[-1].append(instruction)
    return made


def test_the_environment_is_made_by_the_script_of_make_setup() -> None:
    script = "requirements/install.py"
    assert script in (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = [text for text in of("RUN") if script in text]
    assert len(runs) == 1
    assert re.search(r"python requirements/install\.py \S+ .*KIND", runs[0])


def test_nothing_is_installed_but_by_that_script() -> None:
    assert [text for text in of("RUN") if re.search(r"\b(pip|uv|conda) install\b|curl|git clone", text)] == []


def test_a_kind_that_the_script_does_not_know_ends_the_build() -> None:
    """No default: an image for CPUs by oversight would be found on a GPU node."""
    assert "KIND" in of("ARG")
    assert any("${KIND:?" in text for text in of("RUN"))


def test_what_builds_is_not_what_runs() -> None:
    assert len(stages()) >= 2
    assert not any("install.py" in instruction.text for instruction in stages()[-1])
    copied = [instruction.text for instruction in stages()[-1] if instruction.name == "COPY"]
    assert copied
    assert all("--from=" in text for text in copied)


def test_no_image_is_without_a_version() -> None:
    defaults = dict(text.split("=", 1) for text in of("ARG") if "=" in text)
    for text in of("FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], text.split()[0])
        assert re.search(r":\d+\.\d+\.\d+|@sha256:", image), image
        assert "latest" not in image


def test_the_image_has_the_python_that_the_locks_are_for() -> None:
    locked = re.search(
        r"with Python (\d+\.\d+)", (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    )
    assert locked is not None
    assert f"python:{locked[1]}." in DOCKERFILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_user_is_the_one_that_the_manifests_name(name: str) -> None:
    users = [instruction.text for instruction in stages()[-1] if instruction.name == "USER"]
    assert users
    user, group = users[-1].split(":")
    context = head(overlay(name))["template"]["spec"]["securityContext"]
    assert (int(user), int(group)) == (context["runAsUser"], context["runAsGroup"])
    assert int(user) > 0


def test_what_is_copied_is_there_and_let_through() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    sources = [
        source.removeprefix("./")
        for instruction in stages()[0]
        if instruction.name == "COPY"
        for source in instruction.text.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.rstrip('/')}" in ignored, source


@pytest.mark.parametrize("name", OVERLAYS)
def test_programs_that_pods_call_are_in_the_image(name: str) -> None:
    """Below /opt/manta, where the repository's folders are copied to."""
    service = ray_service(overlay(name))
    groups = [head([service]), *service["spec"]["rayClusterConfig"]["workerGroupSpecs"]]
    called = [container(group)["lifecycle"]["preStop"]["exec"]["command"][0] for group in groups]
    called += [
        variable["value"]
        for group in groups
        for variable in container(group)["env"]
        if variable["name"] == "RAY_SERVE_HAPROXY_BINARY_PATH"
    ]
    own = {program for program in called if program.startswith("/opt/manta/")}
    assert len(own) == 2
    copied = [text.split()[:-1] for text in of("COPY")]
    for program in own:
        path = program.removeprefix("/opt/manta/")
        assert (ROOT / path).stat().st_mode & stat.S_IXUSR, f"{path} is not executable"
        assert any(path.startswith(source.rstrip("/")) for sources in copied for source in sources), path
