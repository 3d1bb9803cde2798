"""Prefixes outlive `headstart run` and `chat` unless told otherwise, and a line says where."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headstart.cli.progress import show_bytes
from headstart.cli.streams import note
from headstart.engine.config import EngineConfig, make_config
from headstart.errors import ConfigError
from headstart.tiers import default_folder, make_folder

__all__ = ["Keeping", "keep_prefixes", "shorten_home", "size_of"]


class Keeping(NamedTuple):
    """The engine's options with a folder for prefixes, None for nowhere; why, if that failed."""

    options: dict[str, Any]
    folder: Path | None
    failure: str = ""

    def tell(self) -> None:
        """Say where prefixes are kept and how much is there, or why none are."""
        if self.failure:
            note(f"no prefixes are kept: {self.failure}")
        if self.folder is not None:
            kept = show_bytes(size_of(self.folder))
            most = show_bytes(self.options.get("cache_dir_bytes", EngineConfig.cache_dir_bytes))
            where = shorten_home(self.folder)
            if os.access(self.folder, os.W_OK):
                note(f"prefixes are kept in {where}: {kept} of {most}; --cache-dir off keeps none")
            else:
                note(f"prefixes are read from {where}, which cannot be written: {kept}")


def keep_prefixes(engine: Mapping[str, Any]) -> Keeping:
    """Choose a folder for prefixes, and make it; nothing is said before the start has succeeded.

    Without one that can be used, nothing is kept. Raises ConfigError for a folder that was given.
    """
    options = dict(engine)
    if "cache_dir" not in options:
        try:
            make_folder(default_folder())
        except (ConfigError, RuntimeError) as error:  # the user may have no home
            return Keeping(options, None, str(error))
        options["cache_dir"] = str(default_folder())
    config = make_config(options)
    folder = config.kept_folder
    if folder is None or not config.enable_prefix_caching:
        return Keeping(options, None)
    make_folder(folder)
    return Keeping(options, folder)


def size_of(folder: Path) -> int:
    """Bytes of all blocks in a folder, which other processes may change meanwhile."""
    nbytes = 0
    for file in folder.glob("*.kv"):
        with suppress(FileNotFoundError):
            nbytes += file.stat().st_size
    return nbytes


def shorten_home(path: Path) -> str:
    """The path with ~ for the user's home."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
