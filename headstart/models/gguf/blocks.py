"""GGUF's 4-bit formats as weights of ours: the same values, scales rounded to bfloat16.

    Q4_0    32 weights: d, 16 bytes                     weight = d * (value - 8)
    Q4_1    32 weights: d, m, 16 bytes                  weight = d * value + m
    Q4_K    256 weights: d, least, 8 times 2 * 6 bits   weight = d * scale * value - least * min

A byte of the first two holds the values at i and i + 16 of its block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.models.linear.int4 import GROUP, Int4Weight, pack_int4

__all__ = ["FORMATS", "read_int4"]

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


class _Blocks(NamedTuple):
    """Values `[blocks, groups, 32]` and, for each group, weight = step * value + start."""

    values: _Bytes
    step: _Floats
    start: _Floats


def read_int4(data: _Bytes, kind: str, library: Any) -> Int4Weight:
    """A weight of rows of blocks, uint8 `[outputs, bytes]`, in one of `FORMATS`."""
    size, read = _FORMATS[kind]
    outputs = len(data)
    blocks = read(np.ascontiguousarray(data).reshape(-1, size), library)
    values = blocks.values.reshape(outputs, -1)
    step, start = (part.reshape(outputs, -1) for part in (blocks.step, blocks.start))
    scales, zeros = torch.from_numpy(step), torch.from_numpy(start + 8 * step)
    assert values.shape[1] == GROUP * step.shape[1]
    return pack_int4(torch.from_numpy(values), scales, zeros, values.shape[1])


def _halves(data: _Bytes) -> _Bytes:
    """The lower halves of the bytes, then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _float(data: _Bytes) -> _Floats:
    return data.copy().view(np.float16).astype(np.float32)


def _q4_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(_halves(blocks[:, 2:]), step, -8 * step)


def _q4_1(blocks: _Bytes, _: Any) -> _Blocks:
    return _Blocks(_halves(blocks[:, 4:]), _float(blocks[:, :2]), _float(blocks[:, 2:4]))


def _q4_k(blocks: _Bytes, library: Any) -> _Blocks:
    scale, least = library.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    step = _float(blocks[:, :2]) * scale.astype(np.float32)
    start = -_float(blocks[:, 2:4]) * least.astype(np.float32)
    pairs = blocks[:, 16:].reshape(len(blocks), 4, 1, GROUP)
    return _Blocks(np.concatenate((pairs & 15, pairs >> 4), axis=2), step, start)


_FORMATS: dict[str, tuple[int, Callable[[_Bytes, Any], _Blocks]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
}
FORMATS = frozenset(_FORMATS)
"""The formats whose bits are kept."""
