"""Attention's view of one step: the shape of a layer's K/V and the rows of each sequence.

A step's tokens lie in one flat batch of rows, without padding. A `Span` names the rows of one
sequence in it; the sequence's block table locates its K/V of earlier steps:

    flat batch   | a a a a | b | c c |         spans: a: rows 0-3, b: row 4, c: rows 5-6
    a's context  [ 0 1 2 ... 11 | 12 13 14 15 ]    context = 16, its queries are the last 4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["LayerLayout", "Span", "StepPlan"]


@dataclass(frozen=True)
class LayerLayout:
    """The K and V of one token in one layer: `[kv_heads, key_dim]` and `[kv_heads, value_dim]`.

    The two widths differ if a model compresses keys and values differently (DeepSeek-V3).
    """

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements of one token's K and V together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class Span(NamedTuple):
    """The rows of one sequence in the flat batch.

    Its queries are the last `num_rows` of its `context` tokens, and lie at
    `first_row .. first_row + num_rows - 1`; `block_ids` covers all `context` tokens.
    """

    first_row: int
    num_rows: int
    context: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """One step: where each row's K/V go, and what each row attends to.

    `slots` is int64 `[tokens]`, in row order: `block_id * block_size + position % block_size`,
    or the memory's `scratch_slot` for a row whose K/V must not be kept.

    With `contiguous_gather` a row's result depends, bit for bit, only on its tokens and the
    contents of its context, never on the other rows of the batch or on block ids.
    """

    slots: Tensor
    spans: tuple[Span, ...]
    contiguous_gather: bool = False

    @property
    def decoding(self) -> list[Span]:
        """Spans of one row, which may be computed together; empty with `contiguous_gather`."""
        return [] if self.contiguous_gather else [s for s in self.spans if s.num_rows == 1]

    @property
    def several(self) -> list[Span]:
        """The other spans; each is computed alone."""
        return [s for s in self.spans if s.num_rows > 1 or self.contiguous_gather]
