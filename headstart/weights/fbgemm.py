"""Products of 8 bits by FBGEMM, which torch brings for x86.

It takes 7 bits of an input: with 8, a CPU without VNNI saturates the sum of two products. So a row
is split into two digits of 7 bits, two rows of one product:

    x  ~  top / 63 * (high + low / 126)              high, low: whole numbers, -63 .. 63

which has 14 bits, at the price of a second row that costs nothing while the product waits for
memory. A row has the same bits in any batch.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["has_fbgemm", "multiply_digits", "pack", "unpack"]

_DIGIT = 63  # the largest digit
_ZERO_POINT = 64
_TINY = 1e-30  # an all-zero row has no scale


def pack(values: Tensor, scales: Tensor) -> Any:
    """A weight int8 `[outputs, inputs]`, float32 `[outputs]` in FBGEMM's layout, scaled for digits.

    The original tensors can be freed.
    """
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # others take no input of whole numbers
    try:
        with warnings.catch_warnings():
            # A later torch may have no quantised tensors: `has_fbgemm` is False there.
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*")
            return _prepack(values, scales)
    finally:
        torch.backends.quantized.engine = before


def _prepack(values: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    tensor = torch._make_per_channel_quantized_tensor(values, scales.double() / _DIGIT, zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)


def unpack(packed: Any) -> Tensor:
    """The values, int8 `[outputs, inputs]`."""
    values: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return values


def multiply_digits(rows: Tensor, packed: Any) -> Tensor:
    """Rows float32 `[rows, inputs]` times a packed weight, as integers."""
    count = len(rows)
    # NaN and infinity pass through `top` into the result.
    top = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True).clamp_min_(_TINY)
    digits = torch.empty((2 * count, rows.shape[1]))
    high, low = digits[:count], digits[count:]
    torch.mul(rows, _DIGIT / top, out=low)
    torch.round(low, out=high)
    low.sub_(high).mul_(2 * _DIGIT)
    products = _multiply(digits, packed)
    return torch.add(products[:count], products[count:], alpha=0.5 / _DIGIT).mul_(top)


def _multiply(digits: Tensor, packed: Any) -> Tensor:
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    products: Tensor = multiply(digits, 1.0, _ZERO_POINT, packed)
    return products


@cache
def has_fbgemm() -> bool:
    """True if FBGEMM multiplies and unpacks a weight here as it must."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    values = torch.arange(-96, 96, dtype=torch.int8).view(4, 48)
    digits = torch.arange(96.0).view(2, 48).remainder(127).sub(_DIGIT)
    try:
        packed = pack(values, torch.ones(4))
        found = _multiply(digits, packed)
        same = torch.equal(unpack(packed), values)
    except (RuntimeError, AttributeError):  # torch was built without, or has another name for it
        return False
    return same and torch.allclose(found, digits @ values.float().T / _DIGIT)
