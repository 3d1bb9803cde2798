"""Formats in which a matrix is stored, and modules that multiply by it or read its rows.

A `WeightFormat` is a matrix in one layout, with the bias of its layer. `Linear` and `Embedding`
work with any format, and may share a matrix. A new format is a subclass, with an entry in
`headstart.weights.quantize.FORMATS` if weights are rounded to it.

Input rows are the rows that a matrix multiplies, such as hidden states. The rows of the matrix
itself are read by number, for an embedding.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from headstart.errors import ConfigError
from headstart.native.bindings import Weight
from headstart.weights.products import CompiledProduct

WeightKind = Literal["int8", "int5", "int4"]
"""The bit width of quantized weights."""

REVISIONS: dict[WeightKind, int] = {"int8": 6, "int5": 3, "int4": 4}
"""Versions of the rounding of weights and input rows. A change of results needs a new version."""

PREQUANTIZED_REVISION = 4
"""Version of the reader for already quantized weights. Increase it when its results change."""


def find_kind(name: str) -> WeightKind | None:
    """Return the `WeightKind` of this name; None for "auto", which quantizes no float weights.

    Raises `ConfigError` for an unknown name.
    """
    kinds: tuple[WeightKind, ...] = get_args(WeightKind)
    if name != "auto" and name not in kinds:
        raise ConfigError(f"weights is {name!r}; allowed: auto, {', '.join(kinds)}")
    return next((kind for kind in kinds if kind == name), None)


class WeightFormat(ABC):
    """A matrix `[outputs, inputs]` as it is stored, and its bias `[outputs]` or None.

    `kind` is None for floats. `name` and `table_name` identify a `Linear` and an `Embedding` of
    this format in cache identities, and must not change.
    """

    kind: WeightKind | None = None
    name: str
    table_name = "QuantizedEmbedding"
    rounding = 0.0
    """The rounding step of an input row in a product, relative to the row's largest element."""

    is_prequantized = False
    """True if the quantized values come from the checkpoint."""
    product: CompiledProduct | None = None
    """The compiled product; None if torch multiplies."""
    min_torch_rows: float = math.inf
    """From this many rows on, torch multiplies instead of the compiled product."""

    def __init__(self, outputs: int, inputs: int, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs, self.bias = outputs, inputs, bias

    @abstractmethod
    def rows(self, numbers: Tensor) -> Tensor:
        """Return the rows `[..., inputs]` with these numbers, a tensor of any shape.

        Raises `IndexError` for a number out of range.
        """

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors that store the matrix."""

    def unpack(self) -> Tensor:
        """Return the matrix `[outputs, inputs]` as floats."""
        return self.rows(torch.arange(self.outputs))

    def struct(self, dtype: torch.dtype) -> Weight | None:
        """Return the kernels' struct for input rows in `dtype`; None without a kernel."""
        if self.product is None or self.product.dtype != dtype:
            return None
        return self.product.struct

    @property
    def rounds_rows(self) -> bool:
        """True if a compiled product rounds input rows to 8 bits."""
        return self.kind is not None and self.struct(torch.float32) is not None

    @property
    def computes_float32(self) -> bool:
        """True if input rows of any dtype are multiplied in float32."""
        return self.kind is not None and self.struct(torch.bfloat16) is None

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` `[..., inputs]` times the matrix plus the bias, `[..., outputs]` in x's dtype.

        An input row with NaN or infinities has a result that is not finite.
        """
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.outputs))
        if self.product is not None and x.numel() < self.min_torch_rows * self.inputs:
            return self.product.multiply(x.to(self.product.dtype)).to(x.dtype)
        out = self._multiply(x.reshape(-1, self.inputs).float())
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def _multiply(self, rows: Tensor) -> Tensor:
        """Multiply at least one row, float32 `[rows, inputs]`, with torch, without the bias."""
        raise NotImplementedError


class Linear(nn.Module):
    """A linear layer with a stored matrix; it has no parameter `weight`."""

    def __init__(self, matrix: WeightFormat) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.inputs, matrix.outputs
        self.name_in_identity = matrix.name

    @property
    def bias(self) -> Tensor | None:
        """The bias `[outputs]`."""
        return self.matrix.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x)


class Embedding(nn.Module):
    """Rows of a stored matrix by token id, in `dtype`; the LM head may share the matrix."""

    def __init__(self, matrix: WeightFormat, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = matrix
        self._dtype = dtype
        self.num_embeddings, self.embedding_dim = matrix.outputs, matrix.inputs
        self.name_in_identity = matrix.table_name

    def forward(self, numbers: Tensor) -> Tensor:
        return self.matrix.rows(numbers).to(self._dtype)


def check_numbers(numbers: Tensor, rows: int) -> Tensor:
    """Return row numbers on the CPU; raises `IndexError` unless all are below `rows`."""
    numbers = numbers.to("cpu", torch.int64)
    if numbers.numel():
        first, last = int(numbers.min()), int(numbers.max())
        if first < 0 or last >= rows:
            raise IndexError(f"rows {first} to {last} are requested; allowed: 0 to {rows - 1}")
    return numbers


_TILE = 1 << 21  # elements, 8 MiB, which fit in a core's caches
_WHOLE = 32  # outputs; MKL's product is slower if their number is not a multiple of this


def tile_outputs(inputs: int) -> int:
    """Return how many outputs a tile has in a product of many rows."""
    outputs = max(1, _TILE // max(1, inputs))
    return outputs if outputs < _WHOLE else outputs // _WHOLE * _WHOLE


def multiply_tiles(
    rows: Tensor, outputs: int, make_tile: Callable[[int, int], Tensor], multiple: int = 1
) -> Tensor:
    """Return float32 rows times a matrix that is converted to float32 tile by tile.

    make_tile: returns outputs `first` to `last - 1`, `[outputs, inputs]`, valid until it is called
    again. multiple: tiles begin at multiples of this number of outputs.
    """
    out = rows.new_empty((len(rows), outputs))
    step = max(1, tile_outputs(rows.shape[1]) // multiple) * multiple
    for first in range(0, outputs, step):
        last = min(outputs, first + step)
        torch.mm(rows, make_tile(first, last).T, out=out[:, first:last])
    return out


def widen_tiles(values: Tensor) -> Callable[[int, int], Tensor]:
    """Return a `make_tile` for `multiply_tiles` that converts `values` to float32."""

    def make_tile(first: int, last: int) -> Tensor:
        part = values[first:last]
        return scratch(part.numel(), part.device).view(part.shape).copy_(part)

    return make_tile


_local = threading.local()


def scratch(size: int, device: torch.device) -> Tensor:
    """Return this thread's memory for `size` float32 values, valid until the next call.

    New memory would cost page faults, which take as long as dequantizing.
    """
    buffers: dict[torch.device, Tensor] = _local.__dict__.setdefault("buffers", {})
    if device not in buffers or len(buffers[device]) < size:
        with torch.inference_mode(False):  # may be used outside inference mode
            buffers[device] = torch.empty(size, dtype=torch.float32, device=device)
    return buffers[device][:size]
