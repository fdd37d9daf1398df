"""What the documents name exists: files, links, make targets, commands and configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cluster.cli import app
from cluster.config import ClusterConfig
from cluster.config_docs import tables
from router import routes
from router.cache_admin import CacheAdmin
from router.config import RouterConfig
from router.core import RouterCore
from router.pages import Pages

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/README.md")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|yaml|md|toml|lock|sh)|([\w.-]+/)+")
USERS = {"my.yaml", "serve.yaml", "up.yaml"}
"""Files that the reader is asked to write."""
SERVED = re.compile(r"/|.*://")


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def fenced(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(document), re.DOTALL | re.MULTILINE)


def code(document: str) -> list[str]:
    """Everything that is set as code: spans between backticks, and lines of shell."""
    prose = re.sub(r"^```.*?^```$", "", text(document), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose) + [
        line for block in fenced(document, "sh") for line in block.splitlines()
    ]


def words(document: str) -> set[str]:
    return {word for span in code(document) for word in span.split("#")[0].split()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text(document))
    local = [link for link in links if "://" not in link]
    assert links
    assert [link for link in local if not ((ROOT / document).parent / link).exists()] == []


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document != "CHANGELOG.md"])
def test_files_that_are_named_exist(document: str) -> None:
    named = {word for word in words(document) if FILE.fullmatch(word) and not SERVED.match(word)} - USERS
    assert named
    # A page on one folder calls its files by their names.
    linked = {Path(link).name for link in re.findall(r"\]\(([^):#]+)\)", text(document))}
    assert sorted(name for name in named - linked if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_that_are_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    named = {name for span in code(document) for name in re.findall(r"\bmake ([a-z-]+)", span)}
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_manta_commands_and_their_options_exist(document: str) -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for span in code(document):
        if not span.startswith("manta "):
            continue
        line = span.split("#")[0].split()
        assert line[1] in commands, span
        command = commands[line[1]]
        if hasattr(command, "commands"):
            assert line[2] in command.commands, span
            command = command.commands[line[2]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word.split("=")[0] for word in line if word.startswith("--")} <= options, span


@pytest.mark.parametrize(
    "block",
    [block for document in ("README.md", "cluster/README.md") for block in fenced(document, "yaml")],
    ids=lambda block: block.split("\n", 1)[0][:30],
)
def test_configurations_in_the_readmes_load(block: str) -> None:
    data = yaml.safe_load(block)
    if "applications" not in data:
        ClusterConfig.parse(data)
        return
    for application in data["applications"]:
        config = ClusterConfig.parse(application["args"])
        assert application["import_path"] == "cluster.app:build"
        assert application["name"] == config.name
        assert (data["http_options"]["host"], data["http_options"]["port"]) == (
            config.http.host,
            config.http.port,
        )
        for deployment in application["deployments"]:
            assert deployment["name"] == "router"
            RouterConfig.model_validate(deployment["user_config"])


def test_dotted_fields_that_are_named_exist() -> None:
    known = {row.path for table in tables() for row in table.rows} | {table.path for table in tables()}
    sections = {path.partition(".")[0] for path in known if "." in path}
    for document in DOCUMENTS:
        named = {
            word for word in words(document) if re.fullmatch(rf"({'|'.join(sections)})(\.[a-z_]+)+", word)
        }
        assert sorted(named - known) == [], document


def test_endpoints_that_the_readme_promises_are_served() -> None:
    core = RouterCore(RouterConfig(), "a-secret")

    async def never(*_: object) -> Any: ...

    pages = Pages(core, never, CacheAdmin(core, never, never))
    section = re.search(r"^## Endpoints$(.*?)^## ", text("README.md"), re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| `")]
    promised = {path for row in rows for path in re.findall(r"`(/[^`]*[^/`])`", row)}
    assert promised
    assert sorted(path for path in promised if routes.find(path) is None and pages.find(path) is None) == []
