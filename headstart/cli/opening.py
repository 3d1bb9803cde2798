"""From `--model` to a model that answers, with a line that says what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import note_on, open_model, resolve_model
from headstart.cli.progress import describe_loading, waiting
from headstart.cli.streams import note
from headstart.errors import ModelError
from headstart.models.files import find_folder, weight_files

if TYPE_CHECKING:
    from headstart.engine.llm import LLM

__all__ = ["announce", "announce_and_open", "folder_of"]


def announce_and_open(model: str, options: Mapping[str, Any]) -> LLM:
    """Say what the model's answers are worth, and load it.

    Raises ModelError, ConfigError or OutOfMemoryError.
    """
    with waiting(announce(model)):
        return open_model(model, options)


def announce(model: str) -> Callable[[float], str]:
    """Say what the model's answers are worth; returns what to show while it loads.

    Downloading, if need be, shows bars of its own. Raises ModelError.
    """
    if text := note_on(model):
        note(text)
    return describe_loading(model, _weights_of(folder_of(model)))


def folder_of(model: str) -> Path:
    """Where a model's files are; downloaded or made first if they are not there yet.

    Raises ModelError.
    """
    return find_folder(resolve_model(model))


def _weights_of(folder: Path) -> list[Path]:
    """The files of a model's weights; none where the loader will say what is wrong with them."""
    try:
        return [file for file in weight_files(folder) if file.stat().st_size]
    except (OSError, ModelError):
        return []
