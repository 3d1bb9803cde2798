"""The command line of `headstart serve`: its own flags, and those of `vllm serve`.

vLLM's are read as vLLM reads them (`4k`, JSON, `--no-…`, dots, underscores), ours by click, which
also reads the environment. What becomes of vLLM's says one table: see `serve_args`. What is typed
goes before a file's flags, and these before the environment, whichever of its names an option has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from headstart.cli.help import GroupedCommand, GroupedOption
from headstart.cli.serving.config_file import Kinds, read_file
from headstart.errors import ConfigError
from headstart.frontend.vllm_api.command_line import add_flags
from headstart.frontend.vllm_api.flags import LISTS, TEXTS
from headstart.frontend.vllm_api.rows import Flags
from headstart.frontend.vllm_api.serve_args import SERVE_ROWS
from headstart.utils.argparse_utils import FlexibleArgumentParser
from headstart.validation import describe

__all__ = ["ServeCommand"]

_OUR_NAMES = {
    "ssl_keyfile": "tls_key",
    "ssl_certfile": "tls_cert",
    "shutdown_timeout": "drain_seconds",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "disable_uvicorn_access_log": "log_format",
    "allowed_origins": "cors_origin",
}
_SAME = _OUR_NAMES | {
    "limit_mm_per_prompt": "max_images",
    "lora_modules": "adapters",
    "adapter": "adapters",
}
"""Our options that these names mean, too."""
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
        try:
            filed, more = self._read_file(ctx, typed, rest)
            left = super().parse_args(ctx, [*more, *rest])  # which --help ends
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            raise ConfigError(
                f"{self._table.unknown(name)}; see {ctx.command_path} --help"
            ) from None
        given = self._table.read({**filed, **typed})
        first, *others = given.pop("served_model_name", [None])
        modules = tuple(map(_read_module, given.pop("lora_modules", ())))
        _forget_environment(ctx, "adapters", bool(modules), ())
        _forget_environment(ctx, "max_images", _is_said("limit_mm_per_prompt", given), None)
        ours = _as_ours(given if first is None else given | {"served_model_name": first})
        self._refuse_two(ctx, ours)
        ctx.params |= ours
        ctx.params["adapters"] += modules
        ctx.params["model_alias"] += tuple(others)
        _name_model(ctx.params, typed.get("model"))
        return left

    def _read_file(
        self, ctx: click.Context, typed: Mapping[str, Any], rest: list[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """As `_read` of what --config names, without the options that are typed."""
        if not typed.get("config"):
            return {}, []
        kinds = _kinds_of(self.params)
        own, *_ = self.make_parser(ctx).parse_args([*rest])
        said = {_SAME.get(name, name) for name in typed if _is_said(name, typed)} | own.keys()
        filed, more = _read(
            [
                argument
                for name, arguments in read_file(typed["config"], kinds)
                if _SAME.get(name, name) not in said
                for argument in arguments
            ]
        )
        return filed, more

    def _refuse_two(self, ctx: click.Context, ours: Mapping[str, Any]) -> None:
        """Raise ConfigError if both names of an option are given, with values that differ."""
        for theirs, name in _OUR_NAMES.items():
            is_given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_given and name in ours and ctx.params[name] != ours[name]:
                one, other = map(self._table.spell, (name, theirs))
                raise ConfigError(
                    f"{one} is {describe(ctx.params[name])}, and {describe(ours[name])} by "
                    f"{other}; allowed: one of the two"
                )


class _Parser(FlexibleArgumentParser):
    """Of vLLM's flags alone; a wrong call is told as click's are."""

    def error(self, message: str) -> NoReturn:
        raise click.UsageError(message, click.get_current_context(silent=True))


def _read(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of vLLM's flags, and the arguments that are none."""
    found, rest = _parser().parse_known_args(args)
    return vars(found), rest


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    return add_flags(parser, SERVE_ROWS, SERVE_ROWS, given_only=True)


def _kinds_of(params: list[click.Parameter]) -> Kinds:
    """Of the flags of both."""
    switches = {flag for flag, one in _parser()._option_string_actions.items() if one.nargs == 0}
    lists, texts = {*LISTS}, {*TEXTS}
    for one in params:
        names = {flag.removeprefix("--").replace("-", "_") for flag in one.opts}
        lists |= names if isinstance(one, click.Option) and one.multiple else set()
        texts |= names if one.type.name in ("text", "path") else set()
        switches |= {*one.opts, *one.secondary_opts} if one.type.name == "boolean" else set()
    return Kinds({flag.removeprefix("--").replace("-", "_") for flag in switches}, lists, texts)


def _is_said(name: str, given: Mapping[str, Any]) -> bool:
    """Whether the value of vLLM's flag says what an option of ours is."""
    value = given.get(name)
    if name == "limit_mm_per_prompt":
        return isinstance(value, Mapping) and value.get("image") is not None
    return value is not None and (value is not False or name != "disable_uvicorn_access_log")


def _forget_environment(ctx: click.Context, name: str, is_said: bool, nothing: object) -> None:
    """Forget what the environment says of an option that is given by another name."""
    if is_said and ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        ctx.params[name] = nothing


def _as_ours(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the server and of its engine; those of vLLM's engine as they are."""
    found = {name: value for name, value in given.items() if name not in ("config", *_OUR_NAMES)}
    said = {name: given[name] for name in _OUR_NAMES if _is_said(name, given)}
    if said.pop("disable_uvicorn_access_log", False):
        found["log_format"] = "off"
    if (origins := said.pop("allowed_origins", None)) is not None:
        if not isinstance(origins, list) or not all(isinstance(one, str) for one in origins):
            raise ConfigError(
                f"--allowed-origins is {describe(origins)}; allowed: a list in JSON, such as "
                """'["https://a.example"]'"""
            )
        found["cors_origin"] = ",".join(origins) or None
    if "api_key" in found:
        found["api_key"] = tuple(found["api_key"])
    return found | {_OUR_NAMES[name]: value for name, value in said.items()}


def _read_module(given: str) -> str:
    """NAME=PATH for that, or for an adapter in JSON. Raises ConfigError."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        told = json.loads(given)
        name, path = told["name"], told["path"]
        if not isinstance(name, str) or not isinstance(path, str) or "=" in name:
            raise ValueError("no texts, or a name that NAME=PATH cannot have")
        return f"{name}={path}"
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
