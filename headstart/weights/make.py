"""Makes a linear layer of a kind, and says which kind each layer of a quantised model has."""

import torch
from torch import Tensor

from headstart.weights.base import QuantizedLinear, WeightKind
from headstart.weights.grouped import Int4Linear, Int5Linear
from headstart.weights.int8 import Int8Linear

__all__ = ["kind_of_layer", "make_linear"]

_LAYERS: dict[WeightKind, type[QuantizedLinear]] = {
    "int8": Int8Linear,
    "int5": Int5Linear,
    "int4": Int4Linear,
}


# More than half of what 4 bits lose is lost in these, which are a third of the weights (docs/log.md
# has the measurement). Where several heads share a key, keys and values are a few hundredths.
_KEYS = frozenset({"k_proj", "v_proj"})
_FUSED = frozenset({"qkv_proj", "gate_up_proj"})  # which hold one of the others
_MORE_BITS = _KEYS | {"o_proj", "up_proj"} | _FUSED


def kind_of_layer(name: str, kind: WeightKind, inputs: int, outputs: int) -> WeightKind:
    """The kind of one linear layer of a model of floats that is quantised to `kind`.

    name: the module's, with or without those of its parents.
    """
    own = name.rpartition(".")[2]
    if kind != "int4" or own not in _MORE_BITS:
        return kind
    return "int8" if own in _KEYS and outputs < inputs else "int5"


def make_linear(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, rows: torch.dtype = torch.float32
) -> QuantizedLinear:
    """A layer for a floating-point weight `[outputs, inputs]` and a bias `[outputs]` or None.

    rows: the dtype in which rows come.
    """
    return _LAYERS[kind].quantize(weight, bias, rows)
