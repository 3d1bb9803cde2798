"""Weights in 8 bits: one scale for each output, symmetric.

    weight[o, i]  ~  values[o, i] * scales[o]        values int8, -127 .. 127 (from files also -128)

`products` chooses one of four products:

1. CPU with AMX, bfloat16 rows: the compiled product for bfloat16 weights, which converts values to
   bfloat16 as it reads them, exactly (see `native/linear.h`).
2. CPU with AVX2: a compiled product of integers (see `native/narrow/integers.h`). Each group of 32
   inputs of a row becomes 8-bit integers with a step. One step for a whole row would be too large
   for most of its elements. Sums of integers are exact. So the result of a row has the same bits in
   any batch, on any number of threads, and on any CPU with this product.
3. x86 CPU without compiled kernels: FBGEMM's product of integers. The result of a row also has the
   same bits in any batch.
4. Anywhere: a float product with the weight, which is dequantized tile by tile.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.native import avx2_library, required
from headstart.native.bindings import INT8
from headstart.weights.format import (
    WeightFormat,
    WeightKind,
    check_numbers,
    multiply_tiles,
    scratch,
    tile_outputs,
    widen_tiles,
)
from headstart.weights.products import (
    CompiledProduct,
    choose_product,
    fbgemm_multiply,
    fbgemm_pack,
    fbgemm_unpack,
)

_WIDE_PANEL = 32  # outputs, see native/linear.h
_PANEL, _GROUP = 16, 32  # outputs and inputs, see native/narrow/integers.h
_LEVELS = 127
_MIDDLE = 128
_TINY = 1e-30  # minimum scale, for rows of zeros


class Int8Values(NamedTuple):
    """A weight `values * scales`: int8 `[outputs, inputs]`, float32 `[outputs]`."""

    values: Tensor
    scales: Tensor

    def unpack(self) -> Tensor:
        """Return the weight in float32."""
        return self.values.float().mul_(self.scales.unsqueeze(1))

    def is_finite(self) -> bool:
        """Return True, since scales are checked when they are read."""
        return True

    def to(self, device: torch.device) -> "Int8Values":
        """Return the values on a device. Scales are copied: they may be in a mapped file."""
        return Int8Values(self.values.to(device), self.scales.to(device, copy=True))

    def store(
        self, bias: Tensor | None, rows: torch.dtype = torch.float32, table: bool = False
    ) -> "Int8Weight":
        """Return the matrix. rows: the dtype of input rows. table: it is also an embedding."""
        return Int8Weight(self, bias, rows, table)


def quantize_int8(weight: Tensor) -> Int8Values:
    """Round a float weight `[outputs, inputs]` to int8."""
    outputs, inputs = weight.shape
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = tile_outputs(inputs)
    for start in range(0, outputs, step):  # in tiles, to save memory
        rounded = scratch(weight[start : start + step].numel(), weight.device).view(-1, inputs)
        rounded.copy_(weight[start : start + step].detach())
        largest = torch.maximum(rounded.amax(dim=1), rounded.amin(dim=1).neg_())
        scale = largest.div_(_LEVELS).clamp_min_(_TINY)
        values[start : start + step] = rounded.div_(scale.unsqueeze(1)).round_()
        scales[start : start + step] = scale
    return Int8Values(values, scales)


class Int8Weight(WeightFormat):
    """An int8 weight, laid out for its product with input rows in a dtype.

    table: the weight is also an embedding, so its rows are read by number. FBGEMM's layout does not
    allow this.
    """

    kind: WeightKind | None = "int8"
    name = "Int8Linear"
    rounding = 1 / 127
    values: Tensor | None = None
    """The values int8 `[outputs, inputs]`; None if only `product` or FBGEMM has them."""

    def __init__(
        self,
        weight: Int8Values,
        bias: Tensor | None = None,
        rows: torch.dtype = torch.float32,
        table: bool = False,
    ) -> None:
        values, scales = weight
        outputs, inputs = shape = values.shape
        own_bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        super().__init__(outputs, inputs, own_bias)
        self.scales = scales
        self._fbgemm: Any = None
        product = choose_product("int8", rows, scales.device)
        if product == "integers":
            panels = _make_panels(values)
            self.product = CompiledProduct(torch.float32, INT8, shape, panels, own_bias, scales)
        elif product == "bfloat16":
            panels, scales = _make_wide_panels(values), scales.float().contiguous()
            self.product = CompiledProduct(torch.bfloat16, INT8, shape, panels, bias, scales)
        elif product == "fbgemm":
            self._fbgemm = fbgemm_pack(values, scales)
        if product == "torch" or (product == "fbgemm" and table):
            self.values = values

    @property
    def tensors(self) -> list[Tensor]:
        stored = self.values if self.product is None else self.product.values
        return [self.scales] if stored is None else [stored, self.scales]

    def unpack(self) -> Tensor:
        if self._fbgemm is not None and self.values is None:
            return Int8Values(fbgemm_unpack(self._fbgemm), self.scales).unpack()
        return super().unpack()

    def rows(self, numbers: Tensor) -> Tensor:
        numbers = check_numbers(numbers, self.outputs)
        if self.product is None:
            assert self.values is not None, "FBGEMM's layout has no rows"
            values = self.values[numbers]
        elif self.product.dtype == torch.float32:
            panels = self.product.values
            values = panels[numbers // _PANEL, :, numbers % _PANEL].flatten(-2) ^ _MIDDLE
            values = values[..., : self.inputs].view(torch.int8)
        else:
            panel, output = numbers // _WIDE_PANEL, numbers % _WIDE_PANEL
            half, output = output // (_WIDE_PANEL // 2), output % (_WIDE_PANEL // 2)
            values = self.product.values[panel, :, half, :, output].flatten(-2)
            values = values[..., : self.inputs]
        return values * self.scales[numbers].unsqueeze(-1)

    def _multiply(self, rows: Tensor) -> Tensor:
        if self._fbgemm is not None:
            return fbgemm_multiply(rows, self._fbgemm)
        assert self.values is not None
        return multiply_tiles(rows, self.outputs, widen_tiles(self.values)).mul_(self.scales)


def _make_panels(values: Tensor) -> Tensor:
    """Return values in the panels of `native/narrow/integers.h`: uint8 `[panels, ..., 16, 4]`."""
    outputs, inputs = values.shape
    shape = (-(-outputs // _PANEL), -(-inputs // _GROUP) * _GROUP // 4, _PANEL, 4)
    panels, values = torch.empty(shape, dtype=torch.uint8), values.contiguous()
    required(avx2_library()).headstart_pack_int8(
        values.data_ptr(), outputs, inputs, panels.data_ptr(), torch.get_num_threads()
    )
    return panels


def _make_wide_panels(values: Tensor) -> Tensor:
    """Return values in the panels of `native/linear.h`: int8 `[panels, inputs / 2, 2, 2, 16]`."""
    outputs, inputs = values.shape
    padded = nn.functional.pad(values, (0, inputs % 2, 0, -outputs % _WIDE_PANEL))
    halves = padded.view(-1, 2, _WIDE_PANEL // 2, padded.shape[1] // 2, 2)
    return halves.permute(0, 3, 1, 4, 2).contiguous()
