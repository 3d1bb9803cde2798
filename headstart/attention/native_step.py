"""The arguments of compiled attention: structs of `native/attention/attention.h` for a step's plan.

A step's rows are cut into segments: rows, a block table, a range of keys. A span is one segment.
A shared-prefix group is one segment with all its members' rows; the rest of each member's keys is
another. If a row has several segments, their results are partial and the kernel merges them.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headstart.attention.backend import Span, StepPlan
from headstart.attention.shared import SharedPlan
from headstart.errors import EngineError
from headstart.native.bindings import AttentionStep, Merger, Segment

__all__ = ["BlockTables", "NativeStep"]

IntArray = npt.NDArray[np.int32]

_FIRST_POSITION = Segment._fields.index("first_position")
_LAST_KEY = Segment._fields.index("last_key")
# Reading fewer keys than this is faster than waking another thread and merging its result.
SPLIT_KEYS = 512


class BlockTables:
    """The block tables of a step as int32 `[spans, blocks]`, kept from step to step.

    A running sequence's table mostly stays the same or grows at its end. Comparing it with the
    previous one takes a tenth of the time of converting it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._known: list[list[int]] = []
        self.array: IntArray = np.zeros((16, 64), dtype=np.int32)

    def fill(self, tables: Sequence[Sequence[int]]) -> None:
        """Make row i begin with table i; the rest of the row is undefined.

        Raises `EngineError` for a block id out of range.
        """
        self._make_room(len(tables), max(map(len, tables), default=0))
        for row, block_ids in enumerate(tables):
            if self._known[row] != block_ids:
                ids = np.array(block_ids, dtype=np.int64)
                if not 0 <= ids.min() <= ids.max() < self._num_blocks:
                    raise EngineError(
                        f"a block table holds ids from {ids.min()} to {ids.max()}; "
                        f"allowed: 0 to {self._num_blocks - 1}"
                    )
                self._known[row] = []  # first: Ctrl-C in between leaves a row that nobody trusts
                self.array[row, : len(block_ids)] = ids
                self._known[row] = list(block_ids)

    def _make_room(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self.array.shape
        if rows > old_rows or columns > old_columns:
            shape = (max(old_rows, 2 * rows), max(old_columns, 2 * columns))
            self.array, self._known = np.zeros(shape, dtype=np.int32), []
        self._known += [[] for _ in range(rows - len(self._known))]


class NativeStep:
    """One step's struct and the arrays that it points to.

    `kv_splits` is the number of parts that a decoding span's keys are cut into if there are enough
    of them, so that threads without a KV head of their own get work.
    """

    def __init__(
        self,
        plan: StepPlan,
        tables: BlockTables,
        block_size: int,
        shared: SharedPlan | None = None,
        kv_splits: int = 1,
    ) -> None:
        self._shared = shared
        self._kv_splits = kv_splits
        self._tables = tables.array
        self._num_tokens = len(plan.slots)
        self.num_partials = 0
        self._rows: list[int] = []  # of groups; the rows of spans come before them, in order
        self._parts: dict[int, list[int]] = {}  # partial results by token
        self._owners: list[int] = []  # the span of each segment after those of groups
        self._segments = np.array(self._groups(plan) + self._rests(plan), dtype=np.int32)
        self._contexts = _decoding_contexts(plan)
        self._slots = plan.slots.contiguous()
        rows = np.array([*range(self._num_tokens), *self._rows], dtype=np.int32)
        mergers = _mergers(self._parts)
        parts = np.array([*itertools.chain(*self._parts.values())], dtype=np.int32)
        self._pointed_to = (rows, mergers, parts)
        self.struct = AttentionStep(
            slots=self._slots.data_ptr(),
            tables=self._tables.ctypes.data,
            rows=rows.ctypes.data,
            segments=self._segments.ctypes.data,
            mergers=mergers.ctypes.data,
            parts=parts.ctypes.data,
            num_tokens=self._num_tokens,
            num_segments=len(self._segments),
            num_mergers=len(mergers),
            block_shift=block_size.bit_length() - 1,
            threads=torch.get_num_threads(),
        )

    def take(
        self, plan: StepPlan, tables: BlockTables, shared: SharedPlan | None, kv_splits: int
    ) -> bool:
        """Update this step to `plan` if `plan` only continues its decoding.

        Takes a tenth of the time of a new one. False if the plan differs in more than lengths.
        """
        contexts = _decoding_contexts(plan)
        if (
            contexts is None
            or self._contexts is None
            or len(contexts) != len(self._contexts)
            or (contexts < self._contexts).any()
            or tables.array is not self._tables
            or (shared, kv_splits) != (self._shared, self._kv_splits)
        ):
            return False
        self._contexts = contexts
        rests = self._segments[len(self._segments) - len(self._owners) :]
        rests[:, _FIRST_POSITION] = contexts[self._owners] - 1
        last = np.flatnonzero(np.diff(self._owners, append=-1))
        rests[last, _LAST_KEY] = contexts
        self._slots = plan.slots.contiguous()
        self.struct.slots = self._slots.data_ptr()
        self.struct.threads = torch.get_num_threads()
        return True

    def _add_part(self, token: int) -> int:
        """Add a partial result of a token; returns its number."""
        number = self.num_partials
        self.num_partials += 1
        self._parts.setdefault(token, []).append(number)
        return number

    def _groups(self, plan: StepPlan) -> list[Segment]:
        """The segments of shared-prefix groups; they come first, as they take longest."""
        segments: list[Segment] = []
        if self._shared is None:
            return segments
        indices = [index for index, span in enumerate(plan.spans) if span.num_rows == 1]
        for group in self._shared.groups:
            members = [indices[member] for member in group.members]
            rows = [plan.spans[index].first_row for index in members]
            numbers = [self._add_part(row) for row in rows]
            segments.append(
                Segment(
                    first_row=self._num_tokens + len(self._rows),
                    num_rows=len(rows),
                    first_position=group.last,  # from where every row sees all its keys
                    table=members[0] * self._tables.shape[1],
                    first_key=group.first,
                    last_key=group.last,
                    partial=numbers[0],
                )
            )
            self._rows += rows
        return segments

    def _rests(self, plan: StepPlan) -> list[Segment]:
        """The segments that spans attend to alone."""
        firsts = iter(self._shared.own_first if self._shared is not None else ())
        segments: list[Segment] = []
        for index, span in enumerate(plan.spans):
            first = next(firsts, 0) if span.num_rows == 1 else 0
            borders = self._borders(span, first)
            partial = first > 0 or len(borders) > 2
            for low, high in itertools.pairwise(borders):
                segments.append(
                    Segment(
                        first_row=span.first_row,
                        num_rows=span.num_rows,
                        first_position=span.context - span.num_rows,
                        table=index * self._tables.shape[1],
                        first_key=low,
                        last_key=high,
                        partial=self._add_part(span.first_row) if partial else -1,
                    )
                )
                self._owners.append(index)
        return segments

    def _borders(self, span: Span, first: int) -> list[int]:
        """The positions, from `first` on, at which a span's keys are split."""
        splits = min(self._kv_splits, (span.context - first) // SPLIT_KEYS)
        if span.num_rows > 1 or splits < 2:
            return [first, span.context]
        length = (span.context - first) // splits
        return [first + length * split for split in range(splits)] + [span.context]


def _decoding_contexts(plan: StepPlan) -> IntArray | None:
    """Every span's context; None unless each span is one row and spans are in row order."""
    for index, span in enumerate(plan.spans):
        if span.num_rows != 1 or span.first_row != index:
            return None
    return np.array([span.context for span in plan.spans], dtype=np.int32)


def _mergers(parts: dict[int, list[int]]) -> IntArray:
    """A `Merger` for each token; part numbers count through all tokens."""
    ends = itertools.pairwise(itertools.accumulate(map(len, parts.values()), initial=0))
    return np.array(
        [
            Merger(token=token, first_part=first, last_part=last)
            for token, (first, last) in zip(parts, ends, strict=True)
        ],
        dtype=np.int32,
    )
