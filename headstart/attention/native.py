"""Attention by the compiled kernels: bf16 on CPUs that multiply it, see `headstart/native`.

A step's rows are cut into segments, rows that attend to one run of keys; the kernel goes through
a segment's keys in one pass, with the query heads of a KV head as so many rows. A layer that the
kernel does not cover goes through torch operations over the same memory.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.attention.backend import AttentionOptions
from headstart.attention.layout import LayerLayout, StepPlan
from headstart.attention.memory import PagedKVMemory
from headstart.attention.torch_ops import TorchAttention

__all__ = ["NativeAttention"]

_MAX_DIM = 256  # of the kernel

IntArray = npt.NDArray[np.int32]
_Pair = ctypes.c_int64 * 2


class _Step(ctypes.Structure):
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


class _Call(ctypes.Structure):
    """AttentionCall of native/attention.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("query_strides", _Pair),
        ("key_strides", _Pair),
        ("value_strides", _Pair),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class NativeAttention:
    """The `AttentionBackend` for CPUs with AVX-512 bf16.

    `library` is what `headstart.native.library()` gave. With `contiguous_gather` nothing changes:
    a row's result never depends on which rows are computed beside it, nor on block ids.
    """

    def __init__(self, memory: PagedKVMemory, library: ctypes.CDLL) -> None:
        self._memory = memory
        self._run = library.headstart_attend
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._run.restype = None
        self._torch = TorchAttention(memory)
        self._calls = [_make_call(memory, layer) for layer in range(len(memory.layouts))]
        self._tables = BlockTables()
        self._step: _Step | None = None
        self._kept: list[Any] = []  # what the addresses in the step point to

    @staticmethod
    def serves(memory: PagedKVMemory) -> bool:
        """Whether the kernel covers some layer of this memory."""
        suits = memory.dtype == torch.bfloat16 and memory.device.type == "cpu"
        return suits and any(map(_covered, memory.layouts))

    def begin_step(self, plan: StepPlan) -> None:
        self._torch.begin_step(plan)
        self._tables.fill([span.block_ids for span in plan.spans])
        width = self._tables.array.shape[1]
        segments = np.array(
            [
                (
                    span.first_row,
                    span.num_rows,
                    span.context - span.num_rows,
                    index * width,
                    0,
                    span.context,
                    -1,
                )
                for index, span in enumerate(plan.spans)
            ],
            dtype=np.int32,
        )
        slots = plan.slots.to(torch.int64).contiguous()
        rows = np.arange(len(slots), dtype=np.int32)
        self._kept = [slots, rows, segments]
        self._step = _Step(
            slots=slots.data_ptr(),
            tables=self._tables.array.ctypes.data,
            rows=rows.ctypes.data,
            segments=segments.ctypes.data,
            num_tokens=len(slots),
            num_segments=len(segments),
            block_shift=self._memory.block_size.bit_length() - 1,
            threads=torch.get_num_threads(),
        )

    def end_step(self) -> None:
        self._torch.end_step()
        self._step = None
        self._kept = []

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        call, step = self._calls[layer_idx], self._step
        if step is None or call is None or not _is_bf16(query, key, value):
            return self._torch.attend(layer_idx, query, key, value, options)
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        tokens, heads, _ = query.shape
        out = query.new_empty((tokens, heads, call.value_dim))
        call.query, call.key, call.value, call.out = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
        )
        call.query_strides[:] = query.stride()[:2]
        call.key_strides[:] = key.stride()[:2]
        call.value_strides[:] = value.stride()[:2]
        call.heads = heads
        call.window = options.sliding_window or 0
        call.scaling = options.scaling
        call.softcap = options.softcap or 0.0
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._run(ctypes.byref(step), ctypes.byref(call))
        return out


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


def _covered(layout: LayerLayout) -> bool:
    """Keys go through the kernel two dims at a time."""
    return layout.key_dim % 2 == 0 and max(layout.key_dim, layout.value_dim) <= _MAX_DIM


def _make_call(memory: PagedKVMemory, layer: int) -> _Call | None:
    """What is the same in every call of a layer; None if torch operations serve it."""
    layout = memory.layouts[layer]
    if not _covered(layout):
        return None
    return _Call(
        keys=memory.keys[layer].data_ptr(),
        values=memory.values[layer].data_ptr(),
        kv_heads=layout.kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
    )


def _is_bf16(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dtype == key.dtype == value.dtype == torch.bfloat16


def _dense_rows(tensor: Tensor) -> Tensor:
    """The numbers of a head side by side, as the kernel reads them."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
