"""A linear layer of the wanted kind for a weight."""

import torch
from torch import Tensor

from headstart.models.linear.base import QuantizedLinear, WeightKind
from headstart.models.linear.int4 import Int4Linear, Int5Linear
from headstart.models.linear.int8 import Int8Linear

__all__ = ["make_linear"]

_LAYERS: dict[WeightKind, type[QuantizedLinear]] = {
    "int8": Int8Linear,
    "int5": Int5Linear,
    "int4": Int4Linear,
}


def make_linear(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, rows: torch.dtype = torch.float32
) -> QuantizedLinear:
    """A layer for a floating-point weight `[outputs, inputs]` and a bias `[outputs]` or None.

    rows: the dtype in which rows come.
    """
    return _LAYERS[kind].quantize(weight, bias, rows)
