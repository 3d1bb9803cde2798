"""Checking and loading of the model and adapters that a command names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import headstart
from headstart.cli.terminal import decode_argument, describe_loading, handling, note, waiting
from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError, ModelError, RequestError, UnsupportedAdapterError
from headstart.imports import load_module
from headstart.models.files import (
    BUILT_IN,
    file_shapes,
    find_folder,
    find_gguf,
    read_json,
    tensor_shapes,
    weight_files,
)
from headstart.models.tokenizer import has_vocabulary, load_tokenizer
from headstart.validation import describe

if TYPE_CHECKING:
    from headstart.frontend.llm import LLM

RANDOM_MODEL = "demo"
NOTES: Mapping[str, str] = {
    BUILT_IN: (
        "headstart-tiny, 8 million parameters, looks things up in a document that begins with "
        "a heading, and can do little else. A model that chats: headstart chat "
        "--model Qwen/Qwen3-0.6B-GGUF:Q8_0 (a download of 0.6 GB); headstart models recommend "
        "lists others."
    ),
    RANDOM_MODEL: (
        "The demo model is a small Llama with random weights: its answers are noise, its times "
        "are real."
    ),
}
# Some weights of headstart-tiny were set by formulas. With these options they have too few bits.
_TOO_FEW_BITS = {"kv_cache_dtype": ("int8",), "weights": ("int5", "int4")}


def quality_note(model: str, engine: Mapping[str, Any]) -> str:
    """Return a note on the quality of a model's answers; empty for most models.

    engine: the engine's options that the user has set.
    """
    text = NOTES.get(model, "")
    narrow_kinds = [
        f"{k} {engine[k]}" for k, kinds in _TOO_FEW_BITS.items() if engine.get(k) in kinds
    ]
    if model != BUILT_IN or not narrow_kinds:
        return text
    return f"{text} With {' and '.join(narrow_kinds)} most of its answers are wrong."


def resolve_model(model: str) -> str:
    """Return the folder or hub name of the model that `--model` names."""
    if model != RANDOM_MODEL:
        return model
    return str(load_module("headstart.models.demo").demo_model_path())


def announce_and_open(model: str, options: Mapping[str, Any]) -> LLM:
    """Show the note on a model, and load it. Raises ModelError, ConfigError, OutOfMemoryError."""
    with waiting(announce(model, options)):
        return headstart.LLM(resolve_model(model), **options)


def announce(model: str, engine: Mapping[str, Any]) -> Callable[[float], str]:
    """Show the note on a model; return a function for `waiting`. Raises ModelError."""
    if text := quality_note(model, engine):
        note(text)
    folder = folder_of(model)
    try:
        files = [file for file in weight_files(folder) if file.stat().st_size]
    except (OSError, ModelError):  # the loader reports it
        files = []
    return describe_loading(model, files)


def folder_of(model: str) -> Path:
    """Return the folder of a model, after downloading or converting it if necessary.

    Raises ModelError.
    """
    name = resolve_model(model)
    with exiting_on_interrupt():
        name = str(find_gguf(name) or name)
    message = f"reading configuration and tokenizer of {model}"
    with waiting(message) if Path(name).suffix == ".gguf" else exiting_on_interrupt():
        return find_folder(name)


def read_adapter(options: dict[str, Any]) -> Path | None:
    """Remove `--adapter` from the options and return its folder. Raises AdapterError."""
    folder = options.pop("adapter")
    return None if folder is None else _adapter_folder(folder, options)


def read_adapters(options: dict[str, Any]) -> dict[str, Path]:
    """Remove the adapters (NAME=PATH) from the options and return their folders by name.

    Raises AdapterError or ConfigError.
    """
    folders: dict[str, Path] = {}
    for adapter in options.pop("adapters"):
        name, _, folder = adapter.partition("=")
        if not name or not folder or name in folders:
            raise ConfigError(f"adapter is {describe(adapter)}; allowed: NAME=PATH, each name once")
        folders[name] = _adapter_folder(folder, options)
    return folders


def _adapter_folder(name: str, options: Mapping[str, Any]) -> Path:
    folder = Path(decode_argument(name)).expanduser().absolute()
    # Imported here because it loads torch, which `headstart --help` must not do.
    lora = load_module("headstart.models.lora_files")
    lora.read_settings(folder, options["max_lora_rank"] or EngineConfig.max_lora_rank)
    return folder


def folder_for_text(model: str, adapter: Path | None) -> Path:
    """Return a model's folder, after checking that it has a tokenizer and fits the adapter.

    Raises RequestError if the model has no tokenizer. May raise ModelError or
    UnsupportedAdapterError too.
    """
    folder = folder_of(model)
    is_model = (folder / "config.json").is_file()
    if is_model and not has_vocabulary(folder) and load_tokenizer(folder) is None:
        raise RequestError(
            f"{folder} has no tokenizer (tokenizer.json, or an older format); add the model's "
            "tokenizer, or use token ids in Python or with a server"
        )
    if adapter is not None:
        check_adapter(adapter, folder)
    return folder


def check_adapter(adapter: Path, model: Path) -> None:
    """Raise UnsupportedAdapterError if the adapter's layers have other sizes than the model's.

    Reads only the headers of files, before the model is loaded. Loading checks everything else.
    """
    try:
        packed = "quantization_config" in read_json(model / "config.json")
        layers = {} if packed else tensor_shapes(model)
        matrices = file_shapes(adapter / "adapter_model.safetensors")
    except ModelError:
        return
    for name, shape in matrices.items():
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        base = layers.get(f"{layer}.weight", ())
        if len(shape) == len(base) == 2 and shape[1] not in base:
            raise UnsupportedAdapterError(
                f"{adapter} is for another model: {layer} has {shape[1]} inputs in the adapter and "
                f"{base[1]} in the model"
            )


@contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once during a download.

    After KeyboardInterrupt, the process would wait for the hub's threads, which may still download
    gigabytes. The partial files are removed, because another process cannot resume them.
    """

    def end(number: int, frame: object) -> None:
        parts = []
        for handle in Path("/proc/self/fd").glob("*"):
            with suppress(OSError):  # the file may be closed
                if (path := handle.readlink()).suffix == ".incomplete":
                    parts.append(path)
        suffix = "; complete files stay in the cache" if parts else ""
        click.echo(f"\nheadstart: interrupted{suffix}", err=True)
        for path in parts:  # last, because the hub's threads may open them again
            path.unlink(missing_ok=True)
        os._exit(128 + number)

    with handling(end, signal.SIGINT):
        yield
