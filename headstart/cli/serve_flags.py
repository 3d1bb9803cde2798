"""The command line of `headstart serve`: its own flags, and those of `vllm serve`.

vLLM's are read as vLLM reads them (`4k`, JSON, `--no-…`, dots, underscores), ours by click, which
also reads the environment. `vllm_compat` has vLLM's names. Typed flags take precedence over
a file's, and these over the environment, by whichever name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from headstart.cli.options import GroupedCommand
from headstart.errors import ConfigError
from headstart.frontend.engine_args import LISTS, add_flags
from headstart.frontend.vllm_compat import (
    ABSENT,
    IGNORED,
    SERVE_ABSENT,
    SERVE_IGNORED,
    SERVE_WORKS,
    WORKS,
    read_names,
)
from headstart.imports import load_module
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
# Our options by all other names that have the same meaning.
_SAME = _OUR_NAMES | {
    "limit_mm_per_prompt": "max_images",
    "lora_modules": "adapters",
    "adapter": "adapters",
}
_HINT = "Flags of `vllm serve` are taken too: docs/vllm.md lists them."
_WORKS = SERVE_WORKS | {*WORKS}
_ABSENT = {**ABSENT, **SERVE_ABSENT}
_IGNORED = (IGNORED | SERVE_IGNORED) - _WORKS - SERVE_ABSENT.keys()
_FLAG = re.compile(r"(\w[\w-]*)(\.[\w.-]+)?")


class ServeCommand(GroupedCommand):
    """A command that takes vLLM's flags in addition to those that `--help` shows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epilog = f"{self.epilog} {_HINT}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse both kinds of flags. Raises ConfigError for an unknown or unsupported flag."""
        if ctx.resilient_parsing:  # a shell completes what is half typed
            return super().parse_args(ctx, args)
        typed, rest = _read(args)
        filed, more = self._read_file(ctx, typed, rest)
        left = super().parse_args(ctx, [*more, *rest])
        given = read_names({**filed, **typed}, _WORKS, _IGNORED, _ABSENT, _spell)
        first, *aliases = given.pop("served_model_name", [None])
        adapters = tuple(map(_read_module, given.pop("lora_modules", ())))
        if adapters:
            _forget_environment(ctx, "adapters", ())
        if _is_given("limit_mm_per_prompt", given):
            _forget_environment(ctx, "max_images", None)
        ours = _as_ours(given if first is None else given | {"served_model_name": first})
        for theirs, name in _OUR_NAMES.items():
            is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_typed and name in ours and ctx.params[name] != ours[name]:
                our_flag, their_flag = map(_spell, (name, theirs))
                raise ConfigError(
                    f"{our_flag} is {describe(ctx.params[name])}, and {describe(ours[name])} by "
                    f"{their_flag}; allowed: one of the two"
                )
        ctx.params |= ours
        ctx.params["adapters"] += adapters
        ctx.params["model_alias"] += tuple(aliases)
        alone, model = ctx.params.pop("model_tag"), typed.get("model")
        if alone is not None:  # as in `vllm serve MODEL`
            if model not in (None, alone):
                raise ConfigError(
                    f"the model is {describe(alone)} and --model {describe(model)}; allowed: one"
                )
            ctx.params["model"] = alone
        return left

    def _read_file(
        self, ctx: click.Context, typed: Mapping[str, Any], rest: list[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return `_read` of the file that --config names, without the options that are typed."""
        if not typed.get("config"):
            return {}, []
        switches = {f for f, a in _parser()._option_string_actions.items() if a.nargs == 0}
        lists = {*LISTS}
        for option in self.params:
            if isinstance(option, click.Option) and option.multiple:
                lists |= {_field(flag) for flag in option.opts}
            if option.type.name == "boolean":
                switches |= {*option.opts, *option.secondary_opts}
        own, *_ = self.make_parser(ctx).parse_args([*rest])
        known = {_SAME.get(name, name) for name in typed if _is_given(name, typed)} | own.keys()
        entries = _read_config(typed["config"], {_field(flag) for flag in switches}, lists)
        return _read(
            [
                argument
                for name, arguments in entries
                if _SAME.get(name, name) not in known
                for argument in arguments
            ]
        )


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Parser(FlexibleArgumentParser):
    """A parser of vLLM's flags only; it reports errors as click does."""

    def error(self, message: str) -> NoReturn:
        raise click.UsageError(message, click.get_current_context(silent=True))


def _read(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of vLLM's flags, and the other arguments."""
    values, rest = _parser().parse_known_args(args)
    return vars(values), rest


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    return add_flags(parser, {*_WORKS, *_IGNORED, *_ABSENT}, given_only=True)


def _read_config(
    path: str, switches: Collection[str], lists: Collection[str]
) -> list[tuple[str, list[str]]]:
    """Return the fields in a YAML file of flags, each with the arguments that it stands for.

    switches: fields without a value; lists: those that may be given several times. An error does
    not quote the file, which may hold a key. Raises ConfigError.
    """
    yaml = load_module("yaml")
    try:
        text = Path(path).expanduser().read_text("utf-8")
        # Scalars are passed on as they are written, as on a command line: 0123 is no 83.
        content, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {describe(path)}; {error}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "it" if mark is None else f"line {mark.line + 1}"
        raise ConfigError(f"--config is {describe(path)}; {where} is not valid YAML") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config is {describe(path)}; it is no mapping of flags")
    entries = []
    for number, ((name, value), texts) in enumerate(
        zip(content.items(), written.values(), strict=True), start=1
    ):
        match = _FLAG.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ConfigError(
                f"--config is {describe(path)}; entry {number} in it has no name of a flag, such "
                "as max-model-len"
            )
        field = match[1].replace("-", "_")
        if field == "config":
            raise ConfigError(f"--config is {describe(path)}; it names another file; allowed: one")
        if value is None:
            continue
        if isinstance(value, bool) and field in switches:
            entries.append((field, [f"--{name}" if value else f"--no-{name}"]))
            continue
        if not (isinstance(value, list) and field in lists):
            value, texts = [value], [texts]
        if None in value:
            raise ConfigError(f"--config is {describe(path)}; an item of {name} in it has no value")
        is_json = match[2] is not None  # such as default-chat-template-kwargs.enable_thinking
        arguments = [
            json.dumps(item, default=str) if is_json or isinstance(item, dict | list) else text
            for item, text in zip(value, texts, strict=True)
        ]
        entries.append((field, [f"--{name}={argument}" for argument in arguments]))
    return entries


def _is_given(name: str, given: Mapping[str, Any]) -> bool:
    """Return True if the value of vLLM's flag sets an option of ours."""
    value = given.get(name)
    if name == "limit_mm_per_prompt":
        return isinstance(value, Mapping) and value.get("image") is not None
    return value is not None and (value is not False or name != "disable_uvicorn_access_log")


def _forget_environment(ctx: click.Context, name: str, nothing: object) -> None:
    """Forget the environment's value of an option that is given by another name."""
    if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        ctx.params[name] = nothing


def _as_ours(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the server and its engine by our names; other engine options stay."""
    ours = {name: value for name, value in given.items() if name not in ("config", *_OUR_NAMES)}
    theirs = {name: given[name] for name in _OUR_NAMES if _is_given(name, given)}
    if theirs.pop("disable_uvicorn_access_log", False):
        ours["log_format"] = "off"
    if (origins := theirs.pop("allowed_origins", None)) is not None:
        if not isinstance(origins, list) or not all(isinstance(text, str) for text in origins):
            raise ConfigError(
                f"--allowed-origins is {describe(origins)}; allowed: a list in JSON, such as "
                """'["https://a.example"]'"""
            )
        ours["cors_origin"] = ",".join(origins) or None
    if "api_key" in ours:
        ours["api_key"] = tuple(ours["api_key"])
    return ours | {_OUR_NAMES[name]: value for name, value in theirs.items()}


def _read_module(given: str) -> str:
    """Return NAME=PATH for that, or for an adapter in JSON. Raises ConfigError."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        module = json.loads(given)
        name, path = module["name"], module["path"]
        if not isinstance(name, str) or not isinstance(path, str) or "=" in name:
            raise ValueError("no texts, or a name that NAME=PATH cannot have")
        return f"{name}={path}"
    except (ValueError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"--lora-modules is {describe(given)}; allowed: NAME=PATH, or "
            """'{"name": ..., "path": ...}'"""
        ) from error
