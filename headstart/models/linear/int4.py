"""Weights in 4 bits: a scale and a zero point for each 32 inputs of an output.

    weight[o, i]  ~  (values[o, i] - 8) * scale[o, i // 32] + zero[o, i // 32]      values 0 .. 15

Scales and zero points are bfloat16, as torch's product of few rows takes them: 5 bits a weight in
all. That product also rounds the rows, and its result, to bfloat16; it sums in float32, each row
by itself, so a row has the same bits alone and in any batch of few rows.

The layout is that product's own. Outputs lie in panels of 32 (AVX2) or 64 (AVX-512); a byte holds
two outputs of one input, of which the first is in the lower half of the panel:

    packed[p, i, j]  =  values[p * panel + j, i]  |  values[p * panel + panel / 2 + j, i] << 4

Many rows take a float product: the weight is dequantised tile by tile into scratch memory.
"""

from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headstart.models.linear.base import TILE, QuantizedLinear, WeightKind, scratch

__all__ = ["GROUP", "Int4Linear", "Int4Weight", "pack_int4", "quantize_int4"]

GROUP = 32
"""Inputs that share a scale. With 64, half of what a weight loses more is lost again."""
_LEVELS = 15
_MIDDLE = 8
_TINY = 1e-30
_PANEL = 32
# From this many rows on, dequantising costs less than what the product of few rows loses.
_MOST_FEW_ROWS = 48


class Int4Weight(NamedTuple):
    """A packed weight: uint8 `[panels, inputs, panel / 2]`, bfloat16 `[groups, outputs, 2]`.

    `outputs` and `inputs` of the weight itself, without what fills the last panel and group.
    """

    packed: Tensor
    grid: Tensor
    outputs: int
    inputs: int

    @property
    def panel(self) -> int:
        """Outputs of a panel."""
        return 2 * self.packed.shape[2]

    def tile(self, first: int, last: int) -> Tensor:
        """The weight of some panels, transposed: float32 `[inputs, outputs]` of scratch memory."""
        bytes_ = self.packed[first:last].transpose(0, 1)
        inputs, panels, half = bytes_.shape
        tile = scratch(2 * bytes_.numel(), bytes_.device).view(inputs, panels, 2, half)
        tile[:, :, 0] = bytes_ & _LEVELS
        tile[:, :, 1] = bytes_ >> 4
        scale, zero = self.grid[:, first * self.panel : last * self.panel].float().unbind(-1)
        groups = tile.view(len(scale), GROUP, -1)
        groups.mul_(scale.unsqueeze(1)).add_((zero - _MIDDLE * scale).unsqueeze(1))
        return tile.view(inputs, -1)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """A 4-bit weight near a floating-point `[outputs, inputs]`.

    Each group's grid reaches from its smallest to its largest element.
    """
    outputs, inputs = weight.shape
    values, scales, zeros = [], [], []
    step = max(1, TILE // max(1, inputs))
    for start in range(0, outputs, step):  # no second copy of all of it in float32
        part = weight[start : start + step].detach().float()
        padded = nn.functional.pad(part, (0, -inputs % GROUP))
        groups = padded.view(len(part), -1, GROUP)
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / _LEVELS).clamp_min_(_TINY).bfloat16()
        zero = (low + _MIDDLE * scale.float()).bfloat16()
        at = (groups - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
        values.append(at.round_().add_(_MIDDLE).clamp_(0, _LEVELS).to(torch.uint8).flatten(1))
        scales.append(scale)
        zeros.append(zero)
    return pack_int4(torch.cat(values), torch.cat(scales), torch.cat(zeros), inputs)


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor, inputs: int) -> Int4Weight:
    """A weight of these values uint8 `[outputs, inputs]`, scales and zero points `[.., groups]`.

    The last group is whole in `values`; `inputs` says how many of its inputs count.
    """
    outputs = len(values)
    panel = _kernel_panel() or _PANEL
    fill = -outputs % panel
    panels = nn.functional.pad(values, (0, 0, 0, fill)).view(-1, panel, values.shape[1])
    low, high = panels[:, : panel // 2], panels[:, panel // 2 :]
    packed = (low | high << 4).transpose(1, 2).contiguous()
    grid = torch.stack((scales, zeros), dim=-1).to(torch.bfloat16).transpose(0, 1)
    grid = nn.functional.pad(grid, (0, 0, 0, fill)).contiguous()
    return Int4Weight(packed, grid, outputs, inputs)


class Int4Linear(QuantizedLinear):
    """A linear layer with an int4 weight."""

    kind: ClassVar[WeightKind] = "int4"
    rounding: ClassVar[float] = torch.finfo(torch.bfloat16).eps
    packed: Tensor
    grid: Tensor

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight.inputs, weight.outputs, bias)
        self.register_buffer("packed", weight.packed, persistent=False)
        self.register_buffer("grid", weight.grid, persistent=False)
        self._fill = -weight.inputs % GROUP
        self._has_kernel = weight.packed.device.type == "cpu" and _kernel_panel() is not None

    @classmethod
    def quantize(cls, weight: Tensor, bias: Tensor | None) -> "Int4Linear":
        return cls(quantize_int4(weight), bias)

    @property
    def weight_parts(self) -> Int4Weight:
        """The packed weight."""
        return Int4Weight(self.packed, self.grid, self.out_features, self.in_features)

    def unpack(self) -> Tensor:
        weight = self.weight_parts
        tiles = [weight.tile(at, at + 1).T.clone() for at in range(len(self.packed))]
        return torch.cat(tiles)[: self.out_features, : self.in_features]

    def multiply(self, rows: Tensor) -> Tensor:
        if self._fill:
            rows = nn.functional.pad(rows, (0, self._fill))
        if self._has_kernel and len(rows) <= _MOST_FEW_ROWS:
            return self._multiply_few(rows)
        return self._multiply_tiles(rows)

    def _multiply_few(self, rows: Tensor) -> Tensor:
        out = _kernel(rows.bfloat16(), self.packed, self.grid)
        return out[:, : self.out_features].float()

    def _multiply_tiles(self, rows: Tensor) -> Tensor:
        weight = self.weight_parts
        count = len(self.packed)
        out = rows.new_empty((len(rows), count * weight.panel))
        step = max(1, TILE // (weight.panel * rows.shape[1]))
        for first in range(0, count, step):
            last = min(count, first + step)
            out[:, first * weight.panel : last * weight.panel] = rows @ weight.tile(first, last)
        return out[:, : self.out_features]


def _kernel(rows: Tensor, packed: Tensor, grid: Tensor) -> Tensor:
    """Rows bfloat16 times a packed weight, by torch's product for few rows."""
    flat = packed.view(-1, packed.shape[1] // 2)
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, flat, GROUP, grid)
    return out


@cache
def _kernel_panel() -> int | None:
    """Outputs of a panel of torch's product on this CPU; None if it has another layout, or none."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (128, GROUP), generator=generator, dtype=torch.int32)
    try:
        wanted = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1).flatten()
    except (RuntimeError, AttributeError):  # torch was built without, or has another name for it
        return None
    for panel in (32, 64):
        panels = values.to(torch.uint8).view(-1, panel, GROUP)
        low, high = panels[:, : panel // 2], panels[:, panel // 2 :]
        if torch.equal((low | high << 4).transpose(1, 2).flatten(), wanted):
            return panel
    return None
