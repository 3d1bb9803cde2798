"""Reads a checkpoint's tensors one at a time into the modules of a dense decoder.

Nothing is in memory twice: a tensor is copied (and converted, or packed) out of its mapped file,
and the file is unmapped after every layer.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.native.pages import ReadyMemory
from headstart.weights.half_weight import Bf16Weight, HalfEmbedding, HalfLinear
from headstart.weights.packed import Arena, PackedEmbedding, PackedLinear, PackedWeight
from headstart.weights.scheme import UnsupportedLayerError

__all__ = [
    "FLOATS",
    "SAVED_SO",
    "Checkpoint",
    "Entry",
    "FloatReader",
    "HalfReader",
    "Outline",
    "PackedReader",
    "Reader",
    "Tensors",
]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_EMBEDDING = "model.embed_tokens.weight"

FLOATS = frozenset(_DTYPES.values())
"""The dtypes of weights that are read here."""

SAVED_SO = "in the file itself: it is damaged, or was saved so; download the model again"
"""The end of an error that says what a weight of a file holds."""


class Reader(Protocol):
    """Makes modules and tensors of a checkpoint's tensors, by dotted name."""

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """A linear layer: rows `[..., inputs]` to `[..., outputs]`."""
        ...

    def vector(self, name: str, width: int) -> Tensor:
        """A norm's weight `[width]`."""
        ...

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        """The LM head; with the weight of `embedding`, if that is given."""
        ...

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        """Token ids to rows `[..., width]`."""
        ...

    def release(self) -> None:
        """Unmap what was read."""
        ...


class Tensors(Protocol):
    """A checkpoint's tensors by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        ...

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """The dtypes of these tensors; raises `UnsupportedLayerError` unless all are floats."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor; it may lie in the file until `release`."""
        ...

    def release(self) -> None:
        """Unmap what was read."""
        ...


class Entry(NamedTuple):
    """Where a tensor lies, and its dtype as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors in safetensors files, by name.

    A context: files are open while it lasts. Raises `UnsupportedLayerError` for other formats.
    """

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
                        before = self.entries[name].file.name
                        raise UnsupportedLayerError(f"{name} is in {before} and in {file.name}")
                    part = opened.get_slice(name)
                    entry = Entry(file, tuple(part.get_shape()), part.get_dtype())
                    self.entries[name] = entry

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """The dtypes of these tensors; raises `UnsupportedLayerError` unless all are floats."""
        found = [self.entries[name].dtype for name in names]
        if others := sorted(set(found) - _DTYPES.keys()):
            raise UnsupportedLayerError(f"its weights are {', '.join(others)}")
        return [_DTYPES[name] for name in found]

    def tensor(self, name: str) -> Tensor:
        """The tensor, in memory that is the file's until `release`."""
        file, shape, _ = self.entries[name]
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(file, framework="pt"))
        found: Tensor = self._open[file].get_tensor(name)
        if found.shape != shape:
            raise DamagedModelError(f"{file} was written to while it was read")
        return found

    def release(self) -> None:
        """Close the files; tensors that still lie in them keep them mapped."""
        self._open.clear()
        self._files.close()


class Outline:
    """Records the names and shapes of the tensors that a decoder needs; its modules are empty."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.matrices: dict[str, torch.Size] = {}
        """Shapes of the linear layers' weights and of the embedding, by name."""

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        self._matrix(name, outputs, inputs)
        if bias:
            self.shapes[f"{name}.bias"] = (outputs,)
        return nn.Module()

    def vector(self, name: str, width: int) -> Tensor:
        self.shapes[f"{name}.weight"] = (width,)
        return torch.empty(0)

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        self._matrix(name, count, width)
        return nn.Module()

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if embedding is None:
            self._matrix(name, outputs, inputs)
        return nn.Module()

    def release(self) -> None: ...

    def _matrix(self, name: str, outputs: int, inputs: int) -> None:
        self.shapes[f"{name}.weight"] = (outputs, inputs)
        self.matrices[f"{name}.weight"] = torch.Size((outputs, inputs))


class _Linear(nn.Linear):
    """A linear layer whose weights come from a file."""

    def reset_parameters(self) -> None:
        """Draw no random weights: on meta tensors that imports torch's compiler."""


class FloatReader:
    """Modules of torch, in one dtype, on any device."""

    def __init__(self, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the modules are."""
        return self._device

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        made = _Linear(inputs, outputs, bias, device="meta")
        made.weight = self._parameter(f"{name}.weight")
        if bias:
            made.bias = self._parameter(f"{name}.bias")
        return made

    def vector(self, name: str, width: int) -> Tensor:
        return self._parameter(f"{name}.weight")

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        # Not checked: a row that is not finite harms only those who use the token.
        weight = self._copy(f"{name}.weight")
        made: nn.Module = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
        return made

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if embedding is None:
            return self.linear(name, inputs, outputs, bias=False)
        assert isinstance(embedding, nn.Embedding)
        self._check_finite(_EMBEDDING, embedding.weight)
        made = _Linear(inputs, outputs, bias=False, device="meta")
        made.weight = embedding.weight
        return made

    def release(self) -> None:
        self._checkpoint.release()

    def close(self) -> None:
        """Call it when all weights are read."""

    def tensor(self, name: str) -> Tensor:
        """The tensor as the file has it, until `release`; in float32 if it has 64 bits."""
        found = self._checkpoint.tensor(name).to(self._device)
        found = found.float() if found.dtype == torch.float64 else found
        self._check_finite(name, found)
        return found

    def _parameter(self, name: str) -> nn.Parameter:
        copied = self._copy(name)
        self._check_finite(name, copied)
        return copied

    def _check_finite(self, name: str, weight: Tensor) -> None:
        """Raise for infinities and NaN in the weight that a tensor of the file became.

        `DamagedModelError` where the file has them, `UnsupportedModelError` where the dtype made
        them.
        """
        if _is_finite(weight):
            return
        if not _is_finite(self._checkpoint.tensor(name)):
            raise DamagedModelError(f"{name} holds weights that are not finite {SAVED_SO}")
        raise UnsupportedModelError(
            f"{name} holds weights that are not finite in {weight.dtype}; another dtype may help"
        )

    def _copy(self, name: str) -> nn.Parameter:
        found = self._checkpoint.tensor(name)
        return nn.Parameter(found.to(self._device, self._dtype, copy=True), requires_grad=False)


class HalfReader(FloatReader):
    """As `FloatReader` in float32 on the CPU, with the matrices `halves` left in bfloat16."""

    def __init__(
        self,
        checkpoint: Tensors,
        halves: Mapping[str, torch.Size],
        ready_memory: ReadyMemory | None,
    ) -> None:
        super().__init__(checkpoint, torch.float32, torch.device("cpu"))
        self._halves = halves
        self._arena = Arena(halves.values(), ready_memory)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        if f"{name}.weight" not in self._halves:
            return super().linear(name, inputs, outputs, bias)
        made = self._half(f"{name}.weight", self._parameter(f"{name}.bias") if bias else None)
        self._check_finite(f"{name}.weight", made.weight)
        return HalfLinear(made)

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        if f"{name}.weight" not in self._halves:
            return super().embedding(name, count, width)
        return HalfEmbedding(self._half(f"{name}.weight"))

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if not isinstance(embedding, HalfEmbedding):
            return super().head(embedding, name, outputs, inputs)
        self._check_finite(_EMBEDDING, embedding.matrix.weight)
        return HalfLinear(embedding.matrix)

    def _half(self, name: str, bias: Tensor | None = None) -> Bf16Weight:
        found = self._checkpoint.tensor(name)
        memory = self._arena.take(found.numel() * torch.bfloat16.itemsize)
        kept = memory.view(torch.bfloat16).view(found.shape)
        return Bf16Weight(kept.copy_(found), bias)  # of bfloat16, or of its numbers in float32


class PackedReader(FloatReader):
    """As `FloatReader` in bfloat16 on the CPU, with weights packed for the compiled kernels."""

    def __init__(
        self, checkpoint: Tensors, matrices: list[torch.Size], ready_memory: ReadyMemory | None
    ) -> None:
        super().__init__(checkpoint, torch.bfloat16, torch.device("cpu"))
        self._arena = Arena(matrices, ready_memory)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        rounded = self._rounded(f"{name}.weight")
        self._check_finite(f"{name}.weight", rounded)
        own = self._parameter(f"{name}.bias") if bias else None
        return PackedLinear(PackedWeight(rounded, own, self._arena))

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        return PackedEmbedding(PackedWeight(self._rounded(f"{name}.weight"), arena=self._arena))

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if embedding is None:
            return self.linear(name, inputs, outputs, bias=False)
        assert isinstance(embedding, PackedEmbedding)
        self._check_finite(_EMBEDDING, self._rounded(_EMBEDDING))
        return PackedLinear(embedding.packed)

    def close(self) -> None:
        self._arena.close()

    def _rounded(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(torch.bfloat16)


def _is_finite(weight: Tensor) -> bool:
    """False for infinities and NaN; reads the weight once."""
    some = weight.sum() if weight.dtype == torch.float32 else torch.stack(torch.aminmax(weight))
    # A sum of finite numbers may overflow; only then each is looked at.
    return bool(torch.isfinite(some).all() or torch.isfinite(weight).all())
