"""Weights in bfloat16 under arithmetic in float32, for CPUs without products of bfloat16.

The numbers are the checkpoint's own, so nothing is lost, and they take half the memory of float32.
Few rows take the compiled product, which reads 2 bytes for each number: one row waits for memory,
and takes half as long as with float32. Many rows wait for arithmetic: a tile of the weight at a
time is made float32, and multiplied by torch.
"""

from collections.abc import Set

import torch
from torch import Tensor, nn

from headstart.native.bindings import BF16
from headstart.weights.base import scratch, tile_outputs
from headstart.weights.float_weight import FloatParts, FloatWeight
from headstart.weights.products import choose_product

__all__ = ["MANY_ROWS", "HalfEmbedding", "HalfLinear", "Bf16Weight", "can_halve"]

MANY_ROWS = 64
"""From this many rows on torch's product is faster; fewer read the weight once, compiled."""


def can_halve(held: Set[torch.dtype], wanted: torch.dtype, device: torch.device) -> bool:
    """True for weights of dtypes `held` under arithmetic in `wanted`, if the kernels run here."""
    return held == {torch.bfloat16} and choose_product("bfloat16", wanted, device) == "float32"


class Bf16Weight:
    """A weight bfloat16 `[outputs, inputs]`, and its bias float32 `[outputs]` or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dtype == torch.bfloat16
        self.weight, self.bias = weight, bias
        self.outputs, self.inputs = weight.shape
        self.few = FloatWeight(FloatParts(weight, BF16), self.outputs, self.inputs, bias)
        """The same for fewer than `MANY_ROWS`."""

    def multiply(self, x: Tensor) -> Tensor:
        """float32 `[..., inputs]` times the weight, plus the bias: float32 `[..., outputs]`."""
        if (x.dtype, x.shape[-1]) != (torch.float32, self.inputs):
            raise ValueError(
                f"a weight of {self.inputs} inputs under float32 was given {x.shape[-1]} in "
                f"{x.dtype}"
            )
        rows = x.reshape(-1, self.inputs)
        if 0 < len(rows) < MANY_ROWS:
            out = self.few.multiply(rows)
        else:
            out = x.new_empty((len(rows), self.outputs))
            self._multiply_tiles(rows, out)
        return out.view(*x.shape[:-1], self.outputs)

    def _multiply_tiles(self, rows: Tensor, out: Tensor) -> None:
        outputs = tile_outputs(self.inputs)
        for start in range(0, self.outputs, outputs):
            part = self.weight[start : start + outputs]
            tile = scratch(part.numel(), part.device).view(part.shape).copy_(part)
            torch.mm(rows, tile.T, out=out[:, start : start + outputs])
        if self.bias is not None:
            out += self.bias


class HalfLinear(nn.Module):
    """A linear layer over a `Bf16Weight`; it has no parameter `weight`."""

    def __init__(self, matrix: Bf16Weight) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.inputs, matrix.outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x)


class HalfEmbedding(nn.Module):
    """Rows of a `Bf16Weight` by token id, in float32."""

    def __init__(self, matrix: Bf16Weight) -> None:
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.outputs, matrix.inputs

    def forward(self, numbers: Tensor) -> Tensor:
        return nn.functional.embedding(numbers, self.matrix.weight).float()
