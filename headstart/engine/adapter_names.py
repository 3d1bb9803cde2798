"""LoRA adapters in requests, by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import AdapterNotFoundError, RequestError
from headstart.validation import Number, check_absent, check_name, describe

_IDS = Number(int, 1)


@dataclass(frozen=True)
class LoRARequest:
    """An adapter as in vLLM, loaded when it is first used. Raises RequestError.

    Adapters are identified by their content: `lora_int_id`, base_model_name and load_inplace have
    no effect. is_3d_lora_weight must be False.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    base_model_name: Any = field(default=None, compare=False, repr=False)
    load_inplace: Any = field(default=False, compare=False, repr=False)
    is_3d_lora_weight: bool | None = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_name("lora_name", self.lora_name, required=True)
        if self.lora_int_id not in _IDS:
            raise RequestError(f"lora_int_id is {describe(self.lora_int_id)}; allowed: {_IDS}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise RequestError(f"lora_path is {describe(self.lora_path)}; allowed: a folder's path")
        check_absent({"is_3d_lora_weight": self.is_3d_lora_weight})

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str | Path:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. digest: the hash of its content, part of the identity of its K/V."""

    name: str
    path: Path
    digest: str


def choose_adapters(
    adapter: str | Sequence[str | None] | None,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    count: int,
) -> list[str | LoRARequest | None]:
    """Return an adapter for each of `count` prompts; a single adapter applies to all of them."""
    if adapter is not None and lora_request is not None:
        raise RequestError("adapter and lora_request are both set; allowed: one of them")
    choices = adapter if lora_request is None else lora_request
    if choices is None or isinstance(choices, (str, LoRARequest)):
        return [choices] * count
    kinds = (str, LoRARequest, type(None))
    if not isinstance(choices, Sequence) or not all(isinstance(c, kinds) for c in choices):
        raise RequestError(
            f"the adapter is {describe(choices)}; allowed: a name, a LoRARequest or a list of these"
        )
    if len(choices) != count:
        raise RequestError(
            f"there are {len(choices)} adapters for {count} prompts; allowed: one for all, or one "
            "for each"
        )
    return list(choices)


InEngine = Callable[[Callable[[], Adapter]], Adapter]
"""The type of `LocalDriver.call`, which calls a function in the engine's thread."""


class AdapterNames(ABC):
    """Adapters by name. Thread-safe, since a change replaces the whole table."""

    def __init__(self) -> None:
        self._named: Mapping[str, Adapter] = {}

    @property
    def named(self) -> list[Adapter]:
        """The adapters that requests may use."""
        return list(self._named.values())

    @abstractmethod
    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        """Read the adapter in folder `path`, so that requests can use it by `name`.

        The calling thread reads the adapter, and the engine's thread adds it to the table. An
        earlier adapter of this name loses the name. Raises AdapterError, ConfigError if adapters
        are off or the name is invalid, and exceptions of `in_engine`. An error changes nothing.
        """

    def unload(self, name: str) -> None:
        """Remove the name. Requests that already use the adapter continue. Raises RequestError."""
        self.find(name)
        self._named = {n: adapter for n, adapter in self._named.items() if n != name}

    def find(self, name: str) -> Adapter:
        """Return the adapter of this name. Raises RequestError."""
        check_name("the adapter's name", name)
        named = self._named
        if name not in named:
            loaded = ", ".join(map(repr, named)) or "none"
            raise RequestError(f"there is no adapter {describe(name)}; loaded: {loaded}")
        return named[name]

    def require(self, choice: str | LoRARequest | None, in_engine: InEngine) -> str | None:
        """Return an adapter's name; load the adapter if necessary.

        Raises the same exceptions as `load`.
        """
        if not isinstance(choice, LoRARequest):
            return choice
        folder = adapter_folder(choice.lora_path)
        adapter = self._named.get(choice.lora_name)
        if adapter is None or adapter.path != folder:
            self.load(choice.lora_name, folder, in_engine)
        return choice.lora_name


def adapter_folder(path: object) -> Path:
    """Return the absolute path of an adapter's folder. Raises AdapterNotFoundError."""
    try:
        folder = Path(path).expanduser().absolute()  # type: ignore[arg-type]
        str(folder).encode()
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"an adapter's path is {describe(path)}; allowed: a folder's path"
        raise AdapterNotFoundError(text) from error
    return folder
