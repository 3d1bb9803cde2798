"""From the name of a model to an engine: what needs no torch is done before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.engine.config import make_config
from headstart.engine.params import SamplingParams
from headstart.frontend.vllm_compat import read_options
from headstart.imports import load_module
from headstart.models.prefetch import read_ahead

if TYPE_CHECKING:
    from headstart.engine.driver import LocalDriver
    from headstart.engine.engine import EngineCore
    from headstart.frontend.chat.requests import ChatRequests
    from headstart.frontend.frontend import Frontend

__all__ = ["Started", "start_engine"]


class Started(NamedTuple):
    """A frontend, its chats, the driver of the engine, and the engine itself.

    sampling: for calls that bring no parameters.
    """

    frontend: Frontend
    chats: ChatRequests
    driver: LocalDriver
    sampling: SamplingParams
    engine: EngineCore


def start_engine(
    model: str | Path, options: dict[str, Any], *, is_observed: bool = False
) -> Started:
    """An engine for a model by path or hub name; `options` are those of `LLM(...)`.

    Wrong options and files are told before torch is imported, which takes seconds, and memory for
    the weights is got meanwhile. is_observed: see `make_parts`.
    Raises ConfigError, ModelError or OutOfMemoryError.
    """
    read = read_options(model, options)
    config = make_config(read.config)
    memory = read_ahead(model, config.dtype, config.device, config.weights)
    loading = load_module("headstart.engine.loading")
    engine, tokenizer = loading.load_engine(
        model,
        tokenizer_folder=read.tokenizer,
        ready_memory=memory,
        is_observed=is_observed,
        **read.config,
    )
    frontend = load_module("headstart.frontend.frontend").make_frontend(engine, tokenizer)
    chats = load_module("headstart.frontend.chat.requests").ChatRequests(
        frontend, read.chat_template
    )
    driver = load_module("headstart.engine.driver").LocalDriver(engine)
    return Started(frontend, chats, driver, read.sampling, engine)
