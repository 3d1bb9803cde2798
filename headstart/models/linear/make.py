"""A linear layer of the wanted kind for a weight."""

from torch import Tensor, nn

from headstart.models.linear.base import QuantizedLinear, WeightKind
from headstart.models.linear.int4 import Int4Linear
from headstart.models.linear.int8 import Int8Linear

__all__ = ["make_linear"]

_LAYERS: dict[WeightKind, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}


def make_linear(weight: Tensor, bias: Tensor | None, kind: WeightKind | None) -> nn.Module:
    """A layer for a floating-point weight `[outputs, inputs]` and a bias `[outputs]` or None.

    Without a kind it is an `nn.Linear` that holds the weight itself.
    """
    if kind is not None:
        return _LAYERS[kind].quantize(weight, bias)
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
