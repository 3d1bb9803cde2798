"""Opens the store that an engine's options ask for."""

from pathlib import Path

from headstart.engine.config import EngineConfig
from headstart.tiers import BlockStore, DiskStore, ModelRecord

__all__ = ["open_store"]


def open_store(model: ModelRecord, config: EngineConfig, folder: Path) -> BlockStore:
    """The store of a model's blocks. Raises ConfigError if the folder cannot be used."""
    return DiskStore(folder, model, config.cache_dir_bytes)
