"""vLLM's `EngineArgs`: the options of an engine in one object."""

from pathlib import Path
from typing import Any

from headstart.engine.vllm_api.options import ENGINE, read_options

__all__ = ["AsyncEngineArgs", "EngineArgs"]


class EngineArgs:
    """A model and its options, for `LLM.from_engine_args`.

    Each option is an attribute. Raises ConfigError for one that cannot be followed, ModelError for
    a model that is not there.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        self.model = model
        self.options = options

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("options", {}):
            return self.options[name]
        raise ENGINE.missing(name)


class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`, for `AsyncLLM.from_engine_args`."""
