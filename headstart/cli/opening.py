"""From `--model` to a model that answers, with a line that says what is waited for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.options import note_on, open_model, resolve_model
from headstart.cli.progress import converting_line, describe_loading, waiting
from headstart.cli.streams import as_typed, hiding_typed, note
from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError, ModelError, RequestError, UnsupportedAdapterError
from headstart.models.files import (
    file_shapes,
    find_folder,
    find_gguf,
    read_json,
    tensor_shapes,
    weight_files,
)
from headstart.models.lora.settings import read_settings
from headstart.models.tokenizer import has_vocabulary, load_tokenizer
from headstart.validation import describe

if TYPE_CHECKING:
    from headstart.frontend.llm import LLM

__all__ = [
    "announce",
    "announce_and_open",
    "check_adapter",
    "check_tokenizer",
    "ending_at_once",
    "folder_of",
    "load_adapter",
    "read_adapter",
    "read_adapters",
]


def announce_and_open(model: str, options: Mapping[str, Any]) -> LLM:
    """Say what the model's answers are worth, and load it.

    Raises ModelError, ConfigError or OutOfMemoryError.
    """
    describe = announce(model, options)
    with hiding_typed(), waiting(describe):
        return open_model(model, options)


def announce(model: str, engine: Mapping[str, Any]) -> Callable[[float], str]:
    """Say what the model's answers are worth; returns what to show while it loads.

    engine: the engine's options that were given.

    Downloading, if need be, shows bars of its own. Raises ModelError.
    """
    if text := note_on(model, engine):
        note(text)
    return describe_loading(model, _weights_of(folder_of(model)))


def folder_of(model: str) -> Path:
    """Where a model's files are; downloaded or made first if they are not there yet.

    Raises ModelError.
    """
    found = resolve_model(model)
    with ending_at_once():
        found = str(find_gguf(found) or found)
    if Path(found).suffix == ".gguf":
        with hiding_typed(), waiting(partial(converting_line, model)):
            return find_folder(found)
    with ending_at_once():
        return find_folder(found)


def read_adapter(options: dict[str, Any]) -> Path | None:
    """The folder of the adapter that the options name; its option is taken out of them.

    Raises AdapterError for what is no adapter, before the model is loaded.
    """
    named = options.pop("adapter")
    return None if named is None else _adapter_folder(named, options)


def read_adapters(options: dict[str, Any]) -> dict[str, Path]:
    """The folders of the adapters that the options name as NAME=PATH, by name; taken out of them.

    Raises AdapterError as `read_adapter` does, and ConfigError for what is written otherwise.
    """
    found: dict[str, Path] = {}
    for given in options.pop("adapters"):
        name, _, folder = given.partition("=")
        if not name or not folder or name in found:
            raise ConfigError(f"adapter is {describe(given)}; allowed: NAME=PATH, each name once")
        found[name] = _adapter_folder(folder, options)
    return found


def _adapter_folder(named: str, options: Mapping[str, Any]) -> Path:
    folder = Path(as_typed(named)).expanduser().absolute()
    read_settings(folder, options["max_lora_rank"] or EngineConfig.max_lora_rank)
    return folder


def check_tokenizer(folder: Path) -> None:
    """Raise RequestError for a model that takes no text, DamagedModelError for half a tokenizer.

    Before the model is loaded; a folder that is no model is left to the loader.
    """
    if not (folder / "config.json").is_file() or has_vocabulary(folder):
        return
    if load_tokenizer(folder) is None:
        raise RequestError(
            f"{folder} has no tokenizer (tokenizer.json, or what stands for it), so it takes no "
            "text; get the model's own, or give token ids in Python or to a server"
        )


def check_adapter(adapter: Path | None, model: Path) -> None:
    """Raise UnsupportedAdapterError if a layer's inputs are not those of the model's layer.

    Both are read from the headers of files, before the model is loaded. What these do not tell
    (weights in another format, layers of other names) is checked when the adapter is loaded.
    """
    if adapter is None:
        return
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
                f"{adapter} is for another model: its matrices of {layer} take {shape[1]} inputs, "
                f"here the layer has {base[1]}"
            )


def load_adapter(llm: LLM, folder: Path | None) -> str | None:
    """Load an adapter under the name of its folder; returns the name, None for none.

    Raises AdapterError, and ConfigError if the engine takes none.
    """
    return None if folder is None else llm.load_adapter(folder.name or "adapter", folder).name


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process while something is downloaded.

    As an exception it would first wait for the files under way, which may be gigabytes: the hub's
    library downloads in threads, and Python waits for these. It gives each part of a file a new
    name, and cannot go on with one that an ended process left: these are removed.
    """

    def end(number: int, frame: object) -> None:
        parts = _parts_of_files()
        for part in parts:
            part.unlink(missing_ok=True)
        kept = "; the files that are whole are kept" if parts else ""
        click.echo(f"\nheadstart: interrupted{kept}", err=True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _parts_of_files() -> list[Path]:
    """The files that this process is downloading; none where the system does not tell."""
    found = []
    for handle in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            found.append(handle.readlink())
    return [path for path in found if path.suffix == ".incomplete"]


def _weights_of(folder: Path) -> list[Path]:
    """The files of a model's weights; none where the loader will say what is wrong with them."""
    try:
        return [file for file in weight_files(folder) if file.stat().st_size]
    except (OSError, ModelError):
        return []
