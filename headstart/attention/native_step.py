"""What the compiled kernel is told: the structs of `native/attention.h`, filled from a step's plan.

A step's rows are cut into segments: rows, block table, the keys from one position to another. A
span is one segment; where decoding spans share runs of tokens each run is a segment of all its
members' rows, and what is left of a member is another. Results of a row's several segments are
partial and get merged.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headstart.attention.layout import Span, StepPlan
from headstart.attention.shared import SharedPlan

__all__ = ["BlockTables", "CallStruct", "NativeStep", "StepStruct"]

IntArray = npt.NDArray[np.int32]
Strides = ctypes.c_int64 * 2


class StepStruct(ctypes.Structure):
    """AttentionStep of native/attention.h."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("mergers", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_segments", ctypes.c_int32),
        ("num_mergers", ctypes.c_int32),
        ("block_shift", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class CallStruct(ctypes.Structure):
    """AttentionCall of native/attention.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("query_strides", Strides),
        ("key_strides", Strides),
        ("value_strides", Strides),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class BlockTables:
    """The block tables of a step as int32 `[spans, blocks]`, kept from step to step.

    A running sequence's table mostly stays as it was, or grows at its end: comparing it with the
    one before takes a tenth of the time of converting it.
    """

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self.array: IntArray = np.zeros((16, 64), dtype=np.int32)

    def fill(self, tables: Sequence[Sequence[int]]) -> None:
        """Make row i begin with table i; what stands behind it is of no meaning."""
        self._make_room(len(tables), max(map(len, tables), default=0))
        for row, block_ids in enumerate(tables):
            if self._known[row] != block_ids:
                self.array[row, : len(block_ids)] = block_ids
                self._known[row] = list(block_ids)

    def _make_room(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self.array.shape
        if rows > old_rows or columns > old_columns:
            shape = (max(old_rows, 2 * rows), max(old_columns, 2 * columns))
            self.array, self._known = np.zeros(shape, dtype=np.int32), []
        self._known += [[] for _ in range(rows - len(self._known))]


class NativeStep:
    """One step's struct, and the arrays that it points to."""

    def __init__(
        self, plan: StepPlan, tables: BlockTables, block_size: int, shared: SharedPlan | None
    ) -> None:
        self._rows: list[int] = []  # of runs; those of spans are in order, and go before
        self._num_tokens = len(plan.slots)
        self._width = tables.array.shape[1]
        self.num_partials = 0
        parts: dict[int, list[int]] = {}  # by token
        if shared is None:
            segments = [self._whole(index, span) for index, span in enumerate(plan.spans)]
        else:
            segments = self._cut(plan, shared, parts)
        self._arrays = (
            plan.slots.contiguous(),
            tables.array,
            np.array([*range(self._num_tokens), *self._rows], dtype=np.int32),
            np.array(segments, dtype=np.int32),
            _mergers(parts),
            np.array([part for some in parts.values() for part in some], dtype=np.int32),
        )
        slots, *arrays = self._arrays
        addresses = [array.ctypes.data for array in arrays]
        self.struct = StepStruct(
            slots.data_ptr(),
            *addresses,
            None,
            self._num_tokens,
            len(segments),
            len(parts),
            block_size.bit_length() - 1,
            torch.get_num_threads(),
        )

    def _whole(self, index: int, span: Span) -> tuple[int, ...]:
        start = span.context - span.num_rows
        return (span.first_row, span.num_rows, start, index * self._width, 0, span.context, -1)

    def _cut(
        self, plan: StepPlan, shared: SharedPlan, parts: dict[int, list[int]]
    ) -> list[tuple[int, ...]]:
        """Runs first, as they take longest."""
        indices = [index for index, span in enumerate(plan.spans) if span.num_rows == 1]
        segments: list[tuple[int, ...]] = []
        for run in shared.runs:
            members = [indices[member] for member in run.members]
            segments.append(
                (
                    self._num_tokens + len(self._rows),
                    len(members),
                    run.last,  # a position from which every row sees all of the run
                    members[0] * self._width,
                    run.first,
                    run.last,
                    self.num_partials,
                )
            )
            for index in members:
                self._rows.append(plan.spans[index].first_row)
                parts.setdefault(plan.spans[index].first_row, []).append(self.num_partials)
                self.num_partials += 1
        firsts = dict(zip(indices, shared.own_first, strict=True))
        for index, span in enumerate(plan.spans):
            segment = self._whole(index, span)
            if firsts.get(index):  # else it shares nothing
                segment = (*segment[:4], firsts[index], span.context, self.num_partials)
                parts[span.first_row].append(self.num_partials)
                self.num_partials += 1
            segments.append(segment)
        return segments


def _mergers(parts: dict[int, list[int]]) -> IntArray:
    """For each token int32 `[token, first part, last part]`, parts being counted end to end."""
    ends = np.cumsum([0, *map(len, parts.values())])
    return np.array([*zip(parts, ends[:-1], ends[1:], strict=True)], dtype=np.int32)
