"""Rounding of float weights to a `WeightKind`, and the choice of the kind of each layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.weights.format import WeightFormat, WeightKind
from headstart.weights.grouped import GroupedValues, quantize_groups
from headstart.weights.int8 import Int8Values, quantize_int8

StoredValues = Int8Values | GroupedValues
"""The values of a quantized matrix, before the layout of a product is chosen."""

FORMATS: dict[WeightKind, Callable[[Tensor], StoredValues]] = {
    "int8": quantize_int8,
    "int5": lambda weight: quantize_groups(weight, 5),
    "int4": lambda weight: quantize_groups(weight, 4),
}
"""The function that rounds floats `[outputs, inputs]` to a kind."""

# Layers that weights="int4" stores in more bits. They are a third of the weights, and in 4 bits
# would cause more than half of the error. `k_proj` and `v_proj` become int8 if grouped-query
# attention makes them small.
_KV = frozenset({"k_proj", "v_proj"})
_FUSED = frozenset({"qkv_proj", "gate_up_proj"})  # contain one of the layers above
_MORE_BITS = _KV | {"o_proj", "up_proj"} | _FUSED
# Projections to the decays and gates of recurrent layers. They are small, and states are sensitive
# to their errors.
_RECURRENT_GATES = frozenset({"in_proj_a", "in_proj_b"})


def kind_of_layer(name: str, kind: WeightKind, inputs: int, outputs: int) -> WeightKind:
    """Return the kind of one linear layer, when a float model is quantized to `kind`.

    name: the module's name, with or without the names of its parents.
    """
    layer_name = name.rpartition(".")[2]
    if layer_name in _RECURRENT_GATES:
        return "int8"
    if kind != "int4" or layer_name not in _MORE_BITS:
        return kind
    return "int8" if layer_name in _KV and outputs < inputs else "int5"


def quantize(
    weight: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    rows: torch.dtype = torch.float32,
    table: bool = False,
) -> WeightFormat:
    """Round a float weight `[outputs, inputs]` with a bias `[outputs]` or None.

    rows: the dtype of input rows. table: the weight is also an embedding.
    """
    return FORMATS[kind](weight).store(bias, rows, table)


def is_quantized_from(matrix: WeightFormat, weight: Tensor) -> bool:
    """Return True if a quantized matrix equals `weight` or the result of quantizing it."""
    if matrix.kind is None or weight.shape != (matrix.outputs, matrix.inputs):
        return False
    unpacked = matrix.unpack()
    return torch.equal(unpacked.to(weight.dtype), weight) or torch.equal(
        quantize(weight, None, matrix.kind).unpack(), unpacked
    )
