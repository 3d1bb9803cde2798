"""The paged K/V memory: for every layer, one row of K and one of V per slot."""

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from headstart.attention.backend import LayerLayout, StateLayout, StepPlan
from headstart.attention.recurrent import Recurrence
from headstart.errors import EngineError
from headstart.native.pages import POPULATE_WRITE, advise_pages

INT8_REVISION = 1
"""Version of the rounding of rows to 8 bits; stored K/V of other versions are not read."""

_LEVELS = 127  # steps on either side of zero
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = float.fromhex("0x1.020406p+121")  # 127 times the next larger float32 is infinite
_CACHE_LINE = 64  # bytes
_PREFAULTED = 64 << 20  # maximum bytes that `prefault` allocates


class PagedKVMemory:
    """K and V of all blocks, one tensor of each per layer.

    `keys[layer]` is `[slots + 1, kv_heads, key_dim]`, `values[layer]` `[slots + 1, kv_heads,
    value_dim]`. Slot `block_id * block_size + offset` holds one token. The last slot,
    `scratch_slot`, belongs to no block and takes rows that are discarded. Memory starts as zeros.

    With `num_window_blocks`, layers with a sliding window have a separate pool of that many blocks,
    whose last slot is `window_scratch_slot`. Then K and V before the windows need no memory. Tiers
    are not possible, since they need blocks with the K and V of all layers.

    If `dtype` is int8, rows are rounded when written (`quantize_rows`): `key_scales[layer]` is
    float32 `[slots + 1, kv_heads]`, `value_scales` likewise. Other dtypes have no scales.
    """

    def __init__(
        self,
        layouts: Sequence[LayerLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_window_blocks: int = 0,
    ) -> None:
        self.layouts = tuple(layouts)
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        self.window = max((layout.window or 0 for layout in self.layouts), default=0)
        """The widest sliding window of a layer; 0 if no layer has one."""
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.scratch_slot = num_blocks * block_size
        self.window_scratch_slot = num_window_blocks * block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        for layer, layout in enumerate(self.layouts):
            last = self.window_scratch_slot if self.has_windows(layer) else self.scratch_slot
            heads = (last + 1, layout.kv_heads)
            self.keys.append(_zeros((*heads, layout.key_dim), dtype, self.device))
            self.values.append(_zeros((*heads, layout.value_dim), dtype, self.device))
            if self.has_scales:
                self.key_scales.append(_zeros(heads, torch.float32, self.device))
                self.value_scales.append(_zeros(heads, torch.float32, self.device))

    def has_windows(self, layer_idx: int) -> bool:
        """Return True if a layer's K and V are in window blocks."""
        return self.num_window_blocks > 0 and self.layouts[layer_idx].window is not None

    def plans(self, plan: StepPlan) -> list[StepPlan]:
        """Return the plan of the main pool, and of the pool of window blocks if it exists.

        Raises `EngineError` if the plan has no part for window blocks.
        """
        if not self.num_window_blocks:
            return [plan]
        if plan.window is None or len(plan.window.slots) != len(plan.slots):
            raise EngineError(
                f"the memory has {self.num_window_blocks} window blocks, but the plan has no slots "
                f"in them; allowed: a plan with {len(plan.slots)} slots in `window`"
            )
        return [plan, plan.window]

    def check_window(self, layer_idx: int, window: int | None) -> None:
        """Raise `EngineError` if a layer's window is wider than window blocks allow."""
        if self.has_windows(layer_idx) and not 0 < (window or 0) <= self.window:
            raise EngineError(
                f"layer {layer_idx} attends to a window of {window} tokens; allowed: 1 to "
                f"{self.window}, since earlier K and V are released"
            )

    @staticmethod
    def bytes_per_block(layouts: Sequence[LayerLayout], block_size: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of one block with these layers."""
        row = sum(layout.elements for layout in layouts) * dtype.itemsize
        if dtype == torch.int8:
            row += 2 * sum(layout.kv_heads for layout in layouts) * torch.float32.itemsize
        return row * block_size

    @property
    def has_scales(self) -> bool:
        """True if K and V are in 8 bits."""
        return self.dtype == torch.int8

    @property
    def nbytes(self) -> int:
        """The size in bytes of all K, V and scales, including scratch rows."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    @property
    def block_bytes(self) -> int:
        """The size in bytes of one block with all layers."""
        return self.bytes_per_block(self.layouts, self.block_size, self.dtype)

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Return a copy of blocks as bytes, uint8 `[blocks, block_bytes]` on the CPU.

        A block's K of all layers come first, then its V, each `[tokens, heads, width]`, then the
        scales of K and of V, `[tokens, heads]`.
        """
        copied = torch.empty(len(block_ids), self.block_bytes, dtype=torch.uint8)
        chosen = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for start, stop, tensor in self._as_bytes():
            copied[:, start:stop] = tensor.index_select(0, chosen)
        return copied

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[memoryview]) -> None:
        """Write blocks of `block_bytes` bytes each, as `read_blocks` returned them.

        On a CPU, runs of adjacent blocks are copied at once, ten times as fast as torch's copy by
        index.
        """
        if self.device.type == "cpu":
            runs = list(contiguous_runs(block_ids, blocks))
            for start, stop, tensor in self._as_bytes():
                target = tensor.numpy()
                for block_id, grid in runs:
                    target[block_id : block_id + len(grid)] = grid[:, start:stop]
            return
        rows = [np.frombuffer(block, dtype=np.uint8) for block in blocks]
        values = torch.from_numpy(np.stack(rows)).to(self.device)
        chosen = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for start, stop, tensor in self._as_bytes():
            tensor.index_copy_(0, chosen, values[:, start:stop])

    def _as_bytes(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each tensor as `[blocks, bytes]`, with its range in a block's bytes."""
        assert not self.num_window_blocks, "no block has the K and V of all layers"
        start = 0
        for tensor in self._tensors:
            rows = tensor[: self.scratch_slot].view(self.num_blocks, -1).view(torch.uint8)
            yield start, start + rows.shape[1], rows
            start += rows.shape[1]

    def prefault(self, num_blocks: int) -> threading.Thread | None:
        """Allocate the pages of the first blocks, at most 64 MiB, before a step needs them.

        The system allocates and clears each page at its first use. A thread triggers this in
        advance, without changing a byte. Return the thread; None if the memory is not on a CPU, and
        on systems other than Linux.
        """
        count = min(num_blocks, self.num_blocks, _PREFAULTED // max(1, self.block_bytes))
        if self.device.type != "cpu" or count <= 0 or sys.platform != "linux":
            return None

        def touch() -> None:
            for tensor in self._tensors:
                rows = tensor[: count * self.block_size]
                if not advise_pages(rows.data_ptr(), rows.nbytes, POPULATE_WRITE):
                    return

        thread = threading.Thread(target=touch, name="headstart-pages", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            thread.start()
            return thread
        return None

    def release(self) -> None:
        """Free all K and V; nothing can be written or read afterwards."""
        for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
            tensors.clear()

    def write(self, layer_idx: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` `[tokens, kv_heads, key_dim]` and `value` into `slots` int64 `[tokens]`.

        Both are in the memory's dtype, or in any floating dtype if the memory is int8.
        """
        if self.has_scales:
            key, key_scales = quantize_rows(key)
            value, value_scales = quantize_rows(value)
            self.key_scales[layer_idx].index_copy_(0, slots, key_scales)
            self.value_scales[layer_idx].index_copy_(0, slots, value_scales)
        self.keys[layer_idx].index_copy_(0, slots, key)
        self.values[layer_idx].index_copy_(0, slots, value)

    def gather(self, layer_idx: int, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V, each a new `[rows, width]`. rows: int64, `slot * kv_heads + head`."""
        keys, values = (
            tensors[layer_idx].flatten(0, 1).index_select(0, rows)
            for tensors in (self.keys, self.values)
        )
        if not self.has_scales:
            return keys.to(dtype), values.to(dtype)
        key_scales, value_scales = (
            scales[layer_idx].flatten().index_select(0, rows)
            for scales in (self.key_scales, self.value_scales)
        )
        return scale_rows(keys, key_scales, dtype), scale_rows(values, value_scales, dtype)

    def copy_rows(self, copies: Sequence[tuple[int, ...]]) -> None:
        """Copy the first rows of blocks in every layer.

        Each copy is (source block, target block, number of rows). If the memory has window blocks,
        two more ids follow: the source and the target in their pool. In either pool, an id of -1
        means that nothing is copied. In each layer all sources are read before any target is
        written. So a block may be the source of one copy and the target of another, and the order
        of `copies` does not matter.
        """
        if not copies:
            return
        size = self.block_size
        ends = [(0, 1), (3, 4)] if self.num_window_blocks else [(0, 1)]
        for is_window, (source_end, target_end) in enumerate(ends):
            slots = torch.tensor(
                [
                    (copy[source_end] * size + row, copy[target_end] * size + row)
                    for copy in copies
                    for row in range(copy[2] if min(copy[source_end], copy[target_end]) >= 0 else 0)
                ],
                dtype=torch.int64,
                device=self.device,
            ).view(-1, 2)
            source, target = slots.unbind(1)
            for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
                for layer, tensor in enumerate(tensors):
                    if self.has_windows(layer) == is_window:
                        tensor.index_copy_(0, target, tensor.index_select(0, source))


class StateMemory:
    """The states of recurrent layers: one row per slot, with the states of all layers.

    `layers[i]` has the states of the i-th recurrent layer as views `[slots, *shape]`, one for each
    shape of its layout. The last slot, `scratch_slot`, takes states that are discarded.
    `recurrence` has the slots of the current step.
    """

    def __init__(
        self, layouts: Sequence[StateLayout], num_slots: int, device: torch.device | str
    ) -> None:
        self.layouts = tuple(layouts)
        self.scratch_slot = num_slots
        width = sum(layout.elements for layout in self.layouts)
        self.rows = _zeros((num_slots + 1, width), torch.float32, torch.device(device))
        self.layers: list[tuple[Tensor, ...]] = []
        self.recurrence: Recurrence | None = None
        start = 0
        for layout in self.layouts:
            views = []
            for shape in layout.shapes:
                stop = start + math.prod(shape)
                views.append(self.rows[:, start:stop].view(num_slots + 1, *shape))
                start = stop
            self.layers.append(tuple(views))

    def begin_step(self, plan: StepPlan) -> None:
        """Store the step's slots for the layers that read and write them."""
        self.recurrence = plan.recurrence

    @staticmethod
    def bytes_per_slot(layouts: Sequence[StateLayout]) -> int:
        """Return the size in bytes of one slot."""
        return sum(layout.elements for layout in layouts) * torch.float32.itemsize

    def read_slot(self, slot: int) -> Tensor:
        """Return a slot as bytes, uint8 on the CPU; a view if the memory is on the CPU."""
        return self.rows[slot].cpu().view(torch.uint8)

    def write_slot(self, slot: int, data: memoryview) -> None:
        """Write to a slot the bytes that `read_slot` returned."""
        self.rows[slot].copy_(torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy()))

    def is_finite(self, slot: int) -> bool:
        """Return True if every element of a slot is finite."""
        return bool(torch.isfinite(self.rows[slot].sum()))

    def release(self) -> None:
        """Free all states; nothing can be read or written afterwards."""
        self.layers.clear()
        self.rows = self.rows.new_empty(0)


def contiguous_runs(
    block_ids: Sequence[int], blocks: Sequence[memoryview]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first id and a view `[blocks, block_bytes]` of each run of blocks.

    The blocks of a run have consecutive ids, and are evenly spaced in one buffer.
    """
    rows = [np.frombuffer(block, dtype=np.uint8) for block in blocks]
    starts = [int(row.ctypes.data) for row in rows]
    distances = [0] + [
        starts[i] - starts[i - 1]
        if block_ids[i] == block_ids[i - 1] + 1 and blocks[i].obj is blocks[i - 1].obj
        else 0
        for i in range(1, len(blocks))
    ]
    first = 0
    for end in range(1, len(blocks) + 1):
        if end < len(blocks) and 0 < distances[end] == distances[first + 1]:
            continue
        if end - first == 1:
            yield block_ids[first], rows[first][np.newaxis]
        else:
            buffer = memoryview(blocks[first].obj).cast("B")
            offset = starts[first] - int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
            shape, strides = (end - first, rows[first].nbytes), (distances[first + 1], 1)
            yield block_ids[first], np.ndarray(shape, np.uint8, buffer, offset, strides)
        first = end


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros; on a CPU the system allocates its pages at first use.

    torch.zeros writes every zero, which takes seconds for a pool of several gigabytes. The
    memory is aligned to cache lines, so that a row spans as few lines as possible.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.zeros(nbytes + _CACHE_LINE, dtype=np.uint8)
    start = -data.ctypes.data % _CACHE_LINE
    return torch.from_numpy(data[start : start + nbytes]).view(dtype).view(shape)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows `[tokens, heads, width]` to 8 bits; returns codes int8 and scales float32.

    A scale `[tokens, heads]` is the head's largest magnitude over 127, so every element is off by
    at most half a scale. Elements are rounded to the nearest, ties to even. A row's bits depend on
    that row alone. A head that is not finite has the scale NaN, so all its elements are NaN when
    they are read. A head whose scale would be a subnormal float32 becomes zeros, since CPUs differ
    on subnormal numbers. Its elements are at most 1.5e-36.

    Compiled attention writes the same bits (`native/attention/int8_rows.h`).

    >>> quantize_rows(torch.tensor([[[254.0, -101.0, 3.0]]]))[0]
    tensor([[[127, -50,   2]]], dtype=torch.int8)
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / _LEVELS
    scales += scales - scales  # inf - inf is NaN
    scales.clamp_(max=_LARGEST)
    scales.masked_fill_(scales < _SMALLEST, 0.0)
    codes = torch.where(scales > 0, wide / scales, 0.0).round_().to(torch.int8)
    return codes, scales.squeeze(-1)


def scale_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of rounded rows: `codes` `[rows, width]` times `scales` `[rows]`."""
    return codes.to(dtype).mul_(scales.to(dtype).unsqueeze(-1))
