"""Commands `headstart serve` and `headstart keys`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.opening import RANDOM_MODEL, announce, check_adapter, folder_of, resolve_model
from headstart.cli.terminal import count, note, show_bytes, waiting
from headstart.cluster.options import ReplicaConfig
from headstart.errors import ConfigError, ModelError
from headstart.frontend.vllm_compat import read_config
from headstart.imports import install, load_module
from headstart.models.files import BUILT_IN, is_omni
from headstart.server.keys import KeyFolder
from headstart.server.options import ServerOptions

if TYPE_CHECKING:
    import socket

    from headstart.frontend.async_llm import AsyncLLM


FIRST_QUESTION = "Anna Smith is 31. Ben Jones is 45. How old is Ben Jones?"
"""A question that headstart-tiny answers correctly with every dtype."""
_PATHS = ("tokenizer", "chat_template", "generation_config")


def run_server(
    model: str,
    engine: Mapping[str, Any],
    options: ServerOptions,
    replicas: ReplicaConfig,
    adapters: Mapping[str, Path],
) -> None:
    """Load a model, or start replicas of it, and serve it until a signal arrives.

    adapters: folders of adapters by name. Raises AdapterError, ConfigError, ModelError,
    OutOfMemoryError or EngineError.
    """
    extra = "cluster" if replicas.is_wanted else "serve"  # cluster includes serve
    with waiting("importing the server"):
        launch = _import_optional("headstart.server.launch", extra)
    for name in adapters.keys() & {options.served_model_name or model, *options.model_alias}:
        raise ConfigError(f"adapter is {name!r}, which is the model's name; allowed: another name")
    prefixes = launch.read_prefixes(options.public_prefix)
    tracer = launch.open_tracer(options.otlp_traces_endpoint, options.served_model_name or model)
    with ExitStack() as stack:
        # Report a port in use before loading.
        socket = stack.enter_context(closing(launch.listen(options)))
        tenants = launch.open_tenants(options, socket.getsockname()[0])
        address = Address(socket, options, model, with_key=tenants.requires_keys)
        if _detect_omni(model):
            address.has_audio, address.shows_pool = True, False
            _check_speech(options, replicas, adapters, engine)
            config = read_config(engine)  # dtype, device, and the options of stages
            of_model = {name: config.pop(name) for name in ("dtype", "device") if name in config}
            with waiting(announce(model, engine)):
                make = load_module("headstart.omni.omni").AsyncOmni
                omni = stack.enter_context(closing(make(model, **of_model, options=config)))
            app = launch.create_speech_app(omni, model, options, tenants)
        else:
            if tenants.requires_keys:
                engine = {"eviction": "fair-lru", **engine}
            for folder in adapters.values():
                check_adapter(folder, folder_of(model))
            if tracer is not None:
                stack.enter_context(closing(tracer))
            extra_options = {}
            if replicas.is_wanted:
                address.shows_pool = False
                cluster = _open_replicas(model, engine, replicas, options.drain_seconds)
                llm = stack.enter_context(closing(cluster)).llm
                extra_options["cache_api"] = load_module("headstart.cluster.serving.llm").router
            else:
                with waiting(announce(model, engine)):
                    make = load_module("headstart.frontend.async_llm").AsyncLLM
                    llm = stack.enter_context(closing(make(resolve_model(model), **engine)))
                address.memory_limits = _describe_memory(llm)
            for name, folder in adapters.items():
                asyncio.run(llm.load_adapter(name, folder))
            launch.publish(llm, prefixes)
            app = launch.create_app(llm, model, options, tenants, tracer=tracer, **extra_options)
        launch.serve(app, socket, address.show)
    note("Stopped.")


def _detect_omni(model: str) -> bool:
    """Return True for an omni model. If a model cannot be read, its loader reports the error."""
    if model in (RANDOM_MODEL, BUILT_IN):
        return False
    with waiting(announce(model, {})), suppress(ModelError):
        return is_omni(model)
    return False


def _check_speech(
    options: ServerOptions,
    replicas: ReplicaConfig,
    adapters: Mapping[str, Path],
    engine: Mapping[str, Any],
) -> None:
    """Raise ConfigError for options that omni models do not support."""
    refused = {
        "replicas": replicas.is_wanted,
        "adapter": bool(adapters),
        "public_prefix": bool(options.public_prefix),
        "otlp_traces_endpoint": options.otlp_traces_endpoint is not None,
        "trust_request_chat_template": options.trust_request_chat_template,
        "default_chat_template_kwargs": options.default_chat_template_kwargs is not None,
        **{name: name in engine for name in (*_PATHS, "override_generation_config")},
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{name} is set; allowed: only with a model that generates only text")


def _open_replicas(
    model: str, engine: Mapping[str, Any], replicas: ReplicaConfig, drain_seconds: float
) -> Any:
    name = _absolute(resolve_model(model))
    engine = {key: _absolute(value) if key in _PATHS else value for key, value in engine.items()}
    announce(model, engine)
    with waiting(f"starting {count(replicas.least, 'replica')} of {model}"):
        make = _import_optional("headstart.cluster.serving.cluster", "cluster").ReplicaCluster
        return make(name, engine, replicas, drain_seconds)


def _absolute(path: str) -> str:
    """Make the path of an existing file absolute, since replicas run in another folder."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _import_optional(module: str, extra: str) -> Any:
    """Import a module that needs an extra of the package. Raises ConfigError."""
    try:
        return load_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: {install(extra)}") from error


@dataclass
class Address:
    """The address of a server, and an example of a request.

    with_key: requests need an API key. has_audio: the model generates audio. shows_pool: the server
    has a page that shows the cache. memory_limits: the limits as a string; empty if unknown.
    """

    socket: socket.socket
    options: ServerOptions
    model: str
    with_key: bool
    has_audio: bool = False
    shows_pool: bool = True
    memory_limits: str = ""

    def show(self) -> None:
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.options.tls_cert is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        name = self.options.served_model_name or self.model
        question = "What is 2 + 2?" if self.model == RANDOM_MODEL else FIRST_QUESTION
        body: dict[str, Any] = {"model": name}
        if self.has_audio:
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
            *([f"Memory limits: {self.memory_limits}"] if self.memory_limits else []),
            "Ctrl-C stops the server.\n",
        ]
        click.secho("\n".join(lines), dim=True, err=True)  # without breaking lines, for copying


_folder = partial(
    click.option,
    "--keys-folder",
    "folder",
    envvar="HEADSTART_KEYS_FOLDER",
    show_envvar=True,
    help="Folder of the keys; default: in your data folder.",
)


@click.group()
def keys() -> None:
    """Add, list or remove API keys. A running server applies changes at once."""


@keys.command()
@click.argument("name")
@click.option("--group", help="Keys of a group are one tenant and share cached blocks.")
@click.option(
    "--weight",
    type=float,
    default=1.0,
    show_default=True,
    help="Weight of the tenant's share when the cache is full.",
)
@click.option("--admin", is_flag=True, help="The key may also manage the server.")
@_folder()
def add(name: str, group: str | None, weight: float, admin: bool, folder: str | None) -> None:
    """Create a key and show it once. Only its hash is stored."""
    keys = KeyFolder(folder)
    key = keys.add(name, group=group, weight=weight, admin=admin)
    note(f"the key of {name}, shown only this time; {keys.file} has only its hash:")
    click.echo(key)


@keys.command(name="list")
@_folder()
def list_keys(folder: str | None) -> None:
    """List the keys."""
    rows = KeyFolder(folder).read()
    if not rows:
        note("there are no keys; headstart keys add NAME creates a key")
        return
    width = max(len(key.name) for key in rows)
    groups = max(len(key.group or "-") for key in rows)
    for key in rows:
        date = time.strftime("%Y-%m-%d", time.localtime(key.created))
        line = f"{key.name:<{width}}  {key.group or '-':<{groups}}  weight {key.weight:g}  {date}"
        click.echo(f"{line}  admin" if key.admin else line)


@keys.command()
@click.argument("name")
@_folder()
def rm(name: str, folder: str | None) -> None:
    """Remove a key. A running server refuses it at once."""
    KeyFolder(folder).remove(name)
    note(f"{name} is removed")


def _describe_memory(llm: AsyncLLM) -> str:
    """Describe the memory limits of an engine's caches."""
    facts, tiers = llm.frontend.facts, llm.tiers
    parts = []
    if llm.kv_cache_bytes:  # without K/V, all layers are recurrent
        tokens = llm.num_blocks * llm.block_size
        pool = f"K/V pool {show_bytes(llm.kv_cache_bytes)} for {tokens:,} tokens"
        if facts.num_window_blocks:
            tokens = facts.num_window_blocks * llm.block_size
            pool += f" ({tokens:,} in layers with a sliding window of {facts.window:,} tokens)"
        parts.append(pool)
    if facts.num_states:
        size = show_bytes(facts.state_bytes)
        parts.append(f"{facts.num_states:,} states of recurrent layers {size}")
    if tiers is not None:
        size = show_bytes(tiers.queue_bytes)
        parts.append(f"queue of blocks and images to save {size}, queue of blocks to load {size}")
    return ", ".join(parts)
