"""Matrices of one or more adapters, stacked so that a mixed batch needs few products.

Layers that read the same input (q, k and v; gate and up) share one product with their stacked A
matrices. With several adapters the ranks of all are concatenated:

    hidden = x @ down.T     [rows, ranks of all]    down: A of every layer and adapter
    hidden[another's ranks] = 0
    out += hidden @ up.T                            up: B of every adapter

A row also computes other adapters' ranks in vain. That cost is small: the layer's own products are
a hundred times wider. The number of products, which dominates the cost of few rows, does not grow
with the number of adapters.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.models.lora.files import LoraPair, LoraWeights
from headstart.weights.bf16 import PackedWeight, can_pack
from headstart.weights.products import choose_product

__all__ = ["AdapterStack", "StackedLayer"]

# Sibling layers that models call with the same input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


# Up to this many rows the compiled kernel is faster: 4 us instead of torch's 16 us.
_FEW_ROWS = 32


class Product:
    """`x @ matrix.T` for a small matrix `[outputs, inputs]`."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        product = choose_product("bfloat16", matrix.dtype, matrix.device)
        self._packs = product == "bfloat16" and can_pack(matrix)
        self._packed: PackedWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The product: `[rows, inputs]` to `[rows, outputs]`."""
        packed = self._pack(len(x))
        return x @ self.matrix.t() if packed is None else packed.multiply(x)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product to `out` `[rows, outputs]`."""
        packed = self._pack(len(x))
        if packed is None:
            out.addmm_(x, self.matrix.t())
        else:
            out.add_(packed.multiply(x))

    def _pack(self, rows: int) -> PackedWeight | None:
        if self._packs and self._packed is None and rows <= _FEW_ROWS:
            self._packed = PackedWeight(self.matrix)
        return self._packed if rows <= _FEW_ROWS else None


class StackedLayer(NamedTuple):
    """A layer in a stack: its columns of the group's `hidden`, and B `[outputs, columns]`."""

    group: str
    columns: slice
    up: Product


class AdapterStack:
    """The matrices of some adapters, by layer and by group of layers with the same input.

    `down` is `[ranks, inputs]` by group. `owners` are the distinct assignments of a group's ranks
    to adapters (the adapter's number for each rank); `owner_of` gives a group's index in it.
    """

    def __init__(self, adapters: Sequence[Mapping[str, LoraPair]]) -> None:
        self.layers: dict[str, StackedLayer] = {}
        self.down: dict[str, Product] = {}
        self.owners: list[Tensor] = []
        self.owner_of: dict[str, int] = {}
        self.num_ranks = 0
        """Ranks of all groups together, the cost of a row."""
        self._ways: dict[tuple[int, ...], int] = {}
        groups: dict[str, list[str]] = {}
        for layer in dict.fromkeys(layer for pairs in adapters for layer in pairs):
            groups.setdefault(_group_of(layer), []).append(layer)
        for group, layers in groups.items():
            self._add_group(group, layers, adapters)

    def _add_group(
        self, group: str, layers: list[str], adapters: Sequence[Mapping[str, LoraPair]]
    ) -> None:
        downs: list[Tensor] = []
        owners: list[int] = []
        for layer in layers:
            first, ups = len(owners), []
            for number, pairs in enumerate(adapters):
                if layer in pairs:
                    down, up = pairs[layer]
                    downs.append(down)
                    ups.append(up)
                    owners += [number] * len(down)
            columns = slice(first, len(owners))
            self.layers[layer] = StackedLayer(group, columns, Product(_beside(ups, 1)))
        self.down[group] = Product(_beside(downs, 0))
        self.num_ranks += len(owners)
        way = self._ways.setdefault(tuple(owners), len(self._ways))
        if way == len(self.owners):
            self.owners.append(torch.tensor(owners, device=downs[0].device))
        self.owner_of[group] = way

    def pair(self, layer: str) -> LoraPair:
        """A and B of a layer, in a stack of one adapter."""
        stacked = self.layers[layer]
        return LoraPair(self.down[stacked.group].matrix[stacked.columns], stacked.up.matrix)


def _beside(matrices: list[Tensor], axis: int) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, axis)


def _group_of(layer: str) -> str:
    """The name of the group with the layer's input: the name of the group's first layer.

    >>> _group_of("model.layers.3.self_attn.v_proj"), _group_of("model.layers.3.mlp.down_proj")
    ('model.layers.3.self_attn.q_proj', 'model.layers.3.mlp.down_proj')
    """
    parent, _, name = layer.rpartition(".")
    for together in _TOGETHER:
        if name in together:
            return f"{parent}.{together[0]}"
    return layer


class ResidentAdapter:
    """An adapter in memory: its digest and its stack."""

    def __init__(self, weights: LoraWeights) -> None:
        self.digest = weights.digest
        self.stack = AdapterStack([weights.pairs])

    @property
    def pairs(self) -> dict[str, LoraPair]:
        """A and B by layer, views of the stack."""
        return {layer: self.stack.pair(layer) for layer in self.stack.layers}
