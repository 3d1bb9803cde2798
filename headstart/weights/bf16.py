"""Weights in bfloat16, for input rows in bfloat16 or float32.

A `PackedWeight` is for CPUs with compiled bfloat16 products. It is the only copy of its weight:
`unpack` restores the original tensor bit for bit. `native/linear.h` describes the layout.

A `Bf16Weight` is for other CPUs, which compute in float32. It has the checkpoint's numbers in half
the memory of float32. The product of few rows is limited by memory, so the compiled product, which
reads bfloat16, takes half as long as a float32 product. The product of many rows is limited by
arithmetic: the weight becomes float32 tile by tile, and torch multiplies it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.native import library, required
from headstart.native.bindings import BF16
from headstart.weights.format import WeightFormat, check_numbers, multiply_tiles, widen_tiles
from headstart.weights.memory import Arena, has_memory
from headstart.weights.products import CompiledProduct

_PANEL = 32  # outputs
MANY_ROWS = 64
"""From this many rows on, torch's product is used, which is faster than the compiled product."""


def can_pack(weight: Tensor) -> bool:
    """Return True if the kernels support this weight: bfloat16 `[outputs, inputs]` on the CPU."""
    return (
        has_memory(weight)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.numel() > 0
    )


def packed_bytes(outputs: int, inputs: int) -> int:
    """Return the size of a packed weight."""
    return -(-outputs // _PANEL) * _PANEL * (inputs + inputs % 2) * 2


class PackedWeight(WeightFormat):
    """A weight `[outputs, inputs]` in panels, and its bias: bfloat16 `[outputs]`, or None.

    Raises `ModelError` without the kernels.
    """

    name = "PackedLinear"
    table_name = "PackedEmbedding"
    product: CompiledProduct
    panels: Tensor

    def __init__(
        self,
        weight: "Tensor | PackedWeight",
        bias: Tensor | None = None,
        arena: Arena | None = None,
    ) -> None:
        if isinstance(weight, PackedWeight):  # share its memory, with another bias
            shape, self.panels = (weight.outputs, weight.inputs), weight.panels
        else:
            kernels = required(library())
            assert can_pack(weight)
            shape, source = (weight.shape[0], weight.shape[1]), weight.detach().contiguous()
            size = packed_bytes(*shape)
            self.panels = (arena or Arena([size])).take(size)
            kernels.headstart_pack(
                source.data_ptr(), *shape, self.panels.data_ptr(), torch.get_num_threads()
            )
        self.product = CompiledProduct(torch.bfloat16, BF16, shape, self.panels, bias)
        super().__init__(*shape, self.product.bias)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pack again when copied, since panels must be aligned to pages."""
        return PackedWeight, (self.unpack(), self.bias)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.panels]

    def multiply(self, x: Tensor) -> Tensor:
        return self.product.multiply(x)

    def rows(self, numbers: Tensor) -> Tensor:
        numbers = check_numbers(numbers, self.outputs)
        flat = numbers.reshape(-1)
        pairs = self.panels.view(torch.int32).view(-1, self.inputs + 1 >> 1, _PANEL)
        rows = pairs[flat // _PANEL, :, flat % _PANEL].view(torch.bfloat16)
        return rows[:, : self.inputs].reshape(*numbers.shape, self.inputs)


class Bf16Weight(WeightFormat):
    """A bfloat16 weight `[outputs, inputs]` for float32 rows, and its bias: float32, or None."""

    name = "Bf16Linear"
    table_name = "Bf16Embedding"
    min_torch_rows = MANY_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dtype == torch.bfloat16
        outputs, inputs = weight.shape
        super().__init__(outputs, inputs, bias)
        self.weight = weight
        self.product = CompiledProduct(torch.float32, BF16, weight.shape, weight, bias)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, self.weight)

    def unpack(self) -> Tensor:
        return self.weight.float()

    def _multiply(self, rows: Tensor) -> Tensor:
        return multiply_tiles(rows, self.outputs, widen_tiles(self.weight))
