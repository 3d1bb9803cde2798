"""LoRA adapters on a running model. Each row of a batch has its own adapter, or none.

The model's modules and weights do not change. In steps with adapters, forward hooks add the update
to a layer's output. A step without adapters removes the hooks, so it runs the same code as a model
without adapters.

A long run of rows with one adapter is multiplied by only that adapter's matrices. All short runs,
mostly decodes, are multiplied together by a stack of their adapters' matrices. Layers with the same
input (q, k and v; gate and up) share one product with their stacked A matrices. Below, a rank is a
row of A with the matching column of B. The ranks of all adapters are concatenated:

    hidden = x @ down.T     [rows, ranks of all]    down: stacked A of all adapters
    hidden[ranks of other adapters] = 0
    out += hidden @ up.T                            up: stacked B of all adapters

A row of the batch is also multiplied by the ranks of other adapters, without effect. This costs
little, since a layer has a hundred times more outputs than ranks. For few rows the cost depends
mostly on the number of products, which does not grow with the number of adapters.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headstart.errors import UnsupportedAdapterError
from headstart.models.decoder import DecoderModel
from headstart.models.lora_files import LoraPair, LoraWeights
from headstart.weights.bf16 import PackedWeight, can_pack
from headstart.weights.products import choose_product

# Names of layers, and of the earlier layer with the same input.
_FIRST = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}

# Up to this many rows the compiled kernel is faster than torch's product.
_FEW_ROWS = 32


class Product:
    """`x @ matrix.T` for a small matrix `[outputs, inputs]`."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        product = choose_product("bfloat16", matrix.dtype, matrix.device)
        self._packs = product == "bfloat16" and can_pack(matrix)
        self._packed: PackedWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product: `[rows, inputs]` to `[rows, outputs]`."""
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
    """A layer in an `AdapterStack`.

    group: the layers with the same input. columns: the layer's columns in the product of this input
    and the group's A. up: the layer's B of all adapters.
    """

    group: str
    columns: slice
    up: Product


class AdapterStack:
    """The matrices of some adapters, by layer and by group of layers with the same input.

    down: A `[ranks, inputs]` by group. owners: tensors `[ranks]` that assign an adapter's number to
    each rank. Groups with the same assignment share a tensor. owner_of: index in `owners` by group.
    """

    def __init__(self, adapters: Sequence[Mapping[str, LoraPair]]) -> None:
        self.layers: dict[str, StackedLayer] = {}
        self.down: dict[str, Product] = {}
        self.owners: list[Tensor] = []
        self.owner_of: dict[str, int] = {}
        self.num_ranks = 0
        """The sum of the ranks of all groups, which determines the cost of a row."""
        indices: dict[tuple[int, ...], int] = {}
        groups: dict[str, list[str]] = {}
        for layer in dict.fromkeys(layer for pairs in adapters for layer in pairs):
            parent, _, name = layer.rpartition(".")
            groups.setdefault(f"{parent}.{_FIRST.get(name, name)}", []).append(layer)
        for group, layers in groups.items():
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
                self.layers[layer] = StackedLayer(group, columns, Product(_concatenate(ups, 1)))
            self.down[group] = Product(_concatenate(downs, 0))
            self.num_ranks += len(owners)
            index = self.owner_of[group] = indices.setdefault(tuple(owners), len(indices))
            if index == len(self.owners):
                self.owners.append(torch.tensor(owners, device=downs[0].device))


def _concatenate(matrices: list[Tensor], axis: int) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, axis)


class ResidentAdapter:
    """An adapter in memory: its digest and its stack."""

    def __init__(self, weights: LoraWeights) -> None:
        self.digest = weights.digest
        self.stack = AdapterStack([weights.pairs])

    @property
    def pairs(self) -> dict[str, LoraPair]:
        """A and B by layer, views of the stack."""
        down = self.stack.down
        return {
            name: LoraPair(down[layer.group].matrix[layer.columns], layer.up.matrix)
            for name, layer in self.stack.layers.items()
        }


# A run of this many rows gets separate products, which cost less than multiplying by the ranks of
# other adapters.
_LONG_RUN = 32


class AdapterRun(NamedTuple):
    """Consecutive rows of the batch with one adapter or without an adapter.

    logits: the number of these rows that need logits.
    """

    adapter: ResidentAdapter | None
    rows: int
    logits: int


class _Piece:
    """Rows that are multiplied by one stack.

    rows: a range of the batch, or row numbers. masks: `[rows, ranks]` for each entry of the stack's
    `owners`, True for the ranks of adapters other than the row's. The product with A is set to zero
    there. `masks` is None if all rows and ranks belong to one adapter.
    """

    def __init__(
        self, stack: AdapterStack, rows: slice | Tensor, masks: list[Tensor] | None = None
    ) -> None:
        self._stack, self._rows, self._masks = stack, rows, masks
        self._input: Tensor | None = None
        self._group = ""
        self._hidden = torch.empty(0)

    def add_to(self, out: Tensor, layer: str, x: Tensor) -> None:
        """Add the adapters' update of a layer for `x` `[1, rows, inputs]` to `out`."""
        entry = self._stack.layers.get(layer)
        if entry is None:
            return
        if self._input is not x or self._group != entry.group:
            self._hidden = self._stack.down[entry.group](x.flatten(0, -2)[self._rows])
            if self._masks is not None:
                mask = self._masks[self._stack.owner_of[entry.group]]
                self._hidden.masked_fill_(mask, 0.0)
            self._input, self._group = x, entry.group
        hidden = self._hidden[:, entry.columns]
        flat = out.view(-1, out.shape[-1])  # a view, so that the sum changes `out`
        if isinstance(self._rows, slice):
            entry.up.add_to(flat[self._rows], hidden)
        else:
            flat.index_add_(0, self._rows, entry.up(hidden))


class _Rows:
    """The runs of the batch, either of all rows or of the rows that need logits."""

    def __init__(self, runs: Iterable[tuple[ResidentAdapter | None, int]]) -> None:
        self.count = 0
        self.long: list[tuple[ResidentAdapter, slice]] = []
        self.short: list[tuple[ResidentAdapter, slice]] = []
        for adapter, group in groupby((run for run in runs if run[1]), key=itemgetter(0)):
            rows = sum(count for _, count in group)
            if adapter is not None:
                span = slice(self.count, self.count + rows)
                (self.long if rows >= _LONG_RUN else self.short).append((adapter, span))
            self.count += rows


class LoraLayers:
    """Hooks that add adapters to the linear layers of a model, set for each step."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._hooks: dict[str, RemovableHandle] = {}
        self._mixed: tuple[ResidentAdapter, ...] = ()  # the adapters in `_mixed_stack`
        self._mixed_stack: AdapterStack | None = None
        self._body: list[_Piece] = []
        self._head: list[_Piece] = []
        self._counts = (0, 0)

    def begin_step(self, runs: Sequence[AdapterRun]) -> None:
        """Set the adapters of the step's rows, in order, until `end_step`."""
        adapters = {run.adapter for run in runs if run.adapter is not None}
        self._model.calls_each_layer = bool(adapters)  # compiled layers do not call hooks
        if not adapters:
            self._unhook()
            return
        body = _Rows((run.adapter, run.rows) for run in runs)
        head = _Rows((run.adapter, run.logits) for run in runs)
        self._counts = (body.count, head.count)
        short = {adapter for adapter, _ in (*body.short, *head.short)}
        if len(short) > 1:
            self._mix(short)
        self._body, self._head = self._pieces(body), self._pieces(head)
        for layer in {layer for adapter in adapters for layer in adapter.stack.layers}:
            if layer not in self._hooks:
                module, add = self._model.layer(layer), partial(self._add, layer)
                self._hooks[layer] = module.register_forward_hook(add)

    def end_step(self) -> None:
        """Release the tensors of the step."""
        self._body, self._head = [], []

    def reset(self) -> None:
        """Remove all hooks; may be called after a failed step."""
        self.end_step()
        self._unhook()
        self._mixed, self._mixed_stack = (), None
        self._model.calls_each_layer = False

    def forget(self, adapter: ResidentAdapter) -> None:
        """Release the stack of mixed adapters if it contains `adapter`. Call between steps."""
        if adapter in self._mixed:
            self._mixed, self._mixed_stack = (), None

    def _mix(self, adapters: set[ResidentAdapter]) -> None:
        """Stack these adapters. Reuse the last stack if it has all of them and is not too wide."""
        num_ranks = sum(adapter.stack.num_ranks for adapter in adapters)
        last = self._mixed_stack
        if last is not None and adapters <= set(self._mixed) and last.num_ranks <= 2 * num_ranks:
            return
        self._mixed = tuple(sorted(adapters, key=lambda adapter: adapter.digest))
        self._mixed_stack = AdapterStack([adapter.pairs for adapter in self._mixed])

    def _pieces(self, rows: _Rows) -> list[_Piece]:
        short = [self._short_piece(rows.short)] if rows.short else []
        return [*(_Piece(adapter.stack, span) for adapter, span in rows.long), *short]

    def _short_piece(self, runs: list[tuple[ResidentAdapter, slice]]) -> _Piece:
        """Return one piece for all short runs.

        Its rows are the range from the first run to the last. If less than half of this range
        belongs to the runs, its rows are the row numbers of the runs.
        """
        adapters = {adapter for adapter, _ in runs}
        count = sum(span.stop - span.start for _, span in runs)
        first, last = runs[0][1].start, runs[-1][1].stop
        is_mixed = len(adapters) > 1
        mixed = self._mixed if is_mixed else tuple(adapters)
        owners = [-1] * (last - first)
        for adapter, span in runs:
            number, length = mixed.index(adapter), span.stop - span.start
            owners[span.start - first : span.stop - first] = [number] * length
        rows: slice | Tensor = slice(first, last)
        if last - first > 2 * count:
            numbers = [number for number, owner in enumerate(owners, first) if owner >= 0]
            owners = [owner for owner in owners if owner >= 0]
            rows = torch.tensor(numbers, device=self._model.device)
        stack = self._mixed_stack if is_mixed else runs[0][0].stack
        assert stack is not None
        if set(owners) == {0} and not is_mixed:
            return _Piece(stack, rows)
        row_owners = torch.tensor(owners, device=self._model.device).unsqueeze(1)
        return _Piece(stack, rows, [ranks != row_owners for ranks in stack.owners])

    def _unhook(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _add(self, layer: str, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        """Add the adapters' updates to a layer's output; called as a forward hook."""
        is_head = layer == self._model.output_layer
        x = inputs[0]
        if x.numel() != self._counts[is_head] * x.shape[-1]:
            raise UnsupportedAdapterError(f"{layer} does not receive all rows of the batch")
        for piece in self._head if is_head else self._body:
            piece.add_to(out, layer, x)
