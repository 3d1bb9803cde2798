"""The LoRA adapters of replicas: the server knows their names, each replica reads them itself.

    load          one replica reads the folder and tells the adapter's digest; the server names it
    a request     goes with name, folder and digest, which is part of its prefix's identity
    a replica     that has none of this name and digest reads the folder before it answers, also
                  one that was started later

So the folder must be there, with the same files, on every machine that has replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from headstart.engine.adapter_names import Adapter, AdapterNames, InEngine, adapter_folder
from headstart.errors import ConfigError, DamagedAdapterError
from headstart.validation import check_name

__all__ = ["ReplicaAdapters", "check_adapter"]


class ReplicaAdapters(AdapterNames):
    """The adapters that requests to replicas may ask for. For any thread."""

    def __init__(self, read: Callable[[str, Path], Adapter]) -> None:
        """`read` has a replica read an adapter of a name, in a folder."""
        super().__init__()
        self._read = read
        self._changing = threading.Lock()  # an engine changes its names in one thread

    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        """As `AdapterNames.load`; a replica reads it."""
        check_name("an adapter's name", name, ConfigError, required=True)
        found = self._read(name, adapter_folder(path))
        return in_engine(lambda: self._add(found))

    def _add(self, adapter: Adapter) -> Adapter:
        with self._changing:
            self._named = {**self._named, adapter.name: adapter}
        return adapter

    def unload(self, name: str) -> None:
        """As `AdapterNames.unload`."""
        with self._changing:
            super().unload(name)


def check_adapter(found: Adapter | None, asked: Adapter | None) -> None:
    """Raise DamagedAdapterError if a replica has read another adapter than the one asked for."""
    if asked is not None and (found is None or found.digest != asked.digest):
        raise DamagedAdapterError(
            f"the files in {asked.path} are others than when adapter {asked.name!r} was loaded, or "
            "others on another machine; load it again"
        )
