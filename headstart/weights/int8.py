"""Weights in 8 bits: one scale for each output, symmetric.

    weight[o, i]  ~  values[o, i] * scales[o]        values int8, -127 .. 127; -128 from checkpoints

Four products, of which `Int8Weight` takes the one that `products` chooses:

1. On a CPU with AMX, rows in bfloat16: by the compiled product for weights in bfloat16, which makes
   bfloat16 of the values as it reads them (see `native/linear.h`). None is rounded.
2. On a CPU with AVX2: as integers, by a compiled product (see `native/narrow/integers.h`). Each 32
   inputs of a row become whole numbers of 8 bits and a step: a row has some elements much larger
   than the others, and 8 bits of the largest are too few for the rest. Sums of integers are exact,
   so a row's result has the same bits alone, in any batch, on any number of threads and on any CPU
   with this product.
3. On a CPU for x86 without compiled kernels: as integers, by FBGEMM. It, too, gives a row the same
   bits in any batch.
4. Anywhere: the weight is dequantized tile by tile into scratch memory for a float product.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.native import avx2_library
from headstart.native.bindings import INT8
from headstart.weights.format import (
    WeightFormat,
    WeightKind,
    check_numbers,
    scratch,
    tile_outputs,
)
from headstart.weights.products import (
    CompiledProduct,
    Parts,
    choose_product,
    fbgemm_multiply,
    fbgemm_pack,
    fbgemm_unpack,
)

__all__ = ["Int8Values", "Int8Weight", "quantize_int8"]

_WIDE_PANEL = 32  # outputs, see native/linear.h
_PANEL, _GROUP = 16, 32  # outputs and inputs, see native/narrow/integers.h
_LEVELS = 127
_MIDDLE = 128
_TINY = 1e-30  # an all-zero row has no scale


class Int8Values(NamedTuple):
    """A weight `values * scales`: int8 `[outputs, inputs]`, float32 `[outputs]`.

    values: alternatively uint8 `[panels, inputs / 4, 16, 4]`, in whole panels and groups, as
    `native/narrow/integers.h` describes; only compiled kernels write these.
    """

    values: Tensor
    scales: Tensor
    inputs: int

    @property
    def is_packed(self) -> bool:
        """True if the values are in panels."""
        return self.values.dim() == 4

    def rows(self, numbers: Tensor) -> Tensor:
        """Return values by output: int8 `[..., inputs]`; raises `IndexError`."""
        numbers = check_numbers(numbers, len(self.scales))
        if not self.is_packed:
            return self.values[numbers]
        rows = self.values[numbers // _PANEL, :, numbers % _PANEL].flatten(-2) ^ _MIDDLE
        return rows[..., : self.inputs].view(torch.int8)

    @property
    def plain(self) -> Tensor:
        """The values as int8 `[outputs, inputs]`."""
        return self.rows(torch.arange(len(self.scales))) if self.is_packed else self.values

    def pack(self) -> "Int8Values":
        """Return the weight with its values in panels."""
        if self.is_packed:
            return self
        panels = _empty_panels(*self.values.shape)
        _write_panels(panels, 0, self.values)
        return self._replace(values=panels)

    def unpack(self) -> Tensor:
        """Return the weight in float32."""
        return self.plain.float().mul_(self.scales.unsqueeze(1))

    def is_finite(self) -> bool:
        """True: values are integers, and scales are checked when they are read."""
        return True

    def to(self, device: torch.device) -> "Int8Values":
        """Return the values on a device; scales in float32 may lie in the file."""
        return self._replace(values=self.plain.to(device), scales=self.scales.to(device, copy=True))

    def store(
        self, bias: Tensor | None, rows: torch.dtype = torch.float32, table: bool = False
    ) -> "Int8Weight":
        """Return the matrix for rows in a dtype."""
        return Int8Weight(self, bias, rows, table)


def _empty_panels(outputs: int, inputs: int) -> Tensor:
    panels, groups = -(-outputs // _PANEL), -(-inputs // _GROUP)
    return torch.empty((panels, groups * _GROUP // 4, _PANEL, 4), dtype=torch.uint8)


def _write_panels(panels: Tensor, start: int, values: Tensor) -> None:
    """Write int8 `[some, inputs]`: whole panels from output `start` on, or the last."""
    kernels, values = avx2_library(), values.contiguous()
    assert kernels is not None, "the caller asks first"
    place = panels[start // _PANEL :].data_ptr()
    kernels.headstart_pack_int8(values.data_ptr(), *values.shape, place, torch.get_num_threads())


def quantize_int8(weight: Tensor, rows: torch.dtype = torch.float32) -> Int8Values:
    """Return the nearest int8 weight to floats `[outputs, inputs]`, for rows of this dtype."""
    outputs, inputs = weight.shape
    packs = choose_product("int8", rows, weight.device) == "integers"
    if packs:
        values = _empty_panels(outputs, inputs)
    else:
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = -(-tile_outputs(inputs) // _PANEL) * _PANEL
    for start in range(0, outputs, step):  # no second copy of all of it in float32
        rounded = scratch(weight[start : start + step].numel(), weight.device).view(-1, inputs)
        rounded.copy_(weight[start : start + step].detach())
        largest = torch.maximum(rounded.amax(dim=1), rounded.amin(dim=1).neg_())
        scale = largest.div_(_LEVELS).clamp_min_(_TINY)
        rounded.div_(scale.unsqueeze(1)).round_()
        if packs:
            _write_panels(values, start, rounded.to(torch.int8))
        else:
            values[start : start + step] = rounded
        scales[start : start + step] = scale
    return Int8Values(values, scales, inputs)


class Int8Weight(WeightFormat):
    """An int8 weight, laid out for its product with rows in a dtype.

    table: single rows of it are read, too, which FBGEMM's layout does not allow.
    """

    kind: WeightKind | None = "int8"
    name = "Int8Linear"
    rounding = 1 / 127
    values: Int8Values | None = None
    """The values, unless only `product` or FBGEMM has them."""

    def __init__(
        self,
        weight: Int8Values,
        bias: Tensor | None = None,
        rows: torch.dtype = torch.float32,
        table: bool = False,
    ) -> None:
        outputs, inputs = shape = (len(weight.scales), weight.inputs)
        own_bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        super().__init__(outputs, inputs, own_bias)
        self.scales = weight.scales
        self._fbgemm: Any = None
        product = choose_product("int8", rows, weight.scales.device)
        if product == "integers":
            self.values = weight.pack()
            parts = Parts(self.values.values, INT8, weight.scales)
            self.product = CompiledProduct(torch.float32, parts, shape, own_bias)
        elif product == "bfloat16":
            parts = Parts(_wide_panels(weight), INT8, weight.scales.float().contiguous())
            self.product = CompiledProduct(torch.bfloat16, parts, shape, bias)
        elif product == "fbgemm":
            self._fbgemm = fbgemm_pack(weight.plain, weight.scales)
        if product == "torch" or (product == "fbgemm" and table):
            self.values = weight._replace(values=weight.plain)

    @property
    def tensors(self) -> list[Tensor]:
        stored = [] if self.values is None else [self.values.values]
        if self.values is None and self.product is not None:
            stored = [self.product.parts.values]
        return [*stored, self.scales]

    def unpack(self) -> Tensor:
        if self._fbgemm is not None and self.values is None:
            return Int8Values(fbgemm_unpack(self._fbgemm), self.scales, self.inputs).unpack()
        return super().unpack()

    def rows(self, numbers: Tensor) -> Tensor:
        if self.values is not None:
            values = self.values.rows(numbers)
        else:
            assert self.product is not None, "FBGEMM's layout has no rows"
            values = _read_wide_panels(self.product.parts.values, numbers, self)
        return values * self.scales[numbers.long()].unsqueeze(-1)

    def _multiply(self, rows: Tensor) -> Tensor:
        if self._fbgemm is not None:
            return fbgemm_multiply(rows, self._fbgemm)
        assert self.values is not None
        return _multiply_tiles(rows, self.values.values).mul_(self.scales)


def _wide_panels(weight: Int8Values) -> Tensor:
    """Return the values in the panels of `native/linear.h`."""
    padded = nn.functional.pad(
        weight.plain, (0, weight.inputs % 2, 0, -len(weight.scales) % _WIDE_PANEL)
    )
    halves = padded.view(-1, 2, _WIDE_PANEL // 2, padded.shape[1] // 2, 2)
    return halves.permute(0, 3, 1, 4, 2).contiguous()


def _read_wide_panels(panels: Tensor, numbers: Tensor, matrix: WeightFormat) -> Tensor:
    numbers = check_numbers(numbers, matrix.outputs)
    flat, half = numbers.reshape(-1), _WIDE_PANEL // 2
    panel, output = flat // _WIDE_PANEL, flat % _WIDE_PANEL
    rows = panels[panel, :, output // half, :, output % half].flatten(1)
    return rows[:, : matrix.inputs].reshape(*numbers.shape, matrix.inputs)


def _multiply_tiles(rows: Tensor, values: Tensor) -> Tensor:
    """Multiply rows by values that become floats tile by tile."""
    outputs, inputs = values.shape
    out = rows.new_empty((len(rows), outputs))
    step = tile_outputs(inputs)
    for start in range(0, outputs, step):
        part = values[start : start + step]
        tile = scratch(part.numel(), part.device).view(part.shape).copy_(part)
        out[:, start : start + step] = rows @ tile.T
    return out
