"""Attention by the compiled kernels, see `headstart/native/attention`.

K and V in bf16 need a CPU with AVX-512 bf16, in float32 or 8 bits one with AVX2. A kernel reads the
keys of a segment in one pass and treats the query heads of a KV head as rows. A prefix that
decoding rows share is one segment for all of them. Layers that the kernel does not support use
torch operations over the same memory.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from headstart import native
from headstart.attention.backend import (
    AttentionBackend,
    AttentionOptions,
    CompiledCall,
    LayerLayout,
    RowShapes,
    StepPlan,
)
from headstart.attention.memory import PagedKVMemory
from headstart.attention.native_step import BlockTables, NativeStep
from headstart.attention.shared import SharedPlan, SharedPlanner, SharingCost
from headstart.attention.torch_ops import TorchAttention
from headstart.errors import ConfigError, EngineError
from headstart.native.bindings import AttentionCall

__all__ = ["NativeAttention", "make_backend", "name_backend"]


def fits_memory(memory: PagedKVMemory) -> bool:
    """True if kernels can read this memory; they find a block by shifting a position."""
    size = memory.block_size
    return (
        memory.dtype in (torch.bfloat16, torch.float32, torch.int8)
        and memory.device.type == "cpu"
        and size > 0
        and size & (size - 1) == 0
    )


def check_memory(memory: PagedKVMemory) -> None:
    """Raise `ConfigError` unless kernels can read this memory."""
    if not fits_memory(memory):
        raise ConfigError(
            f"compiled attention was given {memory.dtype} on {memory.device} in blocks of "
            f"{memory.block_size}; it takes torch.bfloat16, torch.float32 or torch.int8 on cpu "
            "in blocks of a power of two"
        )


def check_plan(plan: StepPlan, memory: PagedKVMemory) -> None:
    """Raise `EngineError` unless slots and rows exist, and block tables cover their contexts."""
    slots, tokens = plan.slots, len(plan.slots)
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device.type != "cpu":
        raise EngineError(
            f"slots are {slots.dtype} {list(slots.shape)} on {slots.device}; "
            "compiled attention takes torch.int64 [tokens] on cpu"
        )
    if tokens:
        numbers = slots.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > memory.scratch_slot:
            raise EngineError(f"slots are {low} to {high}; allowed: 0 to {memory.scratch_slot}")
    for span in plan.spans:
        room = len(span.block_ids) * memory.block_size
        if not (
            span.first_row >= 0
            and 1 <= span.num_rows <= tokens - span.first_row
            and span.num_rows <= span.context <= room
        ):
            raise EngineError(
                f"a span of {span.num_rows} rows from row {span.first_row} on, with a context of "
                f"{span.context}, does not fit a step of {tokens} tokens and a block table of "
                f"{room}"
            )


def check_rows(rows: RowShapes, layout: LayerLayout, tokens: int) -> None:
    """Raise `EngineError` unless `rows` fit a layer of this layout, one row per token."""
    expected, heads = (layout.kv_heads, layout.key_dim, layout.value_dim), rows.heads
    fits = rows.tokens == tokens and rows[2:] == expected
    if not fits or heads < 1 or heads % layout.kv_heads != 0:
        raise EngineError(
            f"attention was given {rows}; this step and layer take "
            f"{RowShapes(tokens, heads, *expected)}, with heads a multiple of {layout.kv_heads}"
        )


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raise `EngineError` unless there is one sink per query head, or None."""
    if sinks is not None and (sinks.numel() != heads or sinks.device.type != "cpu"):
        raise EngineError(
            f"{sinks.numel()} sinks on {sinks.device} were given for {heads} query heads on cpu"
        )


def row_shapes(query: Tensor, key: Tensor, value: Tensor) -> RowShapes:
    """The shapes of a layer's rows; raises `EngineError` where they contradict one another."""
    if query.dim() == key.dim() == value.dim() == 3:
        tokens, heads, key_dim = query.shape
        key_tokens, kv_heads, width = key.shape
        value_tokens, value_heads, value_dim = value.shape
        if tokens == key_tokens == value_tokens and kv_heads == value_heads and width == key_dim:
            return RowShapes(tokens, heads, kv_heads, key_dim, value_dim)
    raise EngineError(
        f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)} are "
        "not [tokens, heads, key_dim], [tokens, kv_heads, key_dim], [tokens, kv_heads, value_dim]"
    )


_MAX_DIM = 256  # of the kernel
_MOST_POSITIONS = (1 << 31) - 1  # its positions have 32 bits

# Measured with 2 KV heads of 64 and 7 query heads each, on one core. In bf16, 16 rows that share
# 2,000 tokens take 0.44 ms instead of 1.3 ms. They break even at 16 tokens; the step's tables cost
# more. In float32 16 rows take 2.7 ms instead of 4.9 ms and break even at 100 tokens, since the
# products limit them more than memory does. In 8 bits the arithmetic is the same.
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


class NativeAttention:
    """The `AttentionBackend` of the compiled kernels.

    `library` is the result of `NativeAttention.library(memory)`. With `share`, decoding rows attend
    once to the prefix that their sequences share. Without it, and always with `contiguous_gather`,
    a row's result does not depend on the other rows of the batch.

    Kernels read by address, so all their inputs are checked. Raises `ConfigError` for a memory
    that kernels cannot read, `EngineError` for a step or rows that do not fit the memory.
    """

    def __init__(self, memory: PagedKVMemory, library: ctypes.CDLL, *, share: bool = True) -> None:
        check_memory(memory)
        self._memory = memory
        self._run = getattr(library, _FUNCTIONS[memory.dtype])
        self._torch = TorchAttention(memory, share=share)
        self._calls = [_make_call(memory, layer) for layer in range(len(memory.layouts))]
        self._tables = BlockTables(memory.num_blocks)
        self._planner = SharedPlanner(memory.block_size, SHARING[memory.dtype]) if share else None
        self._before: dict[bool, NativeStep] = {}  # the last step with and without sharing
        # Buffers for partial results, of steps that share and of steps that do not.
        self._partials = {True: torch.empty(0), False: torch.empty(0)}
        self._fell_back = False
        self._longest = 0
        self._nonfinite = np.zeros(0, dtype=np.uint8)  # 1 for rows of the step whose K or V are not
        self._nonfinite_address = 0
        self._plan: StepPlan | None = None
        self._plain: NativeStep | None = None
        self._shared: NativeStep | None = None

    @staticmethod
    def serves(memory: PagedKVMemory) -> bool:
        """True if the kernel supports at least one layer of this memory."""
        return fits_memory(memory) and any(_covered(memory, layout) for layout in memory.layouts)

    @staticmethod
    def library(memory: PagedKVMemory) -> ctypes.CDLL | None:
        """The compiled kernels if they are there and this CPU has what `memory`'s dtype needs."""
        return native.library() if memory.dtype == torch.bfloat16 else native.avx2_library()

    def begin_step(self, plan: StepPlan) -> None:
        self.end_step()
        check_plan(plan, self._memory)
        self._fell_back = False
        self._nonfinite = np.zeros(len(plan.slots), dtype=np.uint8)
        self._nonfinite_address = self._nonfinite.ctypes.data
        self._longest = max((span.context for span in plan.spans), default=0)
        self._tables.fill([span.block_ids for span in plan.spans])
        self._plan = plan
        shared = self._planner.plan(plan.decoding) if self._planner is not None else None
        if shared is not None:
            self._shared = self._next_step(plan, shared, 1)

    def end_step(self) -> None:
        self._torch.end_step()
        self._plan = self._plain = self._shared = None

    def nonfinite_rows(self) -> list[int]:
        found: list[int] = self._nonfinite.nonzero()[0].tolist()
        return sorted({*found, *self._torch.nonfinite_rows()}) if self._fell_back else found

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self._plan is None:
            raise RuntimeError("attend() outside of a step: call begin_step() first")
        call = self._calls[layer_idx]
        if call is None or not self._reads(query, key, value):
            return self._fall_back().attend(layer_idx, query, key, value, options)
        rows, dtype = row_shapes(query, key, value), query.dtype
        if self._memory.has_scales:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        check_sinks(options.sinks, rows.heads)
        step = self._prepare(layer_idx, call, rows, options)
        out = query.new_empty((rows.tokens, rows.heads, rows.value_dim))
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
        self, layer_idx: int, rows: RowShapes, options: AttentionOptions, dtype: torch.dtype
    ) -> CompiledCall | None:
        call, memory = self._calls[layer_idx], self._memory
        if call is None or options.sinks is not None:
            return None
        if dtype != (torch.float32 if memory.has_scales else memory.dtype):
            return None
        call.sinks = None
        step = self._prepare(layer_idx, call, rows, options)
        return CompiledCall(ctypes.addressof(step.struct), ctypes.addressof(call))

    def _reads(self, *rows: Tensor) -> bool:
        """True if these rows are on the CPU, and in the memory's dtype unless that is 8 bits."""
        memory = self._memory
        return all(one.is_cpu and (memory.has_scales or one.dtype == memory.dtype) for one in rows)

    def _prepare(
        self, layer_idx: int, call: AttentionCall, rows: RowShapes, options: AttentionOptions
    ) -> NativeStep:
        """Fill the call's scalar fields; returns the step for a layer of these options."""
        check_rows(rows, self._memory.layouts[layer_idx], len(self._nonfinite))
        step = self._step_for(options.sliding_window)
        step.struct.nonfinite = self._nonfinite_address
        call.heads = rows.heads
        call.window = min(options.sliding_window or 0, _MOST_POSITIONS)
        call.scaling = options.scaling
        call.softcap = abs(options.softcap or 0.0)  # the sign changes nothing; kernels want none
        if step.num_partials:
            numbers = step.num_partials * rows.heads * (2 + call.value_dim)
            step.struct.partials = self._room(step is self._shared, numbers)
        return step

    def _fall_back(self) -> TorchAttention:
        """The torch backend; its step begins with the first layer that needs it."""
        if not self._fell_back:
            assert self._plan is not None
            self._torch.begin_step(self._plan)
            self._fell_back = True
        return self._torch

    def _step_for(self, window: int | None) -> NativeStep:
        """The step's segments; layers whose window hides any token share nothing."""
        plan = self._plan
        assert plan is not None
        shared = self._shared
        if shared is not None and (window is None or window >= self._longest):
            return shared
        if self._plain is None:
            self._plain = self._next_step(plan, None, self._kv_splits(plan))
        return self._plain

    def _next_step(self, plan: StepPlan, shared: SharedPlan | None, kv_splits: int) -> NativeStep:
        """The previous step's struct if this step only continues its decoding, else a new one."""
        before = self._before.get(shared is not None)
        if before is not None and before.take(plan, self._tables, shared, kv_splits):
            return before
        step = NativeStep(plan, self._tables, self._memory.block_size, shared, kv_splits)
        self._before[shared is not None] = step
        return step

    def _kv_splits(self, plan: StepPlan) -> int:
        """The number of splits of a decoding span's keys: one per thread."""
        work = len(plan.decoding) * self._memory.layouts[0].kv_heads
        return max(1, torch.get_num_threads() // work) if work else 1

    def _room(self, shared: bool, numbers: int) -> int:
        """The address of a buffer of `numbers` float32, kept for the next layers and steps.

        Each kind of step has its own buffer, as one compiled call may run layers of both.
        """
        if len(self._partials[shared]) < numbers:
            self._partials[shared] = torch.empty(numbers)
        return self._partials[shared].data_ptr()


def _covered(memory: PagedKVMemory, layout: LayerLayout) -> bool:
    """True if the kernel supports this layer; in bf16 it multiplies keys two dims at a time."""
    fewest = min(layout.kv_heads, layout.key_dim, layout.value_dim)
    most = max(layout.key_dim, layout.value_dim)
    odd = memory.dtype == torch.bfloat16 and layout.key_dim % 2 == 1
    return not odd and fewest > 0 and most <= _MAX_DIM


def _make_call(memory: PagedKVMemory, layer: int) -> AttentionCall | None:
    """The fields that are the same in every call of a layer; None if torch computes the layer."""
    layout = memory.layouts[layer]
    if not _covered(memory, layout):
        return None
    scales = memory.has_scales
    return AttentionCall(
        keys=memory.keys[layer].data_ptr(),
        values=memory.values[layer].data_ptr(),
        key_scales=memory.key_scales[layer].data_ptr() if scales else None,
        value_scales=memory.value_scales[layer].data_ptr() if scales else None,
        kv_heads=layout.kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
    )


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with the elements of a head contiguous, as the kernel reads them."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def make_backend(memory: PagedKVMemory, *, share: bool = True) -> AttentionBackend:
    """The fastest backend for `memory`: compiled kernels if they support it, else torch's.

    With `share`, decoding rows attend once to the prefix that their sequences share.
    """
    if NativeAttention.serves(memory):
        library = NativeAttention.library(memory)
        if library is not None:
            return NativeAttention(memory, library, share=share)
        native.advise()
    return TorchAttention(memory, share=share)


def name_backend(memory: PagedKVMemory) -> str:
    """Which backend `make_backend` gives for `memory`."""
    is_native = NativeAttention.serves(memory) and NativeAttention.library(memory) is not None
    return (NativeAttention if is_native else TorchAttention).__name__
