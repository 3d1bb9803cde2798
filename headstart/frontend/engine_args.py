"""The options of an engine in one object, as in `vllm.engine.arg_utils`, and as flags."""

import argparse
import copy
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import Field, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError
from headstart.frontend.vllm_compat import ENGINE, SERVE, read_options

# Options that are flags: vLLM has --chat-template for its server alone.
FLAGS = tuple(name for name in ENGINE if name != "chat_template")
LOG_FLAGS = ("enable_log_requests", "disable_log_requests")  # of `AsyncEngineArgs`

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNTED = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgt])|(\d{1,15})([KMGT])")
_OF_CONFIG = {option.name: option for option in fields(EngineConfig)}


def _default_of(name: str) -> Any:
    """Return an option's default; None where the engine chooses."""
    if name in _OF_CONFIG:
        return _OF_CONFIG[name].default
    values = ENGINE[name].values if name in ENGINE else []
    return copy.copy(values[0]) if values else None


class _Fields:
    """The fields of an `EngineArgs` are the model and the options that were given, so that
    `LLM(**asdict(args))` works. Those of the class are all options of vLLM's."""

    def __get__(self, args: "EngineArgs | None", kind: type) -> dict[str, Field[Any]]:
        names = FLAGS if args is None else vars(args)
        made = make_dataclass(
            kind.__name__,
            [(n, Any, field(default_factory=partial(_default_of, n))) for n in names],
        )
        return {option.name: option for option in fields(made)}


class EngineArgs(Namespace):
    """A model and its options, for `LLM.from_engine_args` or `LLM(**asdict(engine_args))`.

    Each option is an attribute, which may be set; one that was not given has its default. Raises
    ConfigError for one that cannot be followed, ModelError for a model that is not there.
    """

    __dataclass_fields__ = _Fields()

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        super().__init__(model=model, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, without the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each of vLLM's options to a parser, and return it."""
        return add_flags(parser, FLAGS)

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Take what a parser with these flags read; the program's own flags are left alone."""
        given = {name: getattr(args, name) for name in FLAGS if hasattr(args, name)}
        if given.get("model") is None:
            raise ConfigError(
                "the arguments name no model; allowed: --model, or set_defaults(model=...)"
            )
        defaults = {name: (None, _default_of(name)) for name in given}
        return cls(**{n: v for n, v in given.items() if v not in defaults[n]})

    def __getattr__(self, name: str) -> Any:
        if name in ENGINE or name in _OF_CONFIG:
            return _default_of(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM.from_engine_args`."""

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add flags as `EngineArgs` does; async_args_only: only those that an `LLM` lacks."""
        return add_flags(parser, LOG_FLAGS if async_args_only else FLAGS)


class _Switch(argparse.BooleanOptionalAction):
    """`--x` and `--no-x`; with `--enable-x` also `--disable-x`, and the other way round."""

    def __init__(self, option_strings: list[str], dest: str, inverse: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._off = {f"--no-{option_strings[0].removeprefix('--')}", inverse}
        self.option_strings = [*option_strings, *sorted(self._off - {""})]

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, flag: Any = None
    ) -> None:
        setattr(namespace, self.dest, flag not in self._off)


def add_flags(
    parser: ArgumentParser, names: Iterable[str], *, given_only: bool = False
) -> ArgumentParser:
    """Add flags for options to a parser, `--max-model-len` for max_model_len, and return it.

    given_only: flags that are not given have no default, and lists may be given in several parts.
    """
    group = parser.add_argument_group("engine")
    options = {name: (ENGINE | SERVE)[name] for name in names}
    flags = {f"--{name.replace('_', '-')}" for name in options}
    for name, option in options.items():
        flag = f"--{name.replace('_', '-')}"
        more: dict[str, Any] = {"type": str if option.kind in ("text", "texts") else read_value}
        if option.kind == "switch":
            inverse = flag  # the other of --enable-x and --disable-x
            for prefix, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                if flag.startswith(prefix):
                    inverse = other + flag.removeprefix(prefix)
            more = {"action": partial(_Switch, inverse="" if inverse in flags else inverse)}
        elif option.kind in ("list", "texts"):
            more |= {"nargs": "+", "action": "extend" if given_only else "store"}
        help_text = "no effect" if option.state == "ignored" else "see docs/vllm.md"
        if name in _OF_CONFIG:
            help_text = str(_OF_CONFIG[name].metadata["help"]).replace("%", "%%")
        default = argparse.SUPPRESS if given_only else _default_of(name)
        spelled = [flag, *option.short.split()]
        group.add_argument(*spelled, dest=name, default=default, help=help_text, **more)
    return parser


def read_value(text: str) -> Any:
    """Read a number, one with a unit such as 32k (thousands) and 32K (1,024s), JSON, or a text.

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
