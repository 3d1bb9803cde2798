"""Index tables of one step: which rows of the memory each query reads, worked out once.

All layers with the same sliding window read the same slots, so the tables are made at the first
layer that asks for a window and kept until the step ends. Rows of decoding sequences are put
together by similar length (a gather padded to the longest, at most a quarter of it padding);
every other span is cut into chunks of rows, each of which reads no further than its last row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.attention.layout import Span, StepPlan

__all__ = ["DecodeGroup", "PrefillChunk", "PrefillSpan", "StepTables", "WindowTables"]

# Rows of a prefill that go through one pair of products: enough for full GEMM speed, few enough
# that little of the triangle above the diagonal is computed for nothing.
CHUNK_ROWS = 128
# Tokens that one decode group gathers: its K of one layer then still fits the second cache level.
GROUP_TOKENS = 16_384
# Below this many tokens of difference, padding costs less than one more group.
SMALL_GAP = 64


class HeadIndex:
    """Slots of `[batch, columns]` as row numbers of a memory seen as `[slots * kv_heads, dim]`.

    Read this way, a gather yields `[batch, kv_heads, columns, dim]` at once, in the order that
    the products want; gathering `[batch, columns, kv_heads, dim]` and turning it costs a copy
    more (measured: 1.3 to 3 times the time of a whole decode).
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
    `[batch, columns]`, true where the padding is, or None without any.
    """

    rows: Tensor
    columns: int
    index: HeadIndex
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Rows `first_row .. last_row - 1` of the flat batch, over columns of their span's context.

    `hidden` bool `[rows, width]` says what the rows may not see of the last `width` of their
    columns; all columns before are seen.
    """

    first_row: int
    last_row: int
    first_column: int
    last_column: int
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class PrefillSpan:
    """One sequence with several rows: `columns` tokens are gathered once for all its chunks."""

    columns: int
    index: HeadIndex
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, eq=False)
class WindowTables:
    """Everything that layers with one window size need."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillSpan, ...]


@dataclass
class StepTables:
    """The tables of one step, made per sliding window when first asked for."""

    plan: StepPlan
    block_size: int
    device: torch.device
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
        single: list[Span] = []
        several: list[Span] = []
        for span in self.plan.spans:
            decodes = span.num_rows == 1 and not self.plan.contiguous_gather
            (single if decodes else several).append(span)
        return WindowTables(
            decode=tuple(self._decode(group, window) for group in group_spans(single, window)),
            prefill=tuple(self._prefill(span, window) for span in several),
        )

    def _decode(self, spans: Sequence[Span], window: int | None) -> DecodeGroup:
        lengths = [_visible(span.context, window) for span in spans]
        columns = lengths[0]
        firsts = [span.context - length for span, length in zip(spans, lengths, strict=True)]
        skipped = [first // self.block_size for first in firsts]
        width = max(
            (span.context - 1) // self.block_size + 1 - skip
            for span, skip in zip(spans, skipped, strict=True)
        )
        table = [
            _padded(span.block_ids[skip : skip + width], width)
            for span, skip in zip(spans, skipped, strict=True)
        ]
        offset = torch.arange(columns, device=self.device).unsqueeze(0)
        length = self._tensor(lengths).unsqueeze(1)
        # Padding reads the sequence's own last token again: never another sequence's memory.
        position = torch.minimum(offset, length - 1)
        position += self._tensor([f % self.block_size for f in firsts]).unsqueeze(1)
        return DecodeGroup(
            rows=self._tensor([span.first_row for span in spans]),
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
        return PrefillSpan(span.context - first, index, tuple(chunks))

    def _hidden(self, rows: int, columns: int, window: int | None) -> Tensor | None:
        """What the last `rows` of `columns` tokens may not see; None if they see everything."""
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


def group_spans(spans: Sequence[Span], window: int | None) -> list[list[Span]]:
    """Decoding spans in groups of similar visible length, longest first.

    >>> spans = [Span(row, 1, context, ()) for row, context in enumerate((10, 1000, 900, 60))]
    >>> [[span.context for span in group] for group in group_spans(spans, None)]
    [[1000, 900], [60, 10]]
    >>> [[span.context for span in group] for group in group_spans(spans, 64)]
    [[1000, 900, 60, 10]]
    """
    groups: list[list[Span]] = []
    longest = 0
    for span in sorted(spans, key=lambda span: span.context, reverse=True):
        length = _visible(span.context, window)
        near = length * 4 >= longest * 3 or longest - length <= SMALL_GAP
        if groups and near and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS:
            groups[-1].append(span)
        else:
            groups.append([span])
            longest = length
    # Visible lengths fall with contexts, so within a group they fall too.
    return groups


def _visible(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _padded(block_ids: Sequence[int], width: int) -> list[int]:
    return [*block_ids, *([0] * (width - len(block_ids)))]
