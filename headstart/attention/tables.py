"""Index tables of one step: the memory rows that each query reads, computed once.

All layers with the same sliding window read the same slots, so the tables are made at the first
layer that asks for a window and kept until the step ends. A prefix that decoding sequences share
(`shared.py`) is read once. The rest of their contexts are grouped by similar length: one gather,
padded to the longest, at most a quarter of it padding. Every other span is cut into chunks of
rows; a chunk reads no further than its last row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.attention.backend import Span, StepPlan
from headstart.attention.shared import SharedPlan

__all__ = [
    "DecodeGroup",
    "PrefillChunk",
    "PrefillSpan",
    "SharedGroup",
    "StepTables",
    "WindowTables",
]

# Rows of a prefill in one pair of products: enough for full GEMM speed, few enough that little is
# computed above the causal diagonal.
CHUNK_ROWS = 128
# Tokens that one decode group gathers: its K of one layer then still fits the L2 cache.
GROUP_TOKENS = 16_384
# Below this many tokens of difference, padding costs less than one more group.
SMALL_GAP = 64


class HeadIndex:
    """Slots of `[batch, columns]` as row numbers of a memory seen as `[slots * kv_heads, dim]`.

    A gather then yields `[batch, kv_heads, columns, dim]` directly, the order that the products
    need. Gathering `[batch, columns, kv_heads, dim]` and transposing it costs one more copy
    (measured: 1.3 to 3 times the time of a whole decode).
    """

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._by_heads: dict[int, Tensor] = {}

    def rows(self, kv_heads: int) -> Tensor:
        """Row numbers int64 `[batch * kv_heads * columns]`."""
        found = self._by_heads.get(kv_heads)
        if found is None:
            heads = torch.arange(kv_heads, device=self._slots.device).view(1, kv_heads, 1)
            found = (self._slots.unsqueeze(1) * kv_heads + heads).flatten()
            self._by_heads[kv_heads] = found
        return found


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences with one row each that are read together.

    `rows` int64 `[batch]` in the flat batch; `columns` the padded context; `hidden` bool
    `[batch, columns]`, true for padding, or None without padding.
    """

    rows: Tensor
    columns: int
    index: HeadIndex
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class SharedGroup:
    """A shared-prefix group: rows of the flat batch that all see the same `columns` tokens.

    `rows` is int64 `[members]`.
    """

    rows: Tensor
    columns: int
    index: HeadIndex


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Rows `first_row .. last_row - 1` of the flat batch, over columns of their span's context.

    `hidden` bool `[rows, width]` masks the last `width` columns; rows see all columns before.
    """

    first_row: int
    last_row: int
    first_column: int
    last_column: int
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class PrefillSpan:
    """One sequence with several rows: `columns` tokens are gathered once for all its chunks.

    All rows see the first `seen_columns` of them.
    """

    columns: int
    seen_columns: int
    index: HeadIndex
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, eq=False)
class WindowTables:
    """All tables for layers with one window size.

    If there are `shared` groups, the decode groups hold only the rest of each sequence.
    """

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillSpan, ...]
    shared: tuple[SharedGroup, ...] = ()


class Rest(NamedTuple):
    """A decoding span that attends to its tokens from `first` on."""

    span: Span
    first: int

    @property
    def length(self) -> int:
        return self.span.context - self.first


@dataclass
class StepTables:
    """The tables of one step, made per sliding window when first asked for.

    `shared` numbers the spans of `plan.decoding`; layers whose window hides any token ignore it.
    """

    plan: StepPlan
    block_size: int
    device: torch.device
    shared: SharedPlan | None = None
    _by_window: dict[int | None, WindowTables] = field(default_factory=dict)

    def for_window(self, window: int | None) -> WindowTables:
        """Tables for layers whose rows see `window` tokens at most (None: all)."""
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = self._make(window)
        return found

    def _make(self, window: int | None) -> WindowTables:
        longest = max((span.context for span in self.plan.spans), default=0)
        if window is not None and window >= longest:
            return self.for_window(None)
        shared = self.shared if window is None else None
        decoding = self.plan.decoding
        firsts = shared.own_first if shared is not None else (0,) * len(decoding)
        rests = [
            Rest(span, max(first, 0 if window is None else span.context - window))
            for span, first in zip(decoding, firsts, strict=True)
        ]
        return WindowTables(
            decode=tuple(self._decode(group) for group in group_rests(rests)),
            prefill=tuple(self._prefill(span, window) for span in self.plan.several),
            shared=self._shared(shared, decoding) if shared is not None else (),
        )

    def _shared(self, plan: SharedPlan, decoding: Sequence[Span]) -> tuple[SharedGroup, ...]:
        groups = []
        for group in plan.groups:
            table = decoding[group.members[0]].block_ids[: group.last // self.block_size]
            position = torch.arange(group.first, group.last, device=self.device).unsqueeze(0)
            groups.append(
                SharedGroup(
                    rows=self._tensor([decoding[member].first_row for member in group.members]),
                    columns=group.last - group.first,
                    index=HeadIndex(self._slots(self._tensor(table).unsqueeze(0), position)),
                )
            )
        return tuple(groups)

    def _decode(self, rests: Sequence[Rest]) -> DecodeGroup:
        lengths = [rest.length for rest in rests]
        columns = lengths[0]
        skipped = [rest.first // self.block_size for rest in rests]
        width = max(
            (rest.span.context - 1) // self.block_size + 1 - skip
            for rest, skip in zip(rests, skipped, strict=True)
        )
        table = [
            _padded(rest.span.block_ids[skip : skip + width], width)
            for rest, skip in zip(rests, skipped, strict=True)
        ]
        offset = torch.arange(columns, device=self.device).unsqueeze(0)
        length = self._tensor(lengths).unsqueeze(1)
        # Padding reads the sequence's own last token again: never another sequence's memory.
        position = torch.minimum(offset, length - 1)
        position += self._tensor([rest.first % self.block_size for rest in rests]).unsqueeze(1)
        return DecodeGroup(
            rows=self._tensor([rest.span.first_row for rest in rests]),
            columns=columns,
            index=HeadIndex(self._slots(self._tensor(table), position)),
            hidden=offset >= length if lengths[-1] < columns else None,
        )

    def _prefill(self, span: Span, window: int | None) -> PrefillSpan:
        start = span.context - span.num_rows
        first = max(0, start + 1 - window) if window is not None else 0
        chunks = []
        for row in range(0, span.num_rows, CHUNK_ROWS):
            end = min(row + CHUNK_ROWS, span.num_rows)
            low = max(first, start + row + 1 - window) if window is not None else 0
            chunks.append(
                PrefillChunk(
                    first_row=span.first_row + row,
                    last_row=span.first_row + end,
                    first_column=low - first,
                    last_column=start + end - first,
                    hidden=self._hidden(end - row, start + end - low, window),
                )
            )
        table = self._tensor(span.block_ids[: (span.context - 1) // self.block_size + 1])
        position = torch.arange(first, span.context, device=self.device)
        index = HeadIndex(self._slots(table.unsqueeze(0), position.unsqueeze(0)))
        columns = span.context - first
        masked = [c.last_column - c.hidden.shape[1] for c in chunks if c.hidden is not None]
        return PrefillSpan(columns, min(masked, default=columns), index, tuple(chunks))

    def _hidden(self, rows: int, columns: int, window: int | None) -> Tensor | None:
        """The mask of the last `rows` of `columns` tokens; None if they see everything."""
        cut_left = window is not None and columns > window
        if rows == 1 and not cut_left:
            return None
        width = columns if cut_left else rows
        own = torch.arange(width - rows, width, device=self.device).unsqueeze(1)
        other = torch.arange(width, device=self.device).unsqueeze(0)
        hidden = other > own
        if window is not None and cut_left:
            hidden |= other <= own - window
        return hidden

    def _slots(self, table: Tensor, position: Tensor) -> Tensor:
        block = torch.div(position, self.block_size, rounding_mode="floor")
        return table.gather(1, block) * self.block_size + position % self.block_size

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def group_rests(rests: Sequence[Rest]) -> list[list[Rest]]:
    """`rests` grouped by similar length, longest first.

    >>> rests = [Rest(Span(0, 1, context, ()), 0) for context in (10, 1000, 900, 60)]
    >>> [[rest.length for rest in group] for group in group_rests(rests)]
    [[1000, 900], [60, 10]]
    """
    groups: list[list[Rest]] = []
    longest = 0
    for rest in sorted(rests, key=lambda rest: rest.length, reverse=True):
        near = rest.length * 4 >= longest * 3 or longest - rest.length <= SMALL_GAP
        if groups and near and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS:
            groups[-1].append(rest)
        else:
            groups.append([rest])
            longest = rest.length
    return groups


def _padded(block_ids: Sequence[int], width: int) -> list[int]:
    return [*block_ids, *([0] * (width - len(block_ids)))]
