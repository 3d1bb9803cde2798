"""The options of an engine in one object, as in `vllm.engine.arg_utils`."""

from argparse import ArgumentParser, Namespace
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Self

from headstart.errors import ConfigError
from headstart.frontend.vllm_api.command_line import (
    FLAGS,
    LOG_FLAGS,
    add_flags,
    default_of,
    read_flags,
)
from headstart.frontend.vllm_api.earlier import ENGINE_ARGS_MEMBERS_REFUSED
from headstart.frontend.vllm_api.options import ENGINE, read_options
from headstart.frontend.vllm_api.rows import Names, refused
from headstart.frontend.vllm_api.signatures import check_calls
from headstart.validation import check_flag, describe

__all__ = ["AsyncEngineArgs", "EngineArgs", "require_engine_args"]

_MEMBERS = {**ENGINE.rows, **refused(ENGINE_ARGS_MEMBERS_REFUSED)}


class _Fields:
    """The fields of an `EngineArgs`: the model and the options that were given, so that
    `LLM(**asdict(args))` works. Those of the class: every option of vLLM's."""

    def __get__(self, args: "EngineArgs | None", kind: type) -> dict[str, Field[Any]]:
        names = FLAGS if args is None else ("model", *args.options)
        made = make_dataclass(kind.__name__, [(name, Any, _field_of(name)) for name in names])
        return {one.name: one for one in fields(made)}


def _field_of(name: str) -> Field[Any]:
    made: Field[Any] = field(default_factory=lambda: default_of(name))
    return made


@check_calls(ConfigError)
class EngineArgs:
    """A model and its options, for `LLM.from_engine_args` or `LLM(**asdict(engine_args))`.

    Each option is an attribute, which may be set; one that was not given has its default. Raises
    ConfigError for one that cannot be followed, ModelError for a model that is not there.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        self.__dict__.update(options, model=model)

    @property
    def options(self) -> dict[str, Any]:
        """Those that were given, without the model."""
        return {name: value for name, value in self.__dict__.items() if name != "model"}

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """The parser, with a flag for each of vLLM's options."""
        return add_flags(parser, FLAGS)

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Those that a parser with these flags read; flags of the program's own are left alone."""
        return cls(**read_flags(args))

    __dataclass_fields__ = _Fields()

    def __getattr__(self, name: str) -> Any:
        if not ENGINE.knows(name):
            raise Names(type(self).__name__, _MEMBERS, ConfigError, ENGINE.own).missing(name)
        return default_of(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change the model or an option. Raises ConfigError; nothing is changed then."""
        given = {**self.__dict__, name: value}
        read_options(given.pop("model"), given)
        self.__dict__[name] = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __repr__(self) -> str:
        given = {"model": self.model, **self.options}
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__name__}({shown})"


class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`, for `AsyncLLM.from_engine_args`."""

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """As for `EngineArgs`; async_args_only: those alone that an `LLM` does not take."""
        only = check_flag("async_args_only", async_args_only)
        return add_flags(parser, LOG_FLAGS if only else FLAGS)


def require_engine_args(given: object) -> EngineArgs:
    """What is given if that is an `EngineArgs`. Raises ConfigError."""
    if not isinstance(given, EngineArgs):
        raise ConfigError(f"engine_args is {describe(given)}; allowed: an EngineArgs")
    return given
