"""Weights in 8 bits: one scale for each output, symmetric.

    weight[o, i]  ~  values[o, i] * scales[o]        values int8, -127 .. 127; -128 from checkpoints

Four products, of which `Int8Linear` takes the one that `products` says:

1. On a CPU with AMX, rows in bfloat16: by the compiled product for weights in bfloat16, which makes
   numbers of bfloat16 of the values as it reads them (see `native/linear.h`). None is rounded.
2. On a CPU with AVX2: as integers, by a compiled product (see `native/narrow/integers.h`). Each 32
   inputs of a row become whole numbers of 8 bits and a step of their own: a row has some elements
   much larger than the others, and 8 bits of the largest are too few for the rest. Sums of integers
   are exact, so a row's result has the same bits alone, in any batch, on any number of threads and
   on any CPU that takes this way.
3. On a CPU for x86 without compiled kernels: as integers, by FBGEMM (see `fbgemm`). It, too, gives
   a row the same bits in any batch.
4. Anywhere: the weight is dequantised tile by tile into scratch memory for a float product.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headstart.native import avx2_library
from headstart.native.bindings import INT8
from headstart.weights import fbgemm
from headstart.weights.base import QuantizedLinear, WeightKind, scratch, tile_outputs
from headstart.weights.float_weight import FloatParts, FloatWeight
from headstart.weights.packed import NarrowPanels, PackedWeight, check_numbers
from headstart.weights.products import choose_product

__all__ = ["Int8Linear", "Int8Panels", "Int8Weight", "quantize_int8"]

_WIDE_PANEL = 32  # outputs, see native/linear.h
_PANEL, _GROUP = 16, 32  # outputs and inputs, see native/narrow/integers.h
_LEVELS = 127
_MIDDLE = 128
_TINY = 1e-30  # an all-zero row has no scale


class Int8Panels(NamedTuple):
    """Values in the panels of `native/narrow/integers.h`: uint8 `[panels, inputs / 4, 16, 4]`.

    In whole panels and groups. `shape` is `[outputs, inputs]`, of the weight itself.
    """

    bytes: Tensor
    shape: torch.Size

    @classmethod
    def empty(cls, shape: torch.Size) -> "Int8Panels":
        """Memory for the values of a weight."""
        panels, groups = -(-shape[0] // _PANEL), -(-shape[1] // _GROUP)
        size = (panels, groups * _GROUP // 4, _PANEL, 4)
        return cls(torch.empty(size, dtype=torch.uint8), shape)

    def write(self, start: int, values: Tensor) -> None:
        """Put int8 `[some, inputs]` in its place: whole panels from output `start`, or the last."""
        found, values = avx2_library(), values.contiguous()
        assert found is not None, "the caller asks first"
        place = self.bytes[start // _PANEL :].data_ptr()
        found.headstart_pack_int8(values.data_ptr(), *values.shape, place, torch.get_num_threads())

    def rows(self, numbers: Tensor) -> Tensor:
        """Values of outputs by number, integers of any shape: int8 `[..., inputs]`.

        Raises `IndexError` for one that the weight does not have.
        """
        numbers = check_numbers(numbers, self.shape[0])
        found = self.bytes[numbers // _PANEL, :, numbers % _PANEL].flatten(-2) ^ _MIDDLE
        return found[..., : self.shape[1]].view(torch.int8)

    def unpack(self) -> Tensor:
        """All values as a new tensor, int8 `[outputs, inputs]`."""
        return self.rows(torch.arange(self.shape[0]))


class Int8Weight(NamedTuple):
    """A weight `values * scales`: int8 `[outputs, inputs]`, or its panels; float32 `[outputs]`."""

    values: Tensor | Int8Panels
    scales: Tensor

    @property
    def plain(self) -> Tensor:
        """The values as int8 `[outputs, inputs]`."""
        return self.values.unpack() if isinstance(self.values, Int8Panels) else self.values

    @property
    def panels(self) -> Int8Panels:
        """The values in panels, which only compiled kernels write."""
        if isinstance(self.values, Int8Panels):
            return self.values
        panels = Int8Panels.empty(self.values.shape)
        panels.write(0, self.values)
        return panels

    def unpack(self) -> Tensor:
        """The weight in float32."""
        return self.plain.float().mul_(self.scales.unsqueeze(1))


def quantize_int8(weight: Tensor, rows: torch.dtype = torch.float32) -> Int8Weight:
    """The nearest int8 weight to a floating-point `[outputs, inputs]`, for rows of this dtype."""
    inputs, values = weight.shape[1], _empty(weight, rows)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = -(-tile_outputs(inputs) // _PANEL) * _PANEL
    for start in range(0, len(weight), step):  # no second copy of all of it in float32
        rounded = scratch(weight[start : start + step].numel(), weight.device).view(-1, inputs)
        rounded.copy_(weight[start : start + step].detach())
        largest = torch.maximum(rounded.amax(dim=1), rounded.amin(dim=1).neg_())
        scale = largest.div_(_LEVELS).clamp_min_(_TINY)
        rounded.div_(scale.unsqueeze(1)).round_()
        if isinstance(values, Int8Panels):
            values.write(start, rounded.to(torch.int8))
        else:
            values[start : start + step] = rounded
        scales[start : start + step] = scale
    return Int8Weight(values, scales)


def _empty(weight: Tensor, rows: torch.dtype) -> Tensor | Int8Panels:
    if choose_product("int8", rows, weight.device) == "integers":
        return Int8Panels.empty(weight.shape)
    return torch.empty(weight.shape, dtype=torch.int8, device=weight.device)


class Int8Linear(QuantizedLinear):
    """A linear layer with an int8 weight, kept as its product wants it.

    table: single outputs are read, too; FBGEMM keeps no weight that this can be done with.
    """

    kind: ClassVar[WeightKind] = "int8"
    rounding: ClassVar[float] = 1 / 127
    values: Tensor | None  # for tiles, or for rows beside FBGEMM's
    panel_bytes: Tensor | None  # of `panels`
    _for_fbgemm: Any = None

    def __init__(
        self,
        weight: Int8Weight,
        bias: Tensor | None = None,
        rows: torch.dtype = torch.float32,
        table: bool = False,
    ) -> None:
        outputs, inputs = weight.values.shape
        super().__init__(inputs, outputs, bias)
        product = choose_product("int8", rows, weight.scales.device)
        panels = weight.panels if product == "integers" else None
        if panels is not None:
            parts = FloatParts(panels.bytes, INT8, weight.scales)
            self.float_weight = FloatWeight(parts, outputs, inputs, self.bias)
        elif product == "bfloat16":
            self.packed = PackedWeight.of_panels(_to_panels(weight), bias)
        elif product == "fbgemm":
            self._for_fbgemm = fbgemm.pack(weight.plain, weight.scales)
        self.register_buffer("scales", weight.scales, persistent=False)
        self.register_buffer("panel_bytes", panels and panels.bytes, persistent=False)
        plain = weight.plain if product == "torch" or (product == "fbgemm" and table) else None
        self.register_buffer("values", plain, persistent=False)

    @classmethod
    def quantize(
        cls, weight: Tensor, bias: Tensor | None, rows: torch.dtype = torch.float32
    ) -> "Int8Linear":
        return cls(quantize_int8(weight, rows), bias, rows)

    @property
    def panels(self) -> Int8Panels | None:
        """The values, where the compiled product of integers takes them."""
        if self.panel_bytes is None:
            return None
        return Int8Panels(self.panel_bytes, torch.Size((self.out_features, self.in_features)))

    def unpack(self) -> Tensor:
        if (packed := self.packed or self.panels) is not None:
            values = packed.unpack()
        else:
            values = fbgemm.unpack(self._for_fbgemm) if self.values is None else self.values
        return Int8Weight(values, self.scales).unpack()

    def rows(self, numbers: Tensor) -> Tensor:
        if (packed := self.packed or self.panels) is not None:
            values = packed.rows(numbers)
        else:
            assert self.values is not None, "a table's"
            values = self.values[check_numbers(numbers, self.out_features)]
        return values * self.scales[numbers.long()].unsqueeze(-1)

    def multiply(self, rows: Tensor) -> Tensor:
        if self._for_fbgemm is not None:
            return fbgemm.multiply_digits(rows, self._for_fbgemm)
        assert self.values is not None
        return _multiply_tiles(rows, self.values).mul_(self.scales)


def _to_panels(weight: Int8Weight) -> NarrowPanels:
    outputs, inputs = weight.values.shape
    padded = nn.functional.pad(weight.plain, (0, inputs % 2, 0, -outputs % _WIDE_PANEL))
    halves = padded.view(-1, 2, _WIDE_PANEL // 2, padded.shape[1] // 2, 2)
    panels = halves.permute(0, 3, 1, 4, 2).contiguous()
    return NarrowPanels(panels, INT8, inputs, weight.scales.float().contiguous())


def _multiply_tiles(rows: Tensor, values: Tensor) -> Tensor:
    """Rows times values that become floats tile by tile."""
    outputs, inputs = values.shape
    out = rows.new_empty((len(rows), outputs))
    step = tile_outputs(inputs)
    for start in range(0, outputs, step):
        part = values[start : start + step]
        tile = scratch(part.numel(), part.device).view(part.shape).copy_(part)
        out[:, start : start + step] = rows @ tile.T
    return out
