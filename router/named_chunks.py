"""What a body for `/admin/cache` names: the chunks of a prompt, chunks by their keys, or all there are.

A prompt is named as in a request for a completion or a chat, and rendered as that request would be, so that its
keys are those that the request's chunks have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cache_store.cache_messages import MAX_LISTED
from cache_store.events import ChunkKey
from router import errors
from router.core import Query
from router.directory import ReplicaEntry
from router.errors import ApiError
from router.render import CHAT_PATH, COMPLETIONS_PATH, parse_object

MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 5.0

_Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_HexKey = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
_Given = Any | UnsetType

_ABOUT_THE_OUTPUT = (
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "stream_options",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",  # with these an engine computes a prompt although it has its KV
    "response_format",
    "structured_outputs",
)
"""Fields of a request that no prompt depends on, and that ask for more output than there will be."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt with what its rendering depends on; or keys; or all."""

    prompt: str | list[_Token] | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    add_special_tokens: _Given = UNSET
    truncate_prompt_tokens: _Given = UNSET
    tools: _Given = UNSET
    tool_choice: _Given = UNSET
    documents: _Given = UNSET
    reasoning_effort: _Given = UNSET
    chat_template: _Given = UNSET
    chat_template_kwargs: _Given = UNSET
    add_generation_prompt: _Given = UNSET
    continue_final_message: _Given = UNSET
    keys: Annotated[list[_HexKey], Meta(min_length=1, max_length=MAX_LISTED)] | UnsetType = UNSET
    all: bool | UnsetType = UNSET


class PromptNamed(NamedTuple):
    path: str
    """Of the request that the prompt would come with."""
    body: bytes
    """That request's."""
    tenant: str | None


class KeysNamed(NamedTuple):
    keys: list[ChunkKey]


class AllNamed(NamedTuple):
    pass


class ToWarm(NamedTuple):
    prompt: PromptNamed
    """With the body of a request that computes its KV, and no more than one token of output."""
    wait_s: float


class EngineChunks(NamedTuple):
    """Chunks of one prompt for engines of one kind."""

    identity: bytes
    chunk_tokens: int
    replicas: list[str]
    keys: list[ChunkKey]


def parse_named(body: bytes, may_be_all: bool = False) -> PromptNamed | KeysNamed | AllNamed:
    """Raises ApiError 400."""
    try:
        given = msgspec.json.decode(body, type=_Body)
    except msgspec.ValidationError as error:
        raise errors.bad_request(f"body: {error}", param="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.malformed_json(str(error)) from error
    fields = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not UNSET}
    ways = ("prompt", "messages", "keys", "all")[: 4 if may_be_all else 3]
    named = [name for name in ("prompt", "messages", "keys", "all") if name in fields]
    if len(named) != 1 or named[0] not in ways or given.all is False:
        raise errors.bad_request(f"body: needed: exactly one of {', '.join(ways)}", param="body")
    if named[0] in ("keys", "all"):
        if beside := sorted(fields.keys() - {"keys", "all"}):
            raise errors.bad_request(f"{beside[0]}: goes with a prompt or messages only", param=beside[0])
        if given.all is True:
            return AllNamed()
        return KeysNamed(list(dict.fromkeys(ChunkKey(bytes.fromhex(key)) for key in fields["keys"])))
    fields.pop("tenant", None)
    path = COMPLETIONS_PATH if "prompt" in fields else CHAT_PATH
    return PromptNamed(path, json.dumps(fields).encode(), given.tenant or None)


def parse_warm(body: bytes) -> ToWarm:
    """A request's body, with `tenant` and `wait_s` beside its fields. Raises ApiError 400."""
    fields = parse_object(body)
    tenant, wait_s = fields.pop("tenant", None), fields.pop("wait_s", DEFAULT_WAIT_S)
    if tenant is not None and not isinstance(tenant, str):
        raise errors.bad_request(f"tenant: found {tenant!r:.80}; needed: a name", param="tenant")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        raise errors.bad_request(
            f"wait_s: found {wait_s!r:.80}; needed: seconds from 0 to {MAX_WAIT_S:g}", param="wait_s"
        )
    if ("prompt" in fields) == ("messages" in fields):
        raise errors.bad_request("body: needed: exactly one of prompt, messages", param="body")
    for name in _ABOUT_THE_OUTPUT:
        fields.pop(name, None)
    path = CHAT_PATH if "messages" in fields else COMPLETIONS_PATH
    request = json.dumps(fields | {"max_tokens": 1, "stream": False}).encode()
    return ToWarm(PromptNamed(path, request, tenant or None), float(wait_s))


def check_tenant(given: str | None, known: Iterable[str]) -> str:
    """The tenant in whose name a prompt is looked at; empty where there are no tenants.

    Raises ApiError 400 where one must be given, 404 for one that does not exist.
    """
    names = sorted(known)
    there = f"Tenants: {', '.join(names)}." if names else "There are none: leave it out."
    if given is None and names:
        message = f"tenant: not given; needed, since tenants never share KV. {there}"
        raise errors.bad_request(message, param="tenant")
    if given is not None and given not in names:
        message = f"The tenant {given!r:.200} does not exist. {there}"
        raise ApiError(404, message, "NotFoundError", param="tenant")
    return given or ""


def check_prompt(query: Query) -> int:
    """Tokens of its prompt. Raises ApiError 400 where it has several, or none that can be tokenised here."""
    prompts = query.rendered.prompts
    if prompts is None:
        raise errors.bad_request(
            f"This prompt can't be tokenised by the router ({query.rendered.reason}), so that its chunks have no "
            "names here.",
            param="body",
        )
    if len(prompts) != 1:
        raise errors.bad_request(f"prompt: found {len(prompts)} prompts; needed: one", param="prompt")
    return len(prompts[0])


def engine_chunks(query: Query, replicas: Iterable[ReplicaEntry]) -> list[EngineChunks]:
    """By kind of engine, for the replicas that serve the query's model and have been heard."""
    found: dict[tuple[bytes, int, str], EngineChunks] = {}
    for entry in replicas:
        hello, info = entry.hello, entry.info
        if hello is None or (query.model and query.model not in info.models):
            continue
        kind = (hello.identity, hello.chunk_tokens, info.adapters.get(query.model, ""))
        if kind not in found:
            found[kind] = EngineChunks(hello.identity, hello.chunk_tokens, [], query.chunk_keys(*kind)[0])
        found[kind].replicas.append(info.id)
    return list(found.values())


def node_named(name: str, nodes: Mapping[str, object]) -> str:
    """The node whose id is `name` or begins with it. Raises ApiError 404 and 409."""
    if name in nodes:
        return name
    begin = sorted(node for node in nodes if name and node.startswith(name))
    if len(begin) == 1:
        return begin[0]
    if begin:
        message = f"{name!r:.80} is the beginning of several nodes: {', '.join(begin)}."
        raise ApiError(409, message, "ConflictError", param="node")
    message = f"No node with a cache is named {name!r:.80}. There are: {', '.join(sorted(nodes))}."
    raise ApiError(404, message, "NotFoundError", param="node")
