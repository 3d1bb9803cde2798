"""Rows of K or V in 8 bits: integers from -127 to 127, and one scale per token and KV head.

The scale is the head's largest magnitude over 127, so every element is off by at most half a scale.
It is chosen when the row is written and never changed: a row's bits depend on that row alone.

A head that is not finite has the scale NaN, and so has no finite element when it is read. A head
whose scale would be below the smallest normal float32 becomes zeros: no two kinds of arithmetic
agree on such numbers, and none of the row's elements exceeds 1.5e-36.

Compiled attention writes the same bits (`native/attention/int8_rows.h`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LEVELS", "REVISION", "Int8Rows", "quantize_rows", "scale_rows"]

LEVELS = 127
"""Steps on either side of zero."""
REVISION = 1
"""Counts the ways of rounding; K/V of another one are not read again."""

_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = float.fromhex("0x1.020406p+121")  # 127 times the next number is infinite


class Int8Rows(NamedTuple):
    """`codes` int8 `[tokens, heads, width]`, `scales` float32 `[tokens, heads]`."""

    codes: Tensor
    scales: Tensor


def quantize_rows(rows: Tensor) -> Int8Rows:
    """`rows` `[tokens, heads, width]` of any floating dtype, rounded to the nearest, ties to even.

    >>> quantize_rows(torch.tensor([[[254.0, -101.0, 3.0]]])).codes
    tensor([[[127, -50,   2]]], dtype=torch.int8)
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / LEVELS
    scales += scales - scales  # inf - inf is NaN
    scales.clamp_(max=_LARGEST)
    scales.masked_fill_(scales < _SMALLEST, 0.0)
    codes = torch.where(scales > 0, wide / scales, 0.0).round_().to(torch.int8)
    return Int8Rows(codes, scales.squeeze(-1))


def scale_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that rows stand for: `codes` `[rows, width]` times `scales` `[rows]`."""
    return codes.to(dtype).mul_(scales.to(dtype).unsqueeze(-1))
