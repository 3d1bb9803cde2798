"""The command line of `headstart serve`: its own flags, and those of `vllm serve`.

vLLM's are read as vLLM reads them (`4k`, JSON, `--no-…`, dots, underscores), ours by click, which
also reads the environment. What becomes of vLLM's says one table: see `serve_args`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from headstart.cli.help import GroupedCommand, GroupedOption
from headstart.engine.vllm_api.command_line import add_flags
from headstart.engine.vllm_api.rows import Flags
from headstart.engine.vllm_api.serve_args import SERVE_ROWS
from headstart.errors import ConfigError
from headstart.imports import load_module
from headstart.utils.argparse_utils import FlexibleArgumentParser
from headstart.validation import describe, shorten

__all__ = ["ServeCommand"]

_OUR_NAMES = {
    "ssl_keyfile": "tls_key",
    "ssl_certfile": "tls_cert",
    "shutdown_timeout": "drain_seconds",
}
_HINT = "Flags of `vllm serve` are taken too: docs/vllm.md says what becomes of each."


class ServeCommand(GroupedCommand):
    """A command that takes vLLM's flags beside those that `--help` shows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epilog = f"{self.epilog} {_HINT}"
        names = [one.flag for one in self.params if isinstance(one, GroupedOption)]
        self._table = Flags(
            "headstart serve",
            SERVE_ROWS,
            ConfigError,
            own=[flag.removeprefix("--").replace("-", "_") for flag in names],
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; values of vLLM's flags go before the environment's.

        Raises ConfigError for one that cannot be followed, or a flag that there is not.
        """
        if ctx.resilient_parsing:  # a shell completes what is half typed
            return super().parse_args(ctx, args)
        typed, rest = _read(args)
        filed, more = _read(_flags_of(typed["config"])) if typed.get("config") else ({}, [])
        try:
            left = super().parse_args(ctx, [*more, *rest])  # which --help ends
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            raise ConfigError(
                f"{self._table.unknown(name)}; see {ctx.command_path} --help"
            ) from None
        given = self._table.read({**filed, **typed})
        adapters = map(_read_module, given.pop("lora_modules", ()))
        first, *others = given.pop("served_model_name", [None])
        ctx.params |= _as_ours(given if first is None else given | {"served_model_name": first})
        ctx.params["adapters"] += tuple(adapters)
        ctx.params["model_alias"] += tuple(others)
        _name_model(ctx.params, typed.get("model"))
        return left


class _Parser(FlexibleArgumentParser):
    """Of vLLM's flags alone; a wrong call is told as click's are."""

    def error(self, message: str) -> NoReturn:
        raise click.UsageError(message, click.get_current_context(silent=True))


def _read(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of vLLM's flags, and the arguments that are none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    found, rest = add_flags(parser, SERVE_ROWS, SERVE_ROWS, given_only=True).parse_known_args(args)
    return vars(found), rest


def _flags_of(path: str) -> list[str]:
    """The arguments that a YAML file stands for, as vLLM reads it. Raises ConfigError."""
    try:
        content = load_module("yaml").safe_load(Path(path).expanduser().read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no mapping of flags")
    except Exception as error:  # the library's own errors derive from Exception alone
        raise ConfigError(f"--config is {describe(path)}; {shorten(str(error))}") from error
    args: list[str] = []
    for name, value in content.items():
        if isinstance(value, bool):
            args.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            args += [f"--{name}", *map(_spell, values)]
    return args


def _spell(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _as_ours(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the server and of its engine; those of vLLM's engine as they are."""
    found = {_OUR_NAMES.get(name, name): value for name, value in given.items()}
    found.pop("config", None)
    if found.pop("disable_uvicorn_access_log", False):
        found["log_format"] = "off"
    if (origins := found.pop("allowed_origins", None)) is not None:
        if not isinstance(origins, list) or not all(isinstance(one, str) for one in origins):
            raise ConfigError(
                f"--allowed-origins is {describe(origins)}; allowed: a list in JSON, such as "
                """'["https://a.example"]'"""
            )
        found["cors_origin"] = ",".join(origins) or None
    if "api_key" in found:
        found["api_key"] = tuple(found["api_key"])
    return found


def _read_module(given: str) -> str:
    """NAME=PATH for that, or for an adapter in JSON. Raises ConfigError."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        told = json.loads(given)
        return f"{told['name']}={told['path']}"
    except (ValueError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"--lora-modules is {describe(given)}; allowed: NAME=PATH, or "
            """'{"name": ..., "path": ...}'"""
        ) from error


def _name_model(params: dict[str, Any], named: str | None) -> None:
    """Take the model that stands alone, as in `vllm serve MODEL`; `named` is that of --model."""
    alone = params.pop("model_tag")
    if alone is None:
        return
    if named not in (None, alone):
        raise ConfigError(
            f"the model is {describe(alone)} and --model {describe(named)}; allowed: one"
        )
    params["model"] = alone
