"""Readers of a checkpoint's tensors, which make the modules of a dense decoder.

No weight is in memory twice: a tensor is copied, converted or packed out of its mapped file, and
the file is unmapped after every layer.
"""

import torch
from torch import Tensor, nn

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.machine import return_freed_memory
from headstart.native import advise
from headstart.native.pages import ReadyMemory
from headstart.weights.bf16 import Bf16Weight, PackedWeight, packed_bytes
from headstart.weights.checkpoint import DAMAGED_FILE_HINT, Checkpoint
from headstart.weights.format import Embedding, Linear, WeightFormat, WeightKind
from headstart.weights.memory import Arena
from headstart.weights.products import choose_product
from headstart.weights.quantize import FORMATS, kind_of_layer

_EMBEDDING = "model.embed_tokens.weight"
_TABLES = (_EMBEDDING, "model.embed_tokens_per_layer.weight")
_LARGEST_SCALE = 1e28
"""Larger scales could overflow when multiplied by the sum of integer products of a row."""


class Outline:
    """A reader that records names and shapes of a decoder's tensors, and returns empty modules."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.matrices: dict[str, torch.Size] = {}
        """Shapes of the linear layers' weights and of the embedding, by name."""

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        if bias:
            self.shapes[f"{name}.bias"] = (outputs,)
        return self.embedding(name, outputs, inputs)

    def vector(self, name: str, width: int) -> Tensor:
        self.shapes[f"{name}.weight"] = (width,)
        return torch.empty(0)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape)

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        self.shapes[f"{name}.weight"] = (count, width)
        self.matrices[f"{name}.weight"] = torch.Size((count, width))
        return nn.Module()

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        return self.embedding(name, outputs, inputs) if embedding is None else nn.Module()

    def release(self) -> None: ...


class _Linear(nn.Linear):
    """A linear layer whose weights come from a file."""

    def reset_parameters(self) -> None:
        """Do nothing: random weights are not needed, and drawing them imports torch's compiler."""


class TorchReader:
    """A reader that returns torch modules with weights in one dtype, on any device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Return a linear layer from `[..., inputs]` to `[..., outputs]`."""
        bias_vector = self.vector(name, outputs, "bias") if bias else None
        return _torch_linear(self.vector(name, inputs), bias_vector)

    def vector(self, name: str, width: int, part: str = "weight") -> Tensor:
        """Return a vector `[width]`, such as a norm's weight."""
        tensor = self._copy(f"{name}.{part}")
        self._check_finite(f"{name}.{part}", tensor)
        return tensor

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor for recurrent layers, in float32."""
        values = self._checkpoint.tensor(name)
        tensor = values.to(self._device, torch.float32, copy=True).view(shape)
        self._check_finite(name, tensor)
        return tensor

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        """Return a module that maps token ids to rows `[..., width]`."""
        # Not checked: a row that is not finite affects only requests that use the token.
        weight = self._copy(f"{name}.weight")
        table: nn.Module = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
        return table

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        """Return the LM head, with the weight of `embedding` unless that is None."""
        if embedding is None:
            return self.linear(name, inputs, outputs, bias=False)
        assert isinstance(embedding, nn.Embedding)
        self._check_finite(_EMBEDDING, embedding.weight)
        return _torch_linear(embedding.weight)

    def release(self) -> None:
        """Unmap the files."""
        self._checkpoint.release()

    def _copy(self, name: str) -> nn.Parameter:
        tensor = self._checkpoint.tensor(name)
        return nn.Parameter(tensor.to(self._device, self._dtype, copy=True), requires_grad=False)

    def _check_finite(self, name: str, weight: Tensor) -> None:
        """Raise an error if a weight has infinities or NaN.

        Raise `DamagedModelError` if the file has them, and `UnsupportedModelError` if the
        conversion to the dtype made them.
        """
        if _is_finite(weight):
            return
        if not _is_finite(self._checkpoint.tensor(name)):
            raise DamagedModelError(f"{name} has weights that are not finite {DAMAGED_FILE_HINT}")
        raise UnsupportedModelError(
            f"{name} has weights that are not finite in {weight.dtype}; another dtype may help"
        )


Reader = Outline | TorchReader
"""A reader that returns modules and tensors by their dotted names in a checkpoint."""


class WeightReader(TorchReader):
    """A reader that stores every matrix in the fastest format for this machine.

    With a `kind`, each linear layer is rounded to the kind that `kind_of_layer` returns for it, and
    the LM head to int8. Without a kind, floats stay floats, and quantized matrices keep their
    values if a format can store them. Otherwise they are rounded again. An embedding that shares a
    quantized LM head's weight uses the same matrix. Other embeddings are float.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        matrices: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        kind: WeightKind | None = None,
        tied: bool = False,
        ready_memory: ReadyMemory | None = None,
    ) -> None:
        super().__init__(checkpoint, dtype, device)
        self._kind, self._tied = kind, tied
        floats = [
            name
            for name in matrices
            if self._stored_kind(name) is None or (name in _TABLES and not tied)
        ]
        self._bf16_names = frozenset(
            name
            for name in floats
            if checkpoint.kind(name) is None and checkpoint.dtypes([name]) == [torch.bfloat16]
        )
        self._product = choose_product("bfloat16", dtype, device)
        sizes: list[int] = []
        if self._product == "bfloat16":
            sizes = [packed_bytes(*matrices[name]) for name in floats]
        elif self._product == "float32":
            sizes = [matrices[name].numel() * torch.bfloat16.itemsize for name in self._bf16_names]
        elif self._bf16_names and device.type == "cpu":
            advise()
        self._arena = Arena(sizes, ready_memory if sizes else None)
        if kind is None:
            checkpoint.log(tied)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        kind = self._stored_kind(f"{name}.weight")
        if self._kind is not None:
            kind = kind_of_layer(name, self._kind, inputs, outputs)
        if kind is None:
            return self._float_linear(name, inputs, outputs, bias)
        bias_tensor = self._tensor(f"{name}.bias") if bias else None
        return Linear(self._quantized(name, bias_tensor, kind))

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        if self._tied and self._stored_kind(f"{name}.weight") is not None:
            return Embedding(self._quantized(name, None, "int8", table=True), self._dtype)
        matrix = self._float(f"{name}.weight")
        if matrix is None:
            return super().embedding(name, count, width)
        return Embedding(matrix, self._dtype)

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if embedding is None and self._stored_kind(f"{name}.weight") is not None:
            return Linear(self._quantized(name, None, "int8"))
        if embedding is None:
            return self._float_linear(name, inputs, outputs, bias=False)
        if not isinstance(embedding, Embedding):
            return super().head(embedding, name, outputs, inputs)
        if embedding.matrix.kind is None:
            self._check_finite(_EMBEDDING, self._checkpoint.tensor(_EMBEDDING).to(torch.bfloat16))
        return Linear(embedding.matrix)

    def release(self) -> None:
        super().release()
        return_freed_memory()

    def close(self) -> None:
        """Request huge pages for packed weights. Call when all are read."""
        if self._product == "bfloat16":
            self._arena.close()

    def _stored_kind(self, name: str) -> WeightKind | None:
        """Return the kind of a matrix; None for floats."""
        return self._kind or self._checkpoint.kind(name)

    def _quantized(
        self, name: str, bias: Tensor | None, kind: WeightKind, table: bool = False
    ) -> WeightFormat:
        """Return a matrix with the checkpoint's quantized values, or rounded to `kind`."""
        weight = f"{name}.weight"
        values = None if self._kind is not None else self._checkpoint.packed(weight)
        is_prequantized = values is not None
        if values is None:
            values = FORMATS[kind](self._tensor(weight))
            if float(values.scales.amax()) > _LARGEST_SCALE:
                raise UnsupportedModelError(
                    f'{weight} has weights that are too large for {kind}; weights="auto" may help'
                )
        elif not values.is_finite():
            raise UnsupportedModelError(f"{weight} has scales that are not finite in float16")
        else:
            values = values.to(self._device)
        matrix = values.store(bias, self._dtype, table)
        matrix.is_prequantized = is_prequantized
        return matrix

    def _float_linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        bias_vector = self.vector(name, outputs, "bias") if bias else None
        matrix = self._float(f"{name}.weight", bias_vector, check=True)
        return super().linear(name, inputs, outputs, bias) if matrix is None else Linear(matrix)

    def _float(
        self, name: str, bias: Tensor | None = None, check: bool = False
    ) -> WeightFormat | None:
        """Return a matrix for a compiled product; None if torch multiplies."""
        is_packed = self._product == "bfloat16"
        if not is_packed and not (self._product == "float32" and name in self._bf16_names):
            return None
        weight = self._checkpoint.tensor(name)
        if is_packed:
            weight = weight.to(torch.bfloat16)
        else:
            memory = self._arena.take(weight.numel() * torch.bfloat16.itemsize)
            weight = memory.view(torch.bfloat16).view(weight.shape).copy_(weight)
        if check:
            self._check_finite(name, weight)
        return PackedWeight(weight, bias, self._arena) if is_packed else Bf16Weight(weight, bias)

    def _tensor(self, name: str) -> Tensor:
        """Return a tensor of the file, valid until `release`; float64 becomes float32."""
        tensor = self._checkpoint.tensor(name).to(self._device)
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        self._check_finite(name, tensor)
        return tensor


def _torch_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    layer = _Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias  # type: ignore[assignment]
    return layer


def _is_finite(weight: Tensor) -> bool:
    """Return False for a weight with infinities or NaN."""
    sample = weight.sum() if weight.dtype == torch.float32 else torch.stack(torch.aminmax(weight))
    # If the sum is not finite, it may have overflowed, so each number is checked.
    return bool(torch.isfinite(sample).all() or torch.isfinite(weight).all())
