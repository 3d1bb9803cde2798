"""Weights in 8 bits: one scale for each output, symmetric.

    weight[o, i]  ~  values[o, i] * scales[o]        values int8, -127 .. 127; -128 from checkpoints

Four ways to multiply, of which `Int8Linear` takes the first that this machine is made for:

1. On a CPU with AMX, rows in bfloat16: by the compiled product for weights in bfloat16, which makes
   numbers of bfloat16 of the values as it reads them (see `native/linear.h`). None is rounded.
2. On a CPU with VNNI: as integers, by FBGEMM, which torch brings for x86. It takes 7 bits of an
   input: with 8, a CPU without VNNI saturates the sum of two products. A row has some elements much
   larger than the others, and 7 bits of the largest are too few for the rest (perplexity 17 % worse
   in SmolLM2-135M). So a row is split into two digits of 7 bits, two rows of one product:

       x  ~  top / 63 * (high + low / 126)              high, low: whole numbers, -63 .. 63

   which has 14 bits, at the price of a second row that costs nothing while the product waits for
   memory. Sums of integers are exact, so a row's result has the same bits alone, in any batch, on
   any number of threads and on any CPU that takes this way.
3. On a CPU with AVX2 and without VNNI: as integers, by a compiled product of rows in 15 bits (see
   `native/narrow/int8.cpp`). The compiled products, too, give a row the same bits in any batch.
4. Anywhere: the weight is dequantised tile by tile into scratch memory for a float product.
"""

import warnings
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headstart.machine import cpu_flags
from headstart.models.linear.base import QuantizedLinear, WeightKind, scratch, tile_outputs
from headstart.models.linear.float_weight import FloatParts, FloatWeight
from headstart.models.packed import NarrowPanels, PackedWeight
from headstart.native import AMX, avx2_library, level
from headstart.native.bindings import INT8

__all__ = ["Int8Linear", "Int8Weight", "quantize_int8"]

_PANEL = 32  # of the compiled kernels, see native/linear.h
_LEVELS = 127
_DIGIT = 63  # the largest digit
_ZERO_POINT = 64
_TINY = 1e-30  # an all-zero row has no scale


class Int8Weight(NamedTuple):
    """A weight `values * scales`: int8 `[outputs, inputs]` and float32 `[outputs]`."""

    values: Tensor
    scales: Tensor

    def unpack(self) -> Tensor:
        """The weight in float32."""
        return self.values.float().mul_(self.scales.unsqueeze(1))


def quantize_int8(weight: Tensor) -> Int8Weight:
    """The nearest int8 weight to a floating-point `[outputs, inputs]`."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = tile_outputs(weight.shape[1])
    for start in range(0, len(weight), step):  # no second copy of all of it in float32
        part = weight[start : start + step].detach().float()
        scale = part.abs().amax(dim=1).div_(_LEVELS).clamp_min_(_TINY)
        values[start : start + step] = (part / scale.unsqueeze(1)).round_()
        scales[start : start + step] = scale
    return Int8Weight(values, scales)


class Int8Linear(QuantizedLinear):
    """A linear layer with an int8 weight, packed for the compiled product or FBGEMM."""

    kind: ClassVar[WeightKind] = "int8"
    rounding: ClassVar[float] = 1 / (2 * _DIGIT**2)
    values: Tensor  # where it is not packed

    def __init__(
        self, weight: Int8Weight, bias: Tensor | None = None, rows: torch.dtype = torch.float32
    ) -> None:
        outputs, inputs = weight.values.shape
        super().__init__(inputs, outputs, bias)
        self.register_buffer("scales", weight.scales, persistent=False)
        on_cpu = weight.values.device.type == "cpu"
        if on_cpu and rows == torch.bfloat16 and level() >= AMX:
            self.packed = PackedWeight.of_panels(_to_panels(weight), bias)
        has_fbgemm = on_cpu and self.packed is None and _multiplies_integers() and _has_fbgemm()
        self._for_fbgemm = _pack(weight) if has_fbgemm else None
        is_plain = self.packed is None and not has_fbgemm
        self.register_buffer("values", weight.values if is_plain else None, persistent=False)
        if on_cpu and is_plain and avx2_library() is not None:
            parts = FloatParts(weight.values.contiguous(), INT8, self.scales)
            self.float_weight = FloatWeight(parts, outputs, inputs, self.bias)

    @classmethod
    def quantize(
        cls, weight: Tensor, bias: Tensor | None, rows: torch.dtype = torch.float32
    ) -> "Int8Linear":
        return cls(quantize_int8(weight), bias, rows)

    def unpack(self) -> Tensor:
        if self.packed is not None:
            values = self.packed.unpack()
        else:
            values = self.values if self._for_fbgemm is None else _unpack(self._for_fbgemm)
        return Int8Weight(values, self.scales).unpack()

    def multiply(self, rows: Tensor) -> Tensor:
        if self._for_fbgemm is not None:
            return _multiply_digits(rows, self._for_fbgemm)
        return _multiply_tiles(rows, Int8Weight(self.values, self.scales))


def _to_panels(weight: Int8Weight) -> NarrowPanels:
    outputs, inputs = weight.values.shape
    padded = nn.functional.pad(weight.values, (0, inputs % 2, 0, -outputs % _PANEL))
    halves = padded.view(-1, 2, _PANEL // 2, padded.shape[1] // 2, 2)
    panels = halves.permute(0, 3, 1, 4, 2).contiguous()
    return NarrowPanels(panels, INT8, inputs, weight.scales.float().contiguous())


def _multiply_digits(rows: Tensor, packed: Any) -> Tensor:
    """Rows times a packed weight, as integers."""
    count = len(rows)
    # NaN and infinity pass through `top` into the result.
    top = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True).clamp_min_(_TINY)
    digits = torch.empty((2 * count, rows.shape[1]))
    high, low = digits[:count], digits[count:]
    torch.mul(rows, _DIGIT / top, out=low)
    torch.round(low, out=high)
    low.sub_(high).mul_(2 * _DIGIT)
    products = _fbgemm(digits, packed)
    return torch.add(products[:count], products[count:], alpha=0.5 / _DIGIT).mul_(top)


def _multiply_tiles(rows: Tensor, weight: Int8Weight) -> Tensor:
    """Rows times a weight that is dequantised tile by tile."""
    outputs, inputs = weight.values.shape
    out = rows.new_empty((len(rows), outputs))
    step = tile_outputs(inputs)
    for start in range(0, outputs, step):
        part = weight.values[start : start + step]
        tile = scratch(part.numel(), part.device).view(part.shape).copy_(part)
        out[:, start : start + step] = rows @ tile.T
    return out.mul_(weight.scales)


def _fbgemm(digits: Tensor, packed: Any) -> Tensor:
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    products: Tensor = multiply(digits, 1.0, _ZERO_POINT, packed)
    return products


def _pack(weight: Int8Weight) -> Any:
    """The weight in FBGEMM's layout, scaled for digits; the original tensor can be freed."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # others take no input of whole numbers
    try:
        with warnings.catch_warnings():
            # A later torch may have no quantised tensors: `_has_fbgemm` is False there.
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*")
            return _prepack(weight)
    finally:
        torch.backends.quantized.engine = before


def _prepack(weight: Int8Weight) -> Any:
    scales = weight.scales.double() / _DIGIT
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    tensor = torch._make_per_channel_quantized_tensor(weight.values, scales, zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)


def _unpack(packed: Any) -> Tensor:
    values: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return values


def _multiplies_integers() -> bool:
    """True if FBGEMM is faster here than the compiled product, or if there is none."""
    return avx2_library() is None or not cpu_flags().isdisjoint({"avx512_vnni", "avx_vnni"})


@cache
def _has_fbgemm() -> bool:
    """True if FBGEMM multiplies and unpacks a weight here as it must."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    weight = Int8Weight(torch.arange(-96, 96, dtype=torch.int8).view(4, 48), torch.ones(4))
    digits = torch.arange(96.0).view(2, 48).remainder(127).sub(_DIGIT)
    try:
        packed = _pack(weight)
        found = _fbgemm(digits, packed)
        same = torch.equal(_unpack(packed), weight.values)
    except (RuntimeError, AttributeError):  # torch was built without, or has another name for it
        return False
    return same and torch.allclose(found, digits @ weight.values.float().T / _DIGIT)
