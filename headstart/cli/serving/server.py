"""From the flags of `headstart serve` to a server that listens, and what a user reads meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headstart.cli.opening import announce, check_adapter, folder_of
from headstart.cli.options import RANDOM_MODEL, resolve_model
from headstart.cli.progress import describe_check, show_bytes, starting_line, waiting
from headstart.cli.streams import note
from headstart.cluster.options import ReplicaConfig
from headstart.errors import ConfigError, ModelError
from headstart.frontend.vllm_api.options import read_config
from headstart.imports import install, load_module
from headstart.models.files import BUILT_IN
from headstart.server.options import ServerOptions

if TYPE_CHECKING:
    import socket

__all__ = ["FIRST_QUESTION", "run_server", "take_options"]

FIRST_QUESTION = "Anna Smith is 31. Ben Jones is 45. How old is Ben Jones?"
"""What a user may ask the embedded model, which answers it right in every dtype."""

Options = TypeVar("Options", ServerOptions, ReplicaConfig)


def take_options(given: dict[str, Any], kind: type[Options]) -> Options:
    """The options of one kind, taken out of all that were given. Raises ConfigError."""
    names = {field.name for field in fields(kind)}
    said = {name: given.pop(name) for name in list(given) if name in names}
    return kind(**{name: value for name, value in said.items() if value is not None})


def run_server(
    model: str,
    engine: Mapping[str, Any],
    options: ServerOptions,
    replicas: ReplicaConfig,
    adapters: Mapping[str, Path],
) -> None:
    """Load a model, or start replicas of it, and serve it until a signal comes.

    adapters: folders by the names that requests may give. Raises AdapterError, ConfigError,
    ModelError, OutOfMemoryError or EngineError.
    """
    extra = "cluster" if replicas.is_wanted else "serve"  # which has that of serve, too
    with waiting(describe_check("importing the server")):
        launch = _import_optional("headstart.server.launch", extra)
    for name in adapters.keys() & {options.served_model_name or model, *options.model_alias}:
        raise ConfigError(f"adapter is {name!r}, as the model is; allowed: another name")
    prefixes = launch.read_prefixes(options.public_prefix)
    tracer = launch.open_tracer(options.otlp_traces_endpoint, options.served_model_name or model)
    with closing(launch.listen(options)) as at:  # a port in use is told before seconds of loading
        tenants = launch.open_tenants(options, at.getsockname()[0])
        speaks = _speaks(model)
        said = _Address(at, options, model, with_key=tenants.ask_for_keys, speaks=speaks)
        said = replace(said, shows_pool=not (speaks or replicas.is_wanted))
        if speaks:
            _check_speech(options, replicas, adapters)
            engine = _of_stages(engine)
            with _open_omni(model, engine) as omni:
                launch.serve(launch.create_speech_app(omni, model, options, tenants), at, said.tell)
        else:
            shared = {"eviction": "fair-lru"} if tenants.ask_for_keys else {}
            engine = {**shared, **engine}
            opened = _open_replicas if replicas.is_wanted else _open_engine
            for folder in adapters.values():
                check_adapter(folder, folder_of(model))
            with (
                closing(tracer) if tracer is not None else nullcontext(),
                opened(model, engine, options, replicas) as (llm, cache_api),
            ):
                asyncio.run(_load_adapters(llm, adapters))
                launch.publish(llm, prefixes)
                app = launch.create_app(llm, model, options, tenants, tracer=tracer, **cache_api)
                if not replicas.is_wanted:
                    said = replace(said, bounds=_describe_bounds(llm))
                launch.serve(app, at, said.tell)
    note("Stopped.")


def _speaks(model: str) -> bool:
    """Whether this is a model of several stages; whatever else is wrong with it is told later."""
    if model in (RANDOM_MODEL, BUILT_IN):
        return False
    with waiting(announce(model, {})), suppress(ModelError):
        return bool(load_module("headstart.models.files").is_omni(model))
    return False


def _check_speech(
    options: ServerOptions, replicas: ReplicaConfig, adapters: Mapping[str, Path]
) -> None:
    """Raise ConfigError for what a model that speaks does not do."""
    given = {
        "replicas": replicas.is_wanted,
        "adapter": bool(adapters),
        "public_prefix": bool(options.public_prefix),
        "otlp_traces_endpoint": options.otlp_traces_endpoint is not None,
        "trust_request_chat_template": options.trust_request_chat_template,
        "default_chat_template_kwargs": options.default_chat_template_kwargs is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(f"{name} is given; allowed with a model that speaks: none")


def _of_stages(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `EngineConfig` that are given. Raises ConfigError for what is of one model."""
    for name in ("tokenizer", "chat_template", "generation_config", "override_generation_config"):
        if name in engine:
            raise ConfigError(f"{name} is given; allowed with a model that speaks: none")
    return read_config(engine)


@contextmanager
def _open_omni(model: str, engine: Mapping[str, Any]) -> Iterator[Any]:
    """The stages' engines have the options; dtype and device are of the whole model."""
    of_model = {name: engine[name] for name in ("dtype", "device") if name in engine}
    of_stages = {name: value for name, value in engine.items() if name not in of_model}
    with waiting(announce(model, engine)):
        async_omni = load_module("headstart.omni.omni").AsyncOmni
        omni = async_omni(model, **of_model, options=of_stages)
    with closing(omni):
        yield omni


@contextmanager
def _open_engine(
    model: str, engine: Mapping[str, Any], options: ServerOptions, replicas: ReplicaConfig
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    with waiting(announce(model, engine)):
        async_llm = load_module("headstart.frontend.async_llm").AsyncLLM
        llm = async_llm(resolve_model(model), **engine)
    with closing(llm):
        yield llm, {}


async def _load_adapters(llm: Any, adapters: Mapping[str, Path]) -> None:
    for name, folder in adapters.items():
        await llm.load_adapter(name, folder)


@contextmanager
def _open_replicas(
    model: str, engine: Mapping[str, Any], options: ServerOptions, replicas: ReplicaConfig
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    name = _absolute(resolve_model(model))
    engine = {key: _absolute(value) if key in _PATHS else value for key, value in engine.items()}
    announce(model, engine)
    with waiting(partial(starting_line, model, replicas.least)):
        make = _import_optional("headstart.cluster.serving.cluster", "cluster").ReplicaCluster
        cluster = make(name, engine, replicas, options.drain_seconds)
    with closing(cluster):
        cache_api = load_module("headstart.cluster.serving.cache_api").router
        yield cluster.llm, {"cache_api": cache_api}


def _describe_bounds(llm: Any) -> str:
    """Describe what bounds the memory of a server, except for weights."""
    engine = llm.engine
    bounds = [f"K/V pool {show_bytes(engine.kv_cache_bytes)}"]
    if engine.tiers is not None:
        size = show_bytes(engine.tiers.queue_bytes)
        bounds.append(f"blocks and images to save and blocks to load {size} each")
    return ", ".join(bounds)


_PATHS = ("tokenizer", "chat_template", "generation_config")


def _absolute(path: str) -> str:
    """The path of what is there, for replicas, which run in another folder."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _import_optional(module: str, extra: str) -> Any:
    """A module of ours that needs what `pip install .` leaves out. Raises ConfigError."""
    try:
        return load_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: {install(extra)}") from error


@dataclass(frozen=True)
class _Address:
    """Where a server is reached, and how it is asked."""

    at: socket.socket
    options: ServerOptions
    model: str
    with_key: bool
    speaks: bool = False
    shows_pool: bool = True
    bounds: str = ""

    def tell(self) -> None:
        """Print it for the user."""
        host, port = self.at.getsockname()[:2]
        scheme = "http" if self.options.tls_cert is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        name = self.options.served_model_name or self.model
        question = "What is 2 + 2?" if self.model == RANDOM_MODEL else FIRST_QUESTION
        body: dict[str, Any] = {"model": name}
        if self.speaks:
            body["modalities"] = ["text", "audio"]
            question = "Say hello."
        body["messages"] = [{"role": "user", "content": question}]
        click.echo(f"Serving {name} at {address}")
        key = 'os.environ["HEADSTART_API_KEY"]' if self.with_key else '"none"'
        lines = [
            f"\ncurl {address}/v1/chat/completions -H 'Content-Type: application/json' \\",
            *(['  -H "Authorization: Bearer $HEADSTART_API_KEY" \\'] if self.with_key else []),
            f"  -d '{json.dumps(body)}'",
            f'\nOpenAI(base_url="{address}/v1", api_key={key})\n',
            *([f"The cache at work, in a browser: {address}"] if self.shows_pool else []),
            f"The API: {address}/docs",
            *([f"Memory bounds: {self.bounds}"] if self.bounds else []),
            "Ctrl-C stops the server.\n",
        ]
        click.secho("\n".join(lines), dim=True, err=True)  # never broken: they are to be pasted
