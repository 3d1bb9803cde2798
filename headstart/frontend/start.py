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
    from headstart.engine.driver import Driver
    from headstart.engine.engine import Engine
    from headstart.frontend.chat.requests import ChatRequests

__all__ = ["Started", "start_engine"]


class Started(NamedTuple):
    """An engine, the chats that are made requests of it, and the driver that runs its steps.

    sampling: for calls that bring no parameters.
    """

    engine: Engine
    chats: ChatRequests
    driver: Driver
    sampling: SamplingParams


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
    loading = load_module("headstart.engine.startup.loading")
    engine = loading.load_engine(
        model,
        tokenizer_folder=read.tokenizer,
        ready_memory=memory,
        is_observed=is_observed,
        **read.config,
    )
    chats = load_module("headstart.frontend.chat.requests").ChatRequests(engine, read.chat_template)
    driver = load_module("headstart.engine.driver").Driver(engine)
    return Started(engine, chats, driver, read.sampling)
