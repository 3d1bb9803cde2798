"""GGUF's formats of 4, 5 and 8 bits as weights of ours: the same values, steps rounded to float16.

    Q4_0    32 weights: d, 16 bytes                     weight = d * (value - 8)
    Q4_1    32 weights: d, m, 16 bytes                  weight = d * value + m
    Q4_K    256 weights: d, least, 8 times 2 * 6 bits   weight = d * scale * value - least * min
    Q8_0    32 weights: d, 32 signed bytes              weight = d * value

A byte of the first two holds the values at i and i + 16 of its block. Q5_0, Q5_1 and Q5_K have the
fifth bits besides: 4 bytes with a bit for each weight, or 32 with a bit for each group of a block.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.weights.grouped import GROUP, Form, Grid, GroupedWeight, pack_groups
from headstart.weights.linear import WeightKind

__all__ = ["FORMATS", "read_weight"]

_OUTPUTS = 2048  # whole panels
_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


class _Blocks(NamedTuple):
    """Values `[blocks, groups, 32]` and, for each group, weight = step * value + start.

    128 is taken off a value of 8 bits first.
    """

    values: _Bytes
    step: _Floats
    start: _Floats


def read_weight(data: _Bytes, name: str, library: Any) -> GroupedWeight:
    """A weight of rows of blocks, uint8 `[outputs, bytes]`, in one of `FORMATS`."""
    # In pieces of whole panels: a few copies of each are made on the way.
    pieces = [
        _read(data[at : at + _OUTPUTS], name, library) for at in range(0, len(data), _OUTPUTS)
    ]
    panels, scales = (torch.cat(parts) for parts in zip(*(p[:2] for p in pieces), strict=True))
    return pieces[0]._replace(panels=panels, scales=scales)


def _read(data: _Bytes, name: str, library: Any) -> GroupedWeight:
    size, kind, read = _FORMATS[name]
    outputs = len(data)
    blocks = read(np.ascontiguousarray(data).reshape(-1, size), library)
    values = blocks.values.reshape(outputs, -1)
    step, start = (part.reshape(outputs, -1) for part in (blocks.step, blocks.start))
    assert values.shape[1] == GROUP * step.shape[1]
    grid = Grid(*map(torch.from_numpy, (values, step, start)))
    return pack_groups(grid, Form(_BITS[kind], in_bytes=False))


def _halves(data: _Bytes) -> _Bytes:
    """The lower halves of the bytes, then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _spread(data: _Bytes) -> _Bytes:
    """The bits of each row's bytes, from the lowest on, as fifth bits of values."""
    return np.unpackbits(data, axis=1, bitorder="little") * np.uint8(16)


def _float(data: _Bytes) -> _Floats:
    return data.copy().view(np.float16).astype(np.float32)


def _q4_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(_halves(blocks[:, 2:]), step, -8 * step)


def _q4_1(blocks: _Bytes, _: Any) -> _Blocks:
    return _Blocks(_halves(blocks[:, 4:]), _float(blocks[:, :2]), _float(blocks[:, 2:4]))


def _q5_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(_halves(blocks[:, 6:]) | _spread(blocks[:, 2:6]), step, -16 * step)


def _q5_1(blocks: _Bytes, _: Any) -> _Blocks:
    values = _halves(blocks[:, 8:]) | _spread(blocks[:, 4:8])
    return _Blocks(values, _float(blocks[:, :2]), _float(blocks[:, 2:4]))


def _q8_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(blocks[:, 2:] ^ np.uint8(128), step, 0 * step)


def _q5_k(blocks: _Bytes, library: Any) -> _Blocks:
    fours = _q4_k(np.concatenate((blocks[:, :16], blocks[:, 48:]), axis=1), library)
    groups = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifths = (blocks[:, 16:48].reshape(-1, 1, GROUP) >> groups & np.uint8(1)) * np.uint8(16)
    return fours._replace(values=fours.values.reshape(-1, 8, GROUP) | fifths)


def _q4_k(blocks: _Bytes, library: Any) -> _Blocks:
    scale, least = library.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    step = _float(blocks[:, :2]) * scale.astype(np.float32)
    start = -_float(blocks[:, 2:4]) * least.astype(np.float32)
    pairs = blocks[:, 16:].reshape(len(blocks), 4, 1, GROUP)
    return _Blocks(np.concatenate((pairs & 15, pairs >> 4), axis=2), step, start)


_FORMATS: dict[str, tuple[int, WeightKind, Callable[[_Bytes, Any], _Blocks]]] = {
    "Q4_0": (18, "int4", _q4_0),
    "Q4_1": (20, "int4", _q4_1),
    "Q4_K": (144, "int4", _q4_k),
    "Q5_0": (22, "int5", _q5_0),
    "Q5_1": (24, "int5", _q5_1),
    "Q5_K": (176, "int5", _q5_k),
    "Q8_0": (34, "int8", _q8_0),
}
_BITS: dict[WeightKind, Literal[4, 5, 8]] = {"int4": 4, "int5": 5, "int8": 8}
FORMATS: dict[str, WeightKind] = {name: kind for name, (_, kind, _) in _FORMATS.items()}
"""The formats whose bits are kept, and the kinds of our own that they become."""
