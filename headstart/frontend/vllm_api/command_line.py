"""vLLM's engine options as flags of a program's own command line."""

import argparse
import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError
from headstart.frontend.vllm_api.earlier import ENGINE_ACCEPTED, ENGINE_REFUSED
from headstart.frontend.vllm_api.flags import LISTS, SHORT, SWITCHES, TEXTS
from headstart.frontend.vllm_api.options import ENGINE
from headstart.frontend.vllm_api.rows import Row, Verdict, accepted, refused
from headstart.validation import describe

__all__ = ["FLAGS", "LOG_FLAGS", "add_flags", "default_of", "read_flags", "read_value"]

_NO_FLAGS = {"chat_template", *accepted(ENGINE_ACCEPTED), *refused(ENGINE_REFUSED)}
FLAGS = tuple(name for name in ENGINE.rows if name not in _NO_FLAGS)
"""Options that are flags: those of `EngineArgs`."""
LOG_FLAGS = ("enable_log_requests", "disable_log_requests")
"""Those that vLLM's `AsyncEngineArgs` has beside them."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNTED = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgt])|(\d{1,15})([KMGT])")
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}


class _Switch(argparse.BooleanOptionalAction):
    """`--x` and `--no-x`; beside `--enable-x` also `--disable-x`, and the other way round."""

    def __init__(self, option_strings: list[str], dest: str, inverse: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._off = {f"--no-{option_strings[0].removeprefix('--')}", inverse}
        self.option_strings = [*option_strings, *sorted(self._off - {""})]

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, flag: Any = None
    ) -> None:
        setattr(namespace, self.dest, flag not in self._off)


def add_flags(
    parser: argparse.ArgumentParser,
    names: Iterable[str],
    rows: Mapping[str, Row] = ENGINE.rows,
    *,
    given_only: bool = False,
) -> argparse.ArgumentParser:
    """The parser, with `--max-model-len` for the option max_model_len. Raises ConfigError.

    given_only: flags that are not given have no default, and lists may be given in several parts.
    """
    if not isinstance(parser, argparse.ArgumentParser):
        raise ConfigError(f"parser is {describe(parser)}; allowed: an argparse.ArgumentParser")
    spellings = {name: _spell(name) for name in names}
    flags = [flag for spelled in spellings.values() for flag in spelled]
    _refuse_taken(parser, flags)
    group = parser.add_argument_group("engine")
    for name, spelled in spellings.items():
        row = rows[name]
        more: dict[str, Any] = {"type": str if name in TEXTS else read_value}
        if name in SWITCHES or any(isinstance(value, bool) for value in row.allowed):
            inverse = _inverse(spelled[0])
            more = {"action": partial(_Switch, inverse="" if inverse in flags else inverse)}
        elif name in LISTS:
            more |= {"nargs": "+", "action": "extend" if given_only else "store"}
        default = argparse.SUPPRESS if given_only else default_of(name)
        group.add_argument(*spelled, dest=name, default=default, help=_help(row), **more)
    return parser


def read_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options that differ from their defaults; `model` is among them. Raises ConfigError."""
    if not isinstance(namespace, argparse.Namespace):
        raise ConfigError(f"args is {describe(namespace)}; allowed: an argparse.Namespace")
    found = {name: getattr(namespace, name) for name in FLAGS if hasattr(namespace, name)}
    if found.get("model") is None:
        raise ConfigError(
            "the arguments name no model; allowed: --model, or set_defaults(model=...)"
        )
    return {name: value for name, value in found.items() if not _is_default(name, value)}


def default_of(name: str) -> Any:
    """What an option is where it is not given; None where that is for the engine to choose."""
    default = _DEFAULTS.get(name, MISSING)
    if default is not MISSING:
        return default
    row = ENGINE.rows.get(name)
    return copy.copy(row.allowed[0]) if row is not None and row.allowed else None


def _spell(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *SHORT.get(name, ())]


def _inverse(flag: str) -> str:
    """The other of `--enable-x` and `--disable-x`; "" for any other flag."""
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(one):
            return other + flag.removeprefix(one)
    return ""


def _refuse_taken(parser: argparse.ArgumentParser, flags: Iterable[str]) -> None:
    """Raise ConfigError if a parser that resolves no conflicts has one of these flags."""
    taken = [flag for flag in flags if flag in parser._option_string_actions]
    if taken and parser.conflict_handler == "error":
        shown = ", ".join(taken[:3]) + (f" and {len(taken) - 3} more" if len(taken) > 3 else "")
        raise ConfigError(
            f"the parser has {shown} already; allowed: add_cli_args once, on a parser without "
            'flags of these names, or one with conflict_handler="resolve"'
        )


def _is_default(name: str, value: object) -> bool:
    default = default_of(name)
    return value is None or (type(value) is type(default) and value == default)


def _help(row: Row) -> str:
    says = row.note if row.verdict is Verdict.WORKS else f"{row.verdict.value}: {row.note}"
    return says.replace("%", "%%")


def read_value(text: str) -> Any:
    """A number, a number of thousands or of 1,024s such as 32k and 32K, JSON, None, or a text.

    >>> read_value("32k"), read_value("0.9"), read_value("auto")
    (32000, 0.9, 'auto')
    """
    if text in ("", "None"):
        return None
    counted = _COUNTED.fullmatch(text.strip())
    if counted is not None:
        number, unit, whole, binary = counted.groups()
        return int(float(number) * _UNITS[unit]) if unit else int(whole) * _BINARY_UNITS[binary]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
