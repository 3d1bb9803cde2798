"""The names by which requests ask for LoRA adapters, wherever the adapters are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from headstart.engine.adapters.request import Adapter, LoRARequest
from headstart.errors import AdapterNotFoundError, RequestError
from headstart.validation import check_name, describe

__all__ = ["AdapterNames", "InEngine", "adapter_folder"]

InEngine = Callable[[Callable[[], Adapter]], Adapter]
"""Calls a function in the engine's thread: `LocalDriver.call`."""


class AdapterNames(ABC):
    """Adapters by name. For any thread: the table is replaced, never changed."""

    def __init__(self) -> None:
        self._named: Mapping[str, Adapter] = {}

    @property
    def named(self) -> list[Adapter]:
        """The adapters that requests may ask for."""
        return list(self._named.values())

    @abstractmethod
    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        """Read the adapter in folder `path`; requests may ask for it by `name` from now on.

        It is read in this thread and named in the engine's. An adapter that had the name loses
        it. Raises AdapterError, ConfigError when adapters are switched off or the name is no
        name, and what `in_engine` raises; nothing has changed then.
        """

    def unload(self, name: str) -> None:
        """Take the name away; requests that have the adapter finish. Raises RequestError."""
        self.find(name)
        self._named = {other: found for other, found in self._named.items() if other != name}

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises RequestError."""
        check_name("the adapter's name", name)
        named = self._named
        found = named.get(name)
        if found is None:
            known = ", ".join(map(repr, named)) or "none"
            raise RequestError(f"there is no adapter {describe(name)}; loaded: {known}")
        return found

    def require(self, choice: str | LoRARequest | None, in_engine: InEngine) -> str | None:
        """The adapter's name, once a LoRARequest that its name does not stand for is loaded.

        Raises what `load` does.
        """
        if not isinstance(choice, LoRARequest):
            return choice
        folder = adapter_folder(choice.lora_path)
        found = self._named.get(choice.lora_name)
        if found is None or found.path != folder:
            self.load(choice.lora_name, folder, in_engine)
        return choice.lora_name


def adapter_folder(path: object) -> Path:
    """The absolute path of an adapter's folder. Raises AdapterNotFoundError for what is no path."""
    try:
        folder = Path(path).expanduser().absolute()  # type: ignore[arg-type]
        str(folder).encode()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AdapterNotFoundError(
            f"an adapter's path is {describe(path)}; allowed: the path of a folder"
        ) from error
    return folder
