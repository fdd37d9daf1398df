"""vLLM's arguments as a configuration gives them: long names and YAML values, parsed by vLLM's own parser.

Importing this module imports no vLLM; calling it does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

RESERVED = {"model": "model.path", "model-tag": "model.path", "served-model-name": "model.name"}
"""Arguments that another field of the configuration gives."""


class EngineArgumentError(ValueError):
    """An argument that vLLM does not take. The message names it, what was found and what vLLM wants."""


def parse_engine_args(
    model_path: str, served_name: str, engine_args: Mapping[str, Any], extra: Sequence[str] = ()
) -> argparse.Namespace:
    """The namespace of `vllm serve` for these arguments; every argument not given has vLLM's default.

    `engine_args` maps long names, with `-` or `_`, to values: true and false are flags, null is "not given",
    a list is several values, a mapping is JSON. `extra` is appended as it is and wins. Raises
    EngineArgumentError.
    """
    parser = _parser()
    words = ["--model", model_path, "--served-model-name", served_name]
    for name, value in engine_args.items():
        option, dot, key = name.partition(".")
        words += _words(parser, option.replace("_", "-") + dot + key, value)
    try:
        args: argparse.Namespace = parser.parse_args([*words, *extra])
        _validate(args)
    except EngineArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise EngineArgumentError(f"engine.args: {error}") from error
    return args


def _words(parser: argparse.ArgumentParser, name: str, value: Any) -> list[str]:
    option = f"--{name}"
    if name in RESERVED:
        given_by = RESERVED[name]
        raise EngineArgumentError(
            f"engine.args.{name}: found {value!r}; needed: nothing, {given_by} gives it"
        )
    # A dot reaches into an argument that is JSON: `compilation-config.mode`.
    action = parser._option_string_actions.get(option.split(".")[0])
    if action is None:
        raise EngineArgumentError(f"engine.args.{name}: vLLM has no argument {option}")
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        if value:
            return [option]
        negative = f"--no-{name}"
        return [negative] if negative in parser._option_string_actions else []
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [option, *map(_text, value)]
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        return [word for item in value for word in (option, _text(item))]
    return [f"{option}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            """argparse would end the process."""
            raise EngineArgumentError(f"engine.args: {message}")

    make_parser: Any = Parser
    parser: argparse.ArgumentParser = _cli_args().make_arg_parser(
        make_parser(prog="vllm", allow_abbrev=False)
    )
    return parser


def _validate(args: argparse.Namespace) -> None:
    _cli_args().validate_parsed_serve_args(args)


def _cli_args() -> Any:
    """Of vLLM 0.33 and later, else of 0.32."""
    try:
        return import_module("vllm.entrypoints.common.cli_args")
    except ImportError:
        return import_module("vllm.entrypoints.launchers.cli_args")
