"""The options of an engine in one object, as in `vllm.engine.arg_utils`."""

from dataclasses import Field, fields, make_dataclass
from pathlib import Path
from typing import Any

from headstart.engine.vllm_api.options import ENGINE, read_options
from headstart.engine.vllm_api.signatures import check_calls
from headstart.errors import ConfigError
from headstart.validation import describe

__all__ = ["AsyncEngineArgs", "EngineArgs", "require_engine_args"]


@check_calls(ConfigError)
class EngineArgs:
    """A model and its options, for `LLM.from_engine_args`.

    Each option is an attribute. Raises ConfigError for one that cannot be followed, ModelError for
    a model that is not there.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        self.model = model
        self.options = options

    @property
    def __dataclass_fields__(self) -> dict[str, Field[Any]]:
        """The model and the options that were given, so that `LLM(**asdict(args))` works."""
        made = make_dataclass("EngineArgs", ["model", *self.options])
        return {field.name: field for field in fields(made)}

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("options", {}):
            return self.options[name]
        raise ENGINE.missing(name)


class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`, for `AsyncLLM.from_engine_args`."""


def require_engine_args(given: object) -> EngineArgs:
    """What is given if that is an `EngineArgs`. Raises ConfigError."""
    if not isinstance(given, EngineArgs):
        raise ConfigError(f"engine_args is {describe(given)}; allowed: an EngineArgs")
    return given
