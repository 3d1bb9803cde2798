"""Units of a layer's inputs in which it loses less when rounded, at no cost in the product.

A layer's input i is divided by a unit u[i], and its column of the weight multiplied by it, which
changes no output. u[i] grows with the input's size on a text: a column that is larger in its group
is rounded less, in relation to its size (AWQ, Lin et al. 2023, https://arxiv.org/abs/2306.00978).
And it falls with the column's size: a small column does not take the step of a large neighbour.
The division is done once, in the file, by what makes the input:

    inputs of          are divided in
    q, k, v            the norm before them
    o                  the outputs of v, one unit for all query heads of a KV head
    gate, up           the norm before them
    down               the outputs of up

OLMo 2 has no norms before its projections: there only the units of o and down are used.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headstart.models.dense.modules import DecoderLayer
from headstart.models.dense.shape import DecoderShape, NormKind
from headstart.models.gptq.inputs import linear_of, stages

__all__ = ["apply_units"]

_BY_INPUT = 0.4  # the power of an input's mean size
_BY_COLUMN = 0.75  # of the size of its column of the weight
_MOST = 16.0
_NONE = 1e-20  # instead of zero
_TINY = 1e-6  # of the largest: what is never seen has a unit all the same


def apply_units(
    layer: DecoderLayer, shape: DecoderShape, sizes: Mapping[str, Tensor], kept: torch.dtype
) -> dict[str, Tensor]:
    """Divide inputs and multiply columns, in place; the layer's outputs stay the same.

    sizes: the mean of |x| of the inputs of each linear layer. kept: the dtype that norms have in
    the file; units are such that these round to nothing else. Returns what the inputs were divided
    by, by the names that `sizes` has.
    """
    order = stages(shape)
    if shape.norms == "before":
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
    elif shape.norms == "around":
        norms = [layer.input_layernorm, layer.pre_feedforward_layernorm]
    else:
        norms = []
    linears = {name: linear_of(layer, name) for names in order for name in names}
    divided = {name: torch.ones_like(one) for name, one in sizes.items()}
    for norm, names in zip(norms, order[::2], strict=False):
        wanted = _units(sizes[names[0]], [linears[name] for name in names])
        units = divided[names[0]] = _divide_norm(norm.weight, shape.norm, wanted, kept)
        for name in names:
            linears[name].weight.mul_(units)
    (*_, value), [output], (*_, up), [down] = ([linears[name] for name in names] for names in order)
    units = divided["mlp.down_proj"] = _units(sizes["mlp.down_proj"], [down])
    _divide_outputs(up, units)
    down.weight.mul_(units)
    by_head = (shape.kv_heads, -1, shape.head_dim)
    units = _units(sizes["self_attn.o_proj"], [output]).view(by_head)
    shared = units.log().mean(dim=1, keepdim=True).exp()
    _divide_outputs(value, shared.flatten())
    units = divided["self_attn.o_proj"] = shared.expand_as(units).flatten()
    output.weight.mul_(units)
    return divided


def _units(sizes: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Units `[inputs]` around 1, for layers with one input.

    Their range is limited: what is divided by them must stay a number of float16.
    """
    weights = [
        one.weight / one.weight.abs().amax(dim=1, keepdim=True).clamp_min(_NONE) for one in layers
    ]
    columns = torch.cat(weights).square_().mean(dim=0).sqrt_()
    units = _some(sizes).log_() * _BY_INPUT - _some(columns).log_() * _BY_COLUMN
    return (units - units.mean()).exp_().clamp_(1 / _MOST, _MOST)


def _some(sizes: Tensor) -> Tensor:
    """Sizes, none of which is zero."""
    return sizes.clamp_min(max(_TINY * float(sizes.max()), _NONE))


def _divide_norm(weight: Tensor, kind: NormKind, units: Tensor, kept: torch.dtype) -> Tensor:
    """Divide a norm's weight, in place; returns the units with which it needs no rounding."""
    offset = 1.0 if kind == "gemma" else 0.0  # which multiplies by 1 + weight
    divided = ((weight + offset) / units - offset).to(kept).float()
    exact = (weight + offset) / (divided + offset)
    usable = torch.isfinite(exact) & (exact != 0)
    weight.copy_(torch.where(usable, divided, weight))
    return torch.where(usable, exact, 1.0)


def _divide_outputs(linear: nn.Linear, units: Tensor) -> None:
    """Divide the last outputs of a linear layer: v's of q, k, v, or up's of gate and up."""
    linear.weight[-len(units) :].div_(units.unsqueeze(1))
    if linear.bias is not None:
        linear.bias[-len(units) :].div_(units)
