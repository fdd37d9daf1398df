"""The reference of the configuration, from its models: `python -m cluster.config_docs > docs/configuration.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig

Effect = Literal["live", "scales", "replicas", "routers", "both", "deploy", "start", "application"]

EFFECTS: dict[Effect, tuple[str, str]] = {
    "live": ("live", "the running routers take it over; nothing restarts"),
    "scales": ("live: count", "Serve starts or stops replicas; those that stay are not touched"),
    "replicas": (
        "restarts replicas",
        "those of the pool, of every pool for a field outside of `pools`; a part at a time, and each finishes its open "
        "requests first",
    ),
    "routers": ("restarts routers", "a part at a time"),
    "both": ("restarts routers and replicas", "both of the above"),
    "deploy": ("next deployment", "it is read when the cluster is deployed; nothing restarts"),
    "start": ("next start", "`manta down`, then `manta up`"),
    "application": ("another application", "a cluster of another name is another cluster"),
}
"""What a change costs -> how the tables say it, and what it means."""

RULES: dict[str, Effect] = {
    "name": "application",
    "model": "both",
    "engine": "replicas",
    "engine.kind": "both",
    "engine.args": "both",
    "engine.env": "both",
    "engine.sim.max_model_len": "both",
    "pools": "replicas",
    "pools.role": "both",
    "pools.replicas": "scales",
    "pools.autoscaling": "scales",
    "router": "live",
    "router.replicas": "scales",
    "router.num_cpus": "routers",
    "cache": "both",
    "transfer": "replicas",
    "http": "start",
    "http.route_prefix": "routers",
    "placement.use_roles": "both",
    "placement.nodes_timeout_s": "deploy",
    "placement.max_replicas_per_node": "replicas",
    "placement.max_routers_per_node": "routers",
    "ray": "start",
}
"""Field or section -> what a change costs; the longest one that fits holds. `cluster.app` decides, a test compares."""

HEAD = """# Configuration

<!-- Written by cluster/config_docs.py; `python -m cluster.config_docs > docs/configuration.md` writes it anew. -->

One YAML file makes a cluster. `manta check FILE` validates it: a field that does not exist, or a value that can't be
used, is an error that names the field, what was found and what is needed. Every field has the default given here; only
the vllm engine's `model.path` must be given. Files to start from are in `cluster/configs/`.

The last column says what it costs to change a field of a deployed application:
"""

TAIL = """## Where this holds

For `cluster.deploy.deploy`, which gives every deployment a version made of its own contents. `manta up` refuses a name
that runs already. With `serve run` and `serve deploy` Serve itself decides: a change below `args` restarts every
deployment of the application, and a change of the router's `user_config`, which takes the fields of `router`, is live.
That `user_config` replaces `args.router` as a whole: fields that it leaves out have their defaults. `replicas` and
`num_cpus` mean nothing in it.

A new version of the package, or another `MANTA_SECRET`, restarts everything.
"""


class Row(NamedTuple):
    """One field."""

    path: str
    """With dots, as errors name it, without the numbers of list items."""
    kind: str
    default: str
    description: str
    effect: Effect


class Table(NamedTuple):
    """One section: a model whose fields are no models."""

    path: str
    """Empty for the fields of the file itself."""
    purpose: str
    rows: tuple[Row, ...]


def effect_of(path: str) -> Effect:
    """Raises LookupError for a field that no rule is about."""
    rule = path
    while rule not in RULES:
        if not rule:
            raise LookupError(f"no rule of cluster.config_docs says what a change of {path} costs")
        rule = rule.rpartition(".")[0]
    return RULES[rule]


def tables(model: type[BaseModel] = ClusterConfig, path: str = "") -> Iterator[Table]:
    """The model's own fields, then its sections, in the order of the file."""
    rows: list[Row] = []
    sections: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        where = f"{path}.{name}" if path else name
        section = _section(field.annotation)
        # A section that may be left out, or that has a name of the user's, is a field too.
        if section is None or section.optional:
            rows.append(Row(where, _kind(field), _default(field), field.description or "", effect_of(where)))
        if section is not None:
            sections.append((section.model, where))
    if rows:
        yield Table(path, " ".join((model.__doc__ or "").split()), tuple(rows))
    for section_model, where in sections:
        yield from tables(section_model, where)


def markdown() -> str:
    parts = [HEAD, *(f"- **{label}**: {meaning}." for label, meaning in EFFECTS.values()), ""]
    for table in tables():
        parts += [f"## {_heading(table.path)}", ""]
        if table.path:
            parts += [table.purpose, ""]
        parts += ["| field | type | default | meaning | a change |", "|---|---|---|---|---|"]
        parts += [_line(row) for row in table.rows]
        parts.append("")
    return "\n".join([*parts, TAIL])


def _heading(path: str) -> str:
    if not path:
        return "The file"
    return {"pools": "`pools`, a list", "router.tenants": "`router.tenants`, by name"}.get(path, f"`{path}`")


def _line(row: Row) -> str:
    name = row.path.rpartition(".")[2]
    default = f"`{row.default}`" if row.default else ""
    cells = [f"`{name}`", row.kind, default, row.description, EFFECTS[row.effect][0]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class _Section(NamedTuple):
    model: type[BaseModel]
    optional: bool


def _section(annotation: Any) -> _Section | None:
    """The model inside an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _Section(annotation, False)
    for part in typing.get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return _Section(part, typing.get_origin(annotation) is not tuple)
    return None


def _kind(field: FieldInfo) -> str:
    kind = _type(field.annotation)
    for limit in field.metadata:
        match limit:
            case Ge(ge):
                kind += f", ≥ {ge}"
            case Gt(gt):
                kind += f", > {gt}"
            case Le(le):
                kind += f", ≤ {le}"
            case Lt(lt):
                kind += f", < {lt}"
            case _ if getattr(limit, "pattern", None):
                kind += f" like `{limit.pattern}`"
    return kind


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return ", ".join(_type(part) for part in parts if part is not type(None))
    if origin is dict:
        return "section by name" if _section(annotation) else f"map of {_type(parts[1])}"
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, "anything")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value) if not isinstance(value, str) or not value else value


if __name__ == "__main__":
    print(markdown(), end="")
