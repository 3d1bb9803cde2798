"""Weights that compiled code multiplies rows in float32 by, on CPUs with AVX2."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.native import avx2_library, required
from headstart.native.bindings import Weight

__all__ = ["FloatParts", "FloatWeight"]


class FloatParts(NamedTuple):
    """A weight in memory, on the CPU.

    `values` lie as `native/weight.h` says for rows of float32. `scales` float32 `[outputs]`, but
    not of bfloat16; `columns` float32 `[inputs]` or None: only of weights in groups.
    """

    values: Tensor
    kind: int
    scales: Tensor | None = None
    columns: Tensor | None = None


class FloatWeight:
    """A weight `[outputs, inputs]`, and its bias float32 `[outputs]` or None.

    A copy, or what is unpickled, has memory of its own. Raises `ModelError` without the kernels.
    """

    def __init__(
        self, parts: FloatParts, outputs: int, inputs: int, bias: Tensor | None = None
    ) -> None:
        found = required(avx2_library())
        self._multiply: ctypes._NamedFuncPointer = found.headstart_float_linear
        self._outputs = outputs
        self._made_of = (parts, outputs, inputs, bias)
        addresses = [_address(part) for part in (parts.values, bias, parts.scales, parts.columns)]
        self.struct = Weight(*addresses, inputs=inputs, outputs=outputs, kind=parts.kind)
        """The kernels' struct; it points into memory that this object owns."""
        self._address = ctypes.addressof(self.struct)

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy.deepcopy` and `pickle`: the struct's addresses are those of these tensors."""
        return FloatWeight, self._made_of

    def multiply(self, rows: Tensor) -> Tensor:
        """Rows float32 `[rows, inputs]` times the weight, plus the bias: `[rows, outputs]`."""
        rows, out = rows.contiguous(), rows.new_empty((len(rows), self._outputs))
        self._multiply(
            self._address, rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads()
        )
        return out


def _address(part: Tensor | None) -> int | None:
    assert part is None or part.is_contiguous()
    return None if part is None else part.data_ptr()
