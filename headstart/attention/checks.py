"""Checks before a compiled kernel is called; the kernel reads by address and checks nothing."""

import torch
from torch import Tensor

from headstart.attention.backend import RowShapes
from headstart.attention.layout import LayerLayout, StepPlan
from headstart.attention.memory import PagedKVMemory
from headstart.errors import ConfigError, EngineError

__all__ = ["check_memory", "check_plan", "check_rows", "check_sinks", "fits_memory", "row_shapes"]


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
