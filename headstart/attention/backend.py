"""The interface between models and attention kernels: a step's plan, layouts, the protocol.

The engine calls `begin_step` once per step with the batch, then `attend` once per layer, then
`end_step`. Work that is the same in all layers belongs in `begin_step`.

A step's tokens are one flat batch of rows, without padding. A `Span` has the rows of one sequence,
and its block table, which locates the K/V of earlier steps:

    flat batch   | a a a a | b | c c |         spans: a: rows 0-3, b: row 4, c: rows 5-6
    a's context  [ 0 1 2 ... 11 | 12 13 14 15 ]    context = 16, its queries are the last 4
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.attention.recurrent import Recurrence


@dataclass(frozen=True)
class LayerLayout:
    """The K and V of one token in one layer: `[kv_heads, key_dim]` and `[kv_heads, value_dim]`.

    The two widths differ if a model compresses keys and values differently (DeepSeek-V3). `window`
    is the layer's sliding window; None if the layer's rows see all tokens before them. `repr` omits
    `window`, because fingerprints contain this `repr`, and stored K/V do not depend on the window.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = field(default=None, repr=False)

    @property
    def elements(self) -> int:
        """The number of elements in one token's K and V."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class StateLayout:
    """The shapes of the states of one sequence in one recurrent layer, in float32."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """The number of elements in all states."""
        return sum(math.prod(shape) for shape in self.shapes)


class Span(NamedTuple):
    """The rows of one sequence in the flat batch.

    Its queries are the last `num_rows` of its `context` tokens, in the rows `first_row` to
    `first_row + num_rows - 1`. `block_ids` covers all `context` tokens.
    """

    first_row: int
    num_rows: int
    context: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """One step: the slot of each row's K/V, and the tokens to which each row attends.

    `slots` is int64 `[tokens]`, in row order: `block_id * block_size + position % block_size`,
    or the memory's `scratch_slot` for a row whose K/V are discarded.

    With `contiguous_gather`, the bits of a row's result depend only on its span and the contents of
    its context, not on other spans of the batch or on block ids.

    If the memory has a pool of window blocks, `window` is the plan of layers with a sliding window:
    the same rows, with slots and block tables of that pool. Blocks that lie before every row's
    window are not read, so their entries in the tables may be any block ids of the pool.

    `recurrence` has the slots of recurrent layers' states; None for a model without such layers.
    """

    slots: Tensor
    spans: tuple[Span, ...]
    contiguous_gather: bool = False
    window: "StepPlan | None" = None
    recurrence: Recurrence | None = None

    @property
    def decoding(self) -> list[Span]:
        """Spans of one row, which may be computed together; empty with `contiguous_gather`."""
        return [] if self.contiguous_gather else [s for s in self.spans if s.num_rows == 1]

    @property
    def separate(self) -> list[Span]:
        """Spans that are not in `decoding`, which are computed one by one."""
        return [s for s in self.spans if s.num_rows > 1 or self.contiguous_gather]


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """A layer's options beyond plain causal attention.

    - `scaling` multiplies the scores q·k.
    - `sliding_window`: a row sees itself and the `sliding_window - 1` tokens before it.
    - `softcap`: scores become `softcap * tanh(scores / softcap)` before masking (Gemma 2).
    - `sinks` `[query_heads]`: an additional score per head in the softmax, without a value
      (GPT-OSS).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Attention over paged K/V for one engine."""

    def begin_step(self, plan: StepPlan) -> None:
        """Store the step's plan; the K/V memory does not change."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write this layer's K/V into the plan's slots, then attend.

        `query` is `[tokens, query_heads, key_dim]`, `key` `[tokens, kv_heads, key_dim]`, `value`
        `[tokens, kv_heads, value_dim]`; any strides. The result is a new contiguous tensor
        `[tokens, query_heads, value_dim]`. All rows are written before any is read, so two
        sequences of one step may share blocks that one of them is filling.

        If K or V of a position are not finite, the results of all rows that see the position are
        not finite. Results of other rows are not affected.
        """

    def compiled(
        self, layer_idx: int, rows: tuple[int, int], options: AttentionOptions, dtype: torch.dtype
    ) -> tuple[int, int] | None:
        """Return addresses with which compiled layers call the kernel; None if not supported.

        `rows` has the number of rows and the number of query heads. The rows are contiguous, in
        `dtype`. The result has the addresses of the layer's `AttentionStep` and `AttentionCall`
        (`native/attention/attention.h`), valid until the step ends. The call's query, key, value
        and out are not set.
        """

    def end_step(self) -> None:
        """Forget the plan; safe to call without one."""

    def nonfinite_rows(self) -> list[int]:
        """Return the rows whose K or V were not finite when written, in any layer, ascending.

        Padding and rows of the scratch slot are included. The result is valid from a layer's
        `attend` until the next `begin_step`; `end_step` does not clear it.
        """
