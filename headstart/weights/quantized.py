"""Reads a checkpoint's linear layers into 8, 5 or 4 bits."""

from typing import Protocol

import torch
from torch import Tensor, nn

from headstart.errors import UnsupportedModelError
from headstart.machine import return_freed_memory
from headstart.weights.grouped import GroupedWeight, Int4Linear, Int5Linear, Int8GroupsLinear
from headstart.weights.int8 import Int8Linear, Int8Weight, quantize_int8
from headstart.weights.linear import (
    QuantizedEmbedding,
    QuantizedLinear,
    WeightKind,
    kind_of_layer,
    make_linear,
)
from headstart.weights.reader import FloatReader, Tensors

__all__ = ["PrequantizedReader", "QuantizedReader", "QuantizedTensors"]

_LAYERS = {4: Int4Linear, 5: Int5Linear, 8: Int8GroupsLinear}
_LARGEST_SCALE = 1e28
"""Times the whole numbers of weight and row, of thousands of inputs, it is far from infinite."""


class QuantizedReader:
    """Linear layers rounded to `kind_of_layer`, and all else as a float reader makes it.

    The LM head is int8 whatever the kind. An embedding that shares its weight reads it there.
    """

    def __init__(self, floats: FloatReader, kind: WeightKind, tied: bool) -> None:
        self._floats, self._kind, self._tied = floats, kind, tied

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        own = self._floats.tensor(f"{name}.bias") if bias else None
        return self._rounded(name, own, kind_of_layer(name, self._kind, inputs, outputs))

    def vector(self, name: str, width: int) -> Tensor:
        return self._floats.vector(name, width)

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        if not self._tied:
            return self._floats.embedding(name, count, width)
        return QuantizedEmbedding(self._table(name), self._floats.dtype)

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if isinstance(embedding, QuantizedEmbedding):
            return embedding.head
        return self._head(embedding, name, outputs, inputs)

    def release(self) -> None:
        self._floats.release()
        return_freed_memory()

    def _head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        """The LM head, where no quantised embedding has it."""
        return self._rounded(name, None, "int8")

    def _table(self, name: str) -> QuantizedLinear:
        """The LM head, of the embedding's weight."""
        weight = quantize_int8(self._floats.tensor(f"{name}.weight"), self._floats.dtype)
        _check_scales(name, weight.scales, "int8")
        return Int8Linear(weight, rows=self._floats.dtype, table=True)

    def _rounded(self, name: str, bias: Tensor | None, kind: WeightKind) -> QuantizedLinear:
        weight = self._floats.tensor(f"{name}.weight")
        made = make_linear(weight, bias, kind, self._floats.dtype)
        _check_scales(name, made.scales, kind)
        return made


class QuantizedTensors(Tensors, Protocol):
    """A checkpoint whose weights are quantised; its `tensor` gives floats all the same."""

    def kind(self, name: str) -> WeightKind | None:
        """What a weight becomes that is not kept in its own bits; None for a float."""
        ...

    def packed(self, name: str) -> GroupedWeight | Int8Weight | None:
        """The weight in its own bits; None if no kind of ours holds it."""
        ...

    def tell(self, tied: bool) -> None:
        """Log in one line what is read; tied: the LM head is the embedding's weight."""
        ...


class PrequantizedReader(QuantizedReader):
    """Every linear layer in the checkpoint's own bits, or of the kind that is nearest to them."""

    def __init__(self, checkpoint: QuantizedTensors, floats: FloatReader, tied: bool) -> None:
        quantised = checkpoint.kind("model.embed_tokens.weight") is not None
        super().__init__(floats, "int8", tied and quantised)
        self._checkpoint = checkpoint
        checkpoint.tell(tied)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        kind = self._checkpoint.kind(f"{name}.weight")
        if kind is None:
            return self._floats.linear(name, inputs, outputs, bias)
        own = self._floats.tensor(f"{name}.bias") if bias else None
        return self._in_own_bits(name, own) or self._rounded(name, own, kind)

    def _head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if embedding is not None or self._checkpoint.kind(f"{name}.weight") is None:
            return self._floats.head(embedding, name, outputs, inputs)
        return self._in_own_bits(name, None) or self._rounded(name, None, "int8")

    def _table(self, name: str) -> QuantizedLinear:
        return self._in_own_bits(name, None, table=True) or super()._table(name)

    def _in_own_bits(
        self, name: str, bias: Tensor | None, table: bool = False
    ) -> QuantizedLinear | None:
        """The layer, value for value; None if no kind of ours holds its weight."""
        weight = self._checkpoint.packed(f"{name}.weight")
        if weight is None:
            return None
        if isinstance(weight, GroupedWeight) and not weight.is_finite():
            raise UnsupportedModelError(f"{name}.weight has scales that are not finite in float16")
        return _make_packed(weight, bias, self._floats.device, self._floats.dtype, table)


def _check_scales(name: str, scales: Tensor, kind: WeightKind) -> None:
    """Raise `UnsupportedModelError` for weights so large that products may be infinite."""
    if float(scales.amax()) > _LARGEST_SCALE:
        raise UnsupportedModelError(
            f'{name}.weight holds weights that are too large for {kind}; weights="auto" may help'
        )


def _make_packed(
    weight: GroupedWeight | Int8Weight,
    bias: Tensor | None,
    device: torch.device,
    rows: torch.dtype,
    table: bool = False,
) -> QuantizedLinear:
    made: QuantizedLinear
    if isinstance(weight, Int8Weight):
        # A copy: scales in float32 may lie in the file.
        weight = Int8Weight(weight.plain.to(device), weight.scales.to(device, copy=True))
        made = Int8Linear(weight, bias, rows, table)
    else:
        columns = None if weight.columns is None else weight.columns.to(device)
        weight = weight._replace(
            panels=weight.panels.to(device), scales=weight.scales.to(device), columns=columns
        )
        # AMX has panels of its own, which no rows are read from.
        made = _LAYERS[weight.form.bits](weight, bias, torch.float32 if table else rows)
    made.is_prequantized = True
    return made
