"""Attention by the compiled kernels, see `headstart/native/attention`.

K and V in bf16 need a CPU with AVX-512 bf16. K and V in float32 or 8 bits need AVX2. Layers that
the kernel does not support use torch operations over the same memory.

A step is cut into segments. A segment has rows, a block table and a range of keys. The kernel reads
the keys of a segment in one pass and treats the query heads of a KV head as rows. A shared-prefix
group is one segment with the rows of all members. Each member has further segments for the rest of
its keys. If a row is in several segments, the kernel merges their partial results.
"""

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart import native
from headstart.attention.backend import (
    AttentionBackend,
    AttentionOptions,
    LayerLayout,
    Span,
    StepPlan,
)
from headstart.attention.memory import PagedKVMemory
from headstart.attention.shared import SharedPlan, SharedPlanner, SharingCost
from headstart.attention.torch_ops import TorchAttention
from headstart.errors import EngineError
from headstart.native.bindings import AttentionCall, AttentionStep, Merger, Segment

_MAX_DIM = 256  # the kernel's widest head
_MAX_POSITIONS = (1 << 31) - 1  # the kernel's positions have 32 bits

# Break-even points in tokens, measured by `bench/kernels/attention.py`. They are higher in float32,
# which is limited by arithmetic more than by memory. K/V in 8 bits are computed in float32.
SHARING = {
    torch.bfloat16: SharingCost(group=0, member=40),
    torch.float32: SharingCost(group=0, member=100),
    torch.int8: SharingCost(group=0, member=100),
}
_FUNCTIONS = {
    torch.bfloat16: "headstart_attend",
    torch.float32: "headstart_attend_float32",
    torch.int8: "headstart_attend_int8",
}
# The keys of a decoding row are split into parts of at least this many keys. For a shorter part, a
# separate thread costs more time than it saves.
SPLIT_KEYS = 512
_GRAIN = 16  # the length of a part of keys is a multiple of this
# Spans of at most this many rows, such as drafts, are computed row by row.
_SHORT_SPAN = 17


class NativeAttention:
    """The `AttentionBackend` of the compiled kernels in `library`, for a memory that they support.

    With `share`, decoding rows attend once to the prefix that their sequences share.

    Raises `EngineError` for a step or rows that do not fit the memory, since kernels do not check.
    """

    def __init__(self, memory: PagedKVMemory, library: ctypes.CDLL, *, share: bool = True) -> None:
        self._memory = memory
        self._run = getattr(library, _FUNCTIONS[memory.dtype])
        self._torch = TorchAttention(memory, share=share)
        layers = range(len(memory.layouts))
        self._calls = [_make_call(memory, layer) for layer in layers]
        self._pools = [PoolSteps(memory, memory.num_blocks, share=share)]
        if memory.num_window_blocks:
            self._pools.append(
                PoolSteps(memory, memory.num_window_blocks, window=memory.window, share=share)
            )
        self._pool_of = [self._pools[memory.has_windows(layer)] for layer in layers]
        self._fell_back = False
        self._nonfinite = np.zeros(0, dtype=np.uint8)  # by row: 1 if K or V are not finite
        self._nonfinite_address = 0
        self._plan: StepPlan | None = None

    def begin_step(self, plan: StepPlan) -> None:
        self.end_step()
        self._fell_back = False
        for pool, part in zip(self._pools, self._memory.plans(plan), strict=True):
            pool.begin(part)
        self._nonfinite = np.zeros(len(plan.slots), dtype=np.uint8)
        self._nonfinite_address = self._nonfinite.ctypes.data
        self._plan = plan

    def end_step(self) -> None:
        self._torch.end_step()
        self._plan = None
        for pool in self._pools:
            pool.end()

    def nonfinite_rows(self) -> list[int]:
        rows: list[int] = self._nonfinite.nonzero()[0].tolist()
        return sorted({*rows, *self._torch.nonfinite_rows()}) if self._fell_back else rows

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        assert self._plan is not None, "call begin_step() first"
        call, memory, dtype = self._calls[layer_idx], self._memory, query.dtype
        rows = (query, key, value)
        is_supported = all(
            part.is_cpu and memory.dtype in (part.dtype, torch.int8) for part in rows
        )
        if call is None or not is_supported:
            if not self._fell_back:
                self._torch.begin_step(self._plan)
                self._fell_back = True
            return self._torch.attend(layer_idx, *rows, options)
        if memory.has_scales:
            query, key, value = query.float(), key.float(), value.float()
        # The kernel needs heads with contiguous elements.
        query, key, value = (
            part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value)
        )
        _check_rows(query, key, value, options, memory.layouts[layer_idx])
        step = self._prepare(layer_idx, call, query.shape[:2], options)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        call.query, call.key, call.value, call.out = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
        )
        call.query_strides[:] = query.stride()[:2]
        call.key_strides[:] = key.stride()[:2]
        call.value_strides[:] = value.stride()[:2]
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._run(ctypes.byref(step.struct), ctypes.byref(call))
        return out.to(dtype)

    def compiled(
        self, layer_idx: int, rows: tuple[int, int], options: AttentionOptions, dtype: torch.dtype
    ) -> tuple[int, int] | None:
        call, memory = self._calls[layer_idx], self._memory
        if call is None or options.sinks is not None:
            return None
        if dtype != (torch.float32 if memory.has_scales else memory.dtype):
            return None
        call.sinks = None
        step = self._prepare(layer_idx, call, rows, options)
        return ctypes.addressof(step.struct), ctypes.addressof(call)

    def _prepare(
        self, layer_idx: int, call: AttentionCall, rows: Sequence[int], options: AttentionOptions
    ) -> "NativeStep":
        """Fill the call's scalar fields; return the step for a layer with these options.

        rows: the number of rows and the number of query heads.
        """
        tokens, heads = rows
        if tokens != len(self._nonfinite) or heads < 1 or heads % call.kv_heads:
            raise EngineError(
                f"attention received {tokens} rows of {heads} query heads; allowed: "
                f"{len(self._nonfinite)} rows of a multiple of {call.kv_heads} query heads"
            )
        window = options.sliding_window
        pool = self._pool_of[layer_idx]
        if pool.window is not None:
            self._memory.check_window(layer_idx, window)
        step = pool.step(window)
        step.struct.nonfinite = self._nonfinite_address
        call.heads = heads
        call.window = min(window or 0, _MAX_POSITIONS)
        call.scaling = options.scaling
        call.softcap = abs(options.softcap or 0.0)  # the sign has no effect
        if step.num_partials:
            pool.make_partials(step, step.num_partials * heads * (2 + call.value_dim))
        return step


class PoolSteps:
    """The kernels' steps over one pool of blocks, for the layers that use the pool.

    window: the widest window of these layers in the pool of window blocks; None in the main pool.
    """

    def __init__(
        self, memory: PagedKVMemory, num_blocks: int, *, share: bool, window: int | None = None
    ) -> None:
        self.window = window
        self._block_size, self._num_blocks = memory.block_size, num_blocks
        self._kv_heads = memory.layouts[0].kv_heads  # used only to split work
        self._tables = BlockTables(num_blocks)
        self._planner = SharedPlanner(memory.block_size, SHARING[memory.dtype]) if share else None
        self._previous: dict[bool, NativeStep] = {}  # the last step with and without sharing
        # Buffers for partial results of steps with and without sharing.
        self._partials = {True: torch.empty(0), False: torch.empty(0)}
        self._longest = 0
        self._plan: StepPlan | None = None
        self._plain: NativeStep | None = None
        self._shared: NativeStep | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step. Raises `EngineError` if it does not fit the pool."""
        _check_plan(plan, self._block_size, self._num_blocks)
        self._longest = max((span.context for span in plan.spans), default=0)
        self._tables.fill([span.block_ids for span in plan.spans])
        self._plan = plan
        # In the pool of window blocks, every layer masks a part of a context that is longer than
        # the widest window. Such a layer attends without shared prefixes.
        may_share = self.window is None or self._longest <= self.window
        if self._planner is not None and may_share:
            shared = self._planner.plan(plan.decoding)
            if shared is not None:
                self._shared = self._next_step(plan, shared, 1)

    def end(self) -> None:
        """Forget the step."""
        self._plan = self._plain = self._shared = None

    def step(self, window: int | None) -> "NativeStep":
        """Return the step for layers with this sliding window."""
        assert self._plan is not None, "call begin_step() first"
        if self._shared is not None and (window is None or window >= self._longest):
            return self._shared
        # Layers whose window hides a token attend without shared prefixes. The keys of a decoding
        # row are split if there are at least two threads for each KV head of each span.
        if self._plain is None:
            work = len(self._plan.spans) * self._kv_heads
            kv_splits = max(1, torch.get_num_threads() // work)
            self._plain = self._next_step(self._plan, None, kv_splits)
        return self._plain

    def make_partials(self, step: "NativeStep", numbers: int) -> None:
        """Give a step a buffer of this many floats for partial results.

        Steps with and without sharing have separate buffers, since one compiled call may run both.
        """
        is_shared = step is self._shared
        if len(self._partials[is_shared]) < numbers:
            self._partials[is_shared] = torch.empty(numbers)
        step.struct.partials = self._partials[is_shared].data_ptr()

    def _next_step(self, plan: StepPlan, shared: SharedPlan | None, kv_splits: int) -> "NativeStep":
        """Return the updated previous step if the plan continues its decoding, else a new step."""
        previous = self._previous.get(shared is not None)
        if previous is not None and previous.update(plan, self._tables, shared, kv_splits):
            return previous
        step = NativeStep(plan, self._tables, self._block_size, shared, kv_splits)
        self._previous[shared is not None] = step
        return step


def make_backend(memory: PagedKVMemory, *, share: bool = True) -> AttentionBackend:
    """Return the fastest backend: compiled kernels if they support `memory`, else torch's.

    With `share`, decoding rows attend once to the prefix that their sequences share.
    """
    size = memory.block_size
    is_supported = (
        memory.dtype in _FUNCTIONS
        and memory.device.type == "cpu"
        and size > 0
        and size & (size - 1) == 0  # kernels find a block by shifting a position
        and any(_make_call(memory, layer) is not None for layer in range(len(memory.layouts)))
    )
    if is_supported:
        is_bf16 = memory.dtype == torch.bfloat16
        library = native.library() if is_bf16 else native.avx2_library()
        if library is not None:
            return NativeAttention(memory, library, share=share)
        native.advise()
    return TorchAttention(memory, share=share)


def _make_call(memory: PagedKVMemory, layer: int) -> AttentionCall | None:
    """Return a call with the constant fields of a layer; None if torch computes the layer."""
    layout, scales = memory.layouts[layer], memory.has_scales
    # The bf16 kernel multiplies pairs of dims.
    is_odd = memory.dtype == torch.bfloat16 and layout.key_dim % 2 == 1
    widths = (layout.key_dim, layout.value_dim)
    if is_odd or min(layout.kv_heads, *widths) < 1 or max(widths) > _MAX_DIM:
        return None
    return AttentionCall(
        keys=memory.keys[layer].data_ptr(),
        values=memory.values[layer].data_ptr(),
        key_scales=memory.key_scales[layer].data_ptr() if scales else None,
        value_scales=memory.value_scales[layer].data_ptr() if scales else None,
        kv_heads=layout.kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
    )


def _check_plan(plan: StepPlan, block_size: int, num_blocks: int) -> None:
    """Raise `EngineError` for invalid slots or rows, or block tables that are too short."""
    slots, tokens, scratch_slot = plan.slots, len(plan.slots), num_blocks * block_size
    assert slots.dtype == torch.int64 and slots.is_cpu and slots.dim() == 1
    if tokens:
        numbers = slots.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > scratch_slot:
            raise EngineError(f"slots are {low} to {high}; allowed: 0 to {scratch_slot}")
    for span in plan.spans:
        capacity = len(span.block_ids) * block_size
        is_inside = span.first_row >= 0 and 1 <= span.num_rows <= tokens - span.first_row
        if not is_inside or not span.num_rows <= span.context <= capacity:
            raise EngineError(
                f"a span of {span.num_rows} rows from row {span.first_row} on, with a context of "
                f"{span.context} tokens, does not fit a step of {tokens} tokens and a block table "
                f"for {capacity} tokens"
            )


def _check_rows(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, layout: LayerLayout
) -> None:
    """Raise `EngineError` unless the rows of a model's layer fit the layout of its memory."""
    shape, sinks = query.shape, options.sinks
    if (
        len(shape) != 3
        or shape[2] != layout.key_dim
        or key.shape != (shape[0], layout.kv_heads, layout.key_dim)
        or value.shape != (shape[0], layout.kv_heads, layout.value_dim)
        or (sinks is not None and (sinks.numel() != shape[1] or not sinks.is_cpu))
    ):
        raise EngineError(
            f"queries {list(shape)}, keys {list(key.shape)}, values {list(value.shape)} and "
            f"{0 if sinks is None else sinks.numel()} sinks do not fit {layout}; allowed: [tokens, "
            "heads, key_dim], [tokens, kv_heads, key_dim], [tokens, kv_heads, value_dim], and a "
            "sink on the CPU for each query head or none"
        )


IntArray = npt.NDArray[np.int32]

_FIRST_POSITION = Segment._fields.index("first_position")
_FIRST_KEY = Segment._fields.index("first_key")
_LAST_KEY = Segment._fields.index("last_key")


class BlockTables:
    """The block tables of a step as int32 `[spans, blocks]`, reused from step to step.

    A running sequence's table rarely changes except at its end, and comparing it with the previous
    table costs less than converting it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rows: list[list[int]] = []
        self.array: IntArray = np.zeros((16, 64), dtype=np.int32)

    def fill(self, tables: Sequence[Sequence[int]]) -> None:
        """Write table i to the beginning of row i; the rest of the row is undefined.

        Raises `EngineError` for a block id out of range.
        """
        rows, columns = len(tables), max(map(len, tables), default=0)
        old_rows, old_columns = self.array.shape
        if rows > old_rows or columns > old_columns:
            shape = (max(old_rows, 2 * rows), max(old_columns, 2 * columns))
            self.array, self._rows = np.zeros(shape, dtype=np.int32), []
        self._rows += [[] for _ in range(rows - len(self._rows))]
        for row, block_ids in enumerate(tables):
            if self._rows[row] != block_ids:
                ids = np.array(block_ids, dtype=np.int64)
                if not 0 <= ids.min() <= ids.max() < self._num_blocks:
                    raise EngineError(
                        f"a block table holds ids from {ids.min()} to {ids.max()}; "
                        f"allowed: 0 to {self._num_blocks - 1}"
                    )
                self.array[row, : len(block_ids)] = ids
                self._rows[row] = list(block_ids)


class NativeStep:
    """The `AttentionStep` of a plan, and the arrays that it points to.

    `kv_splits` is the number of parts into which the keys of a decoding row are split, if there
    are enough keys. So a step with few rows also has work for all threads.
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
        self._rows = list(range(self._num_tokens))  # rows of spans in order, then rows of groups
        self._parts: dict[int, list[int]] = {}  # numbers of partial results by token
        self._owners: list[int] = []  # the span index of each segment outside groups
        # Groups come first, since they take longest.
        self._segments = np.array(
            self._group_segments(plan) + self._ungrouped_segments(plan), dtype=np.int32
        )
        self._contexts = _decoding_contexts(plan)
        self._slots = plan.slots.contiguous()
        rows = np.array(self._rows, dtype=np.int32)
        ends = itertools.accumulate(map(len, self._parts.values()), initial=0)
        pairs = zip(self._parts, itertools.pairwise(ends), strict=True)
        mergers = np.array([Merger(token, *ends) for token, ends in pairs], dtype=np.int32)
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

    def update(
        self, plan: StepPlan, tables: BlockTables, shared: SharedPlan | None, kv_splits: int
    ) -> bool:
        """Update this step to `plan` if that only continues the decoding; return True if updated.

        The segments must be the same, and no context may be shorter.
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
        ungrouped = self._segments[len(self._segments) - len(self._owners) :]
        if kv_splits > 1:
            borders = [_key_borders(0, context, kv_splits)[:-1] for context in contexts.tolist()]
            if [*itertools.chain(*borders)] != ungrouped[:, _FIRST_KEY].tolist():
                return False
        self._contexts = contexts
        ungrouped[:, _FIRST_POSITION] = contexts[self._owners] - 1
        last = np.flatnonzero(np.diff(self._owners, append=-1))
        ungrouped[last, _LAST_KEY] = contexts
        self._slots = plan.slots.contiguous()
        self.struct.slots = self._slots.data_ptr()
        self.struct.threads = torch.get_num_threads()
        return True

    def _add_part(self, token: int) -> int:
        """Add a partial result of a token; return its number."""
        self._parts.setdefault(token, []).append(self.num_partials)
        self.num_partials += 1
        return self.num_partials - 1

    def _group_segments(self, plan: StepPlan) -> list[Segment]:
        """Return the segments of shared-prefix groups."""
        segments: list[Segment] = []
        indices = [index for index, span in enumerate(plan.spans) if span.num_rows == 1]
        for group in self._shared.groups if self._shared is not None else ():
            members = [indices[member] for member in group.members]
            rows = [plan.spans[index].first_row for index in members]
            numbers = [self._add_part(row) for row in rows]
            segments.append(
                Segment(
                    first_row=len(self._rows),
                    num_rows=len(rows),
                    first_position=group.last,  # rows see all keys before this position
                    table=members[0] * self._tables.shape[1],
                    first_key=group.first,
                    last_key=group.last,
                    partial=numbers[0],
                )
            )
            self._rows += rows
        return segments

    def _ungrouped_segments(self, plan: StepPlan) -> list[Segment]:
        """Return the segments of each span's keys outside groups."""
        firsts = iter(self._shared.own_first if self._shared is not None else ())
        segments: list[Segment] = []
        for index, span in enumerate(plan.spans):
            first = next(firsts, 0) if span.num_rows == 1 else 0
            start = span.context - span.num_rows
            for row, stop in itertools.pairwise(_row_borders(plan, span)):
                splits = self._kv_splits if stop - row == 1 and not plan.contiguous_gather else 1
                borders = _key_borders(first, start + stop, splits)
                is_partial = first > 0 or len(borders) > 2
                for low, high in itertools.pairwise(borders):
                    segments.append(
                        Segment(
                            first_row=span.first_row + row,
                            num_rows=stop - row,
                            first_position=start + row,
                            table=index * self._tables.shape[1],
                            first_key=low,
                            last_key=high,
                            partial=self._add_part(span.first_row + row) if is_partial else -1,
                        )
                    )
                    self._owners.append(index)
        return segments


def _key_borders(first: int, stop: int, max_parts: int) -> list[int]:
    """Return the borders of at most `max_parts` parts of the keys `first` to `stop - 1`.

    One more key seldom changes the borders, so `NativeStep.update` often succeeds.
    """
    splits = min(max_parts, (stop - first) // SPLIT_KEYS)
    if splits < 2:
        return [first, stop]
    length = (stop - first) // splits // _GRAIN * _GRAIN
    return [first + length * split for split in range(splits)] + [stop]


def _row_borders(plan: StepPlan, span: Span) -> list[int]:
    """Return the first row of each segment of a span, then the span's number of rows.

    The bf16 kernel rounds the rows of a long segment differently from a decoding row. Splitting the
    keys of a decoding row also changes its rounding. Tokens are sampled from the logits of a
    prompt's last row and of a draft's rows. So each of these rows is a separate segment, like a
    decoding row. Prefix hits and drafts then change no token.
    """
    count = span.num_rows
    if plan.contiguous_gather:
        return [0, count]
    return [*range(count + 1)] if count <= _SHORT_SPAN else [0, count - 1, count]


def _decoding_contexts(plan: StepPlan) -> IntArray | None:
    """Return the contexts of spans; None unless all have one row and are in row order."""
    for index, span in enumerate(plan.spans):
        if span.num_rows != 1 or span.first_row != index:
            return None
    return np.array([span.context for span in plan.spans], dtype=np.int32)
