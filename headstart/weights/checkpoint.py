"""The tensors of a checkpoint by name, with the names and shapes of a float model."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.weights.format import WeightKind
from headstart.weights.quantize import StoredValues
from headstart.weights.scheme import UnsupportedLayerError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

FLOATS = frozenset(_DTYPES.values())
"""The supported dtypes of float weights."""

DAMAGED_FILE_HINT = (
    "in the file itself: the file is damaged, or was saved with such weights; download the model "
    "again"
)
"""The last part of an error about NaN or infinities in a weight file."""


class Checkpoint(ABC):
    """The tensors of a model by name; a context manager that calls `release` at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""

    @abstractmethod
    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """Return the tensors' dtypes; raises `UnsupportedLayerError` unless all are floats."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return the tensor as floats. It may be a view of a mapped file, valid until `release`."""

    def kind(self, name: str) -> WeightKind | None:
        """Return the kind to round to if `packed` returns None; None for a float tensor."""
        return None

    def packed(self, name: str) -> StoredValues | None:
        """Return a quantized tensor with unchanged values; None if no format can store them."""
        return None

    def log(self, tied: bool) -> None:  # noqa: B027 - most have nothing to log
        """Log how quantized tensors will be stored. tied: the LM head shares the embedding."""

    @abstractmethod
    def release(self) -> None:
        """Unmap the files."""


class Entry(NamedTuple):
    """A tensor's file, its name and shape there, and its dtype as safetensors names it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsCheckpoint(Checkpoint):
    """The tensors in safetensors files. Raises `UnsupportedLayerError` for other formats."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        for file in files:
            if file.suffix != ".safetensors":
                raise UnsupportedLayerError("its weights are not in safetensors files")
            with safe_open(file, framework="pt") as opened:
                self.metadata |= opened.metadata() or {}
                for name in opened.keys():  # noqa: SIM118 - no mapping, it only has keys()
                    if name in self.entries:
                        first_file = self.entries[name].file.name
                        raise UnsupportedLayerError(f"{name} is in {first_file} and {file.name}")
                    part = opened.get_slice(name)
                    shape = tuple(part.get_shape())
                    self.entries[name] = Entry(file, name, shape, part.get_dtype())

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors. names: maps names in the files to new names."""
        self.entries = {names.get(name, name): entry for name, entry in self.entries.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        dtypes = [self.entries[name].dtype for name in names]
        if unsupported := sorted(set(dtypes) - _DTYPES.keys()):
            raise UnsupportedLayerError(f"its weights are {', '.join(unsupported)}")
        return [_DTYPES[name] for name in dtypes]

    def tensor(self, name: str) -> Tensor:
        file, name, shape, _ = self.entries[name]
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = self._open[file].get_tensor(name)
        if tensor.shape != shape:
            raise DamagedModelError(f"{file} changed while it was read")
        return tensor

    def release(self) -> None:
        self._open.clear()
        self._files.close()
