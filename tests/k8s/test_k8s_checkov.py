"""checkov's opinion of the manifests: nothing but what is accepted, and nothing accepted that it no longer says.

Its pins are at odds with vLLM's, so it lives in an environment of its own: `make checkov` installs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest
import yaml
from k8s_accepted import ACCEPTED
from k8s_manifests import K8S, OVERLAYS, ROOT, overlay
from k8s_schemas import as_deployment

from cluster.k8s.checks import API_VERSIONS
from cluster.k8s.workloads import workloads

VARIABLE = "MANTA_CHECKOV"
"""Environment variable: the program, where it is neither in .venv-k8s nor in PATH."""


def program() -> str | None:
    own = ROOT / ".venv-k8s" / "bin" / "checkov"
    return os.environ.get(VARIABLE) or (str(own) if own.is_file() else shutil.which("checkov"))


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(program() is None, reason=f"checkov is not installed; `make checkov`, or {VARIABLE}"),
]


class Failure(NamedTuple):
    check: str
    file: str
    where: str
    name: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Failure]:
    """Over all overlays and the Dockerfile in one run."""
    folder = tmp_path_factory.mktemp("checkov")
    for name in OVERLAYS:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(known_to_checkov(overlay(name))))
    shutil.copy(K8S / "images" / "Dockerfile", folder)
    done = subprocess.run(
        [str(program()), "-d", str(folder), "--framework", "kubernetes", "dockerfile", "-o", "json", "--quiet",
         "--compact", "--skip-download", "--soft-fail"],
        capture_output=True, text=True, timeout=280, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    assert {report["check_type"] for report in reports} == {"kubernetes", "dockerfile"}
    assert [report["summary"]["parsing_errors"] for report in reports] == [0, 0]
    assert sum(report["summary"]["passed"] for report in reports) > 100 * len(OVERLAYS)
    return [
        Failure(failed["check_id"], failed["file_path"], failed["resource"], failed["check_name"])
        for report in reports
        for failed in report["results"]["failed_checks"]
    ]


def known_to_checkov(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """It knows no RayService: each pod template of one goes in as a Deployment."""
    kept = [item for item in objects if item["kind"] not in API_VERSIONS]
    return kept + [as_deployment(pod) for pod in workloads(objects) if pod.group]


def is_accepted(failure: Failure) -> bool:
    accepted = ACCEPTED.get(failure.check)
    return accepted is not None and re.fullmatch(accepted.where, failure.where) is not None


def test_it_finds_nothing_but_what_is_accepted(found: list[Failure]) -> None:
    assert [failure for failure in found if not is_accepted(failure)] == []


def test_nothing_is_accepted_that_it_does_not_find(found: list[Failure]) -> None:
    assert ACCEPTED.keys() - {failure.check for failure in found} == set()


def test_every_acceptance_has_a_reason_and_stands_in_the_readme() -> None:
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    assert [check for check, accepted in ACCEPTED.items() if len(accepted.reason.split()) < 8] == []
    assert {*re.findall(r"CKV_\w+", readme)} == ACCEPTED.keys()
