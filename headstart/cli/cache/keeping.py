"""Prefixes outlive `headstart run` and `chat` unless told otherwise, and a line says where."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headstart.cli.progress import show_bytes
from headstart.cli.streams import note
from headstart.engine.config import EngineConfig, make_config
from headstart.errors import ConfigError
from headstart.tiers import default_folder, make_folder

__all__ = ["keep_prefixes", "shorten_home", "size_of"]


def keep_prefixes(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options with a folder for prefixes; says how much is kept there.

    Without one that can be used, nothing is kept. Raises ConfigError for a folder that was given.
    """
    options = dict(engine)
    if "cache_dir" not in options:
        try:
            make_folder(default_folder())
        except (ConfigError, RuntimeError) as error:  # the user may have no home
            note(f"no prefixes are kept: {error}")
            return options
        options["cache_dir"] = str(default_folder())
    config = make_config(options)
    folder = config.kept_folder
    if folder is not None and config.enable_prefix_caching:
        make_folder(folder)
        kept = show_bytes(size_of(folder))
        most = show_bytes(options.get("cache_dir_bytes", EngineConfig.cache_dir_bytes))
        place = f"prefixes are kept in {shorten_home(folder)}: {kept} of {most}"
        note(f"{place}; --cache-dir off keeps none")
    return options


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
