"""Attention written out in float64, and random sequences to test a backend with."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart import native
from headstart.attention import (
    AttentionBackend,
    AttentionOptions,
    LayerLayout,
    NativeAttention,
    PagedKVMemory,
    Span,
    StepPlan,
    TorchAttention,
)
from headstart.attention.memory import quantize_rows

BLOCK = 4
# The kernels by the dtype of K and V; None where this CPU cannot run them.
LIBRARIES: dict[torch.dtype, ctypes.CDLL | None] = {
    torch.bfloat16: native.library(),
    torch.float32: native.avx2_library(),
    torch.int8: native.avx2_library(),
}
each_kernel = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype,
            id=str(dtype),
            marks=pytest.mark.skipif(library is None, reason="no compiled kernels for it here"),
        )
        for dtype, library in LIBRARIES.items()
    ],
)
# The same, and in bfloat16 with AMX and without; for tests with the fixture `bf16_products`.
each_product = pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [
        pytest.param(
            dtype,
            with_amx,
            id=f"{dtype}{name}",
            marks=pytest.mark.skipif(
                LIBRARIES[dtype] is None, reason="no compiled kernels for it here"
            ),
        )
        for dtype, with_amx, name in (
            (torch.bfloat16, True, "-amx"),
            (torch.bfloat16, False, "-avx512"),
            (torch.float32, None, ""),
            (torch.int8, None, ""),
        )
    ],
    indirect=["bf16_products"],
)
# Every attention path, and the dtype in which it stores K and V.
PATHS = {
    "torch fp32": torch.float32,
    "torch fp16": torch.float16,
    "torch bf16": torch.bfloat16,
    "torch int8": torch.int8,
    "native fp32": torch.float32,
    "native bf16 amx": torch.bfloat16,
    "native bf16 avx512": torch.bfloat16,
    "native int8": torch.int8,
}
# Relative to a value, and absolute: outputs are means of values that are around 1.
TOLERANCE = {
    torch.float32: (2e-5, 2e-6),
    torch.float16: (0.005, 0.0025),
    torch.bfloat16: (0.04, 0.02),
}
NONFINITE = torch.tensor([float("nan"), float("inf"), -float("inf")])
OPTIONS = {
    "plain": AttentionOptions(scaling=0.3),
    "window": AttentionOptions(scaling=0.3, sliding_window=5),
    "window of one": AttentionOptions(scaling=0.3, sliding_window=1),
    "softcap": AttentionOptions(scaling=0.9, softcap=1.5),
    "sinks": AttentionOptions(scaling=0.3, sinks=torch.tensor([-1.0, 0.0, 2.0, 0.5, 9.0, 1.0])),
    "all": AttentionOptions(0.9, 7, 2.0, torch.tensor([-1.0, 0.0, 2.0, 0.5, 9.0, 1.0])),
}


def reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with rows `q` `[rows, heads, dim]` at the end of a context of `k`, `v`.

    `k` and `v` have the shape `[context, kv_heads, dim]`.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(rows.double().repeat_interleave(group, 1) for rows in (k, v))
    keys = torch.arange(len(k))
    positions = keys[len(k) - len(q) :].unsqueeze(1)
    hidden = keys > positions
    if options.sliding_window is not None:
        hidden |= keys <= positions - options.sliding_window
    scores = torch.einsum("rhd,khd->hrk", q, k) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    weights = scores.exp().masked_fill(hidden, 0)
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total += options.sinks[: q.shape[1]].double().exp().view(-1, 1, 1)
    return torch.einsum("hrk,khd->rhd", weights / total, v)


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a layer's rows whose K and V are stored in `dtype`."""
    return torch.float32 if dtype == torch.int8 else dtype


def as_stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round K or V `[tokens, heads, width]` as a memory of this dtype does, to `row_dtype`."""
    if dtype != torch.int8:
        return rows.to(dtype)
    codes, scales = quantize_rows(rows)
    return (codes.double() * scales.double().unsqueeze(-1)).float()


def kernels(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the library with the kernel for K and V of this dtype; skip the test without it."""
    library = LIBRARIES[dtype]
    if library is None:
        pytest.skip("no compiled kernels for it here")
    return library


def each_path(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test, which takes `path`, for each of `PATHS`."""
    with_amx = {"native bf16 amx": True, "native bf16 avx512": False}
    values = [pytest.param(path, with_amx.get(path), id=path) for path in PATHS]
    names = ("path", "bf16_products")
    parametrized = pytest.mark.parametrize(names, values, indirect=["bf16_products"])(test)
    marked: Callable[..., None] = pytest.mark.usefixtures("bf16_products")(parametrized)
    return marked


def make_backend(path: str, memory: PagedKVMemory, share: bool = True) -> AttentionBackend:
    """Return the backend of one of `PATHS`; skip the test where there is none."""
    if path.startswith("native"):
        return NativeAttention(memory, kernels(memory.dtype), share=share)
    return TorchAttention(memory, share=share)


def spoil(memory: PagedKVMemory) -> None:
    """Fill a memory with NaN and infinity."""
    slots = torch.arange(memory.scratch_slot + 1)
    odd = NONFINITE.to(row_dtype(memory.dtype))[slots % 3].view(-1, 1, 1)
    for layer, layout in enumerate(memory.layouts):
        key, value = (
            odd.expand(-1, layout.kv_heads, width).contiguous()
            for width in (layout.key_dim, layout.value_dim)
        )
        memory.write(layer, slots, key, value)


def plan_of(counts: list[int], contexts: list[int], blocks: list[int]) -> StepPlan:
    """Plan the last `counts` tokens of sequences, which have four blocks each."""
    slots: list[int] = []
    spans = []
    for at, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        table = blocks[4 * at : 4 * at + 4]
        spans.append(Span(len(slots), count, context, table))
        places = range(context - count, context)
        slots += [table[place // BLOCK] * BLOCK + place % BLOCK for place in places]
    return StepPlan(torch.tensor(slots), tuple(spans))


class Sequence:
    """Random queries, keys and values of a sequence, and its blocks."""

    def __init__(self, length: int, layout: LayerLayout, heads: int, blocks: list[int]) -> None:
        self.q = torch.randn(length, heads, layout.key_dim)
        self.k = torch.randn(length, layout.kv_heads, layout.key_dim)
        self.v = torch.randn(length, layout.kv_heads, layout.value_dim)
        self.blocks = blocks
        self.done = 0

    def to(self, dtype: torch.dtype) -> "Sequence":
        """Round the sequence as a memory of this dtype rounds it."""
        self.q = self.q.to(row_dtype(dtype))
        self.k, self.v = as_stored(self.k, dtype), as_stored(self.v, dtype)
        return self

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]


def run_step(
    backend: AttentionBackend,
    work: list[tuple[Sequence, int]],
    options: AttentionOptions,
    contiguous_gather: bool = False,
) -> list[Tensor]:
    """Compute the next rows of each sequence in one flat batch; return each sequence's output."""
    spans, slots, parts = [], [], []
    for sequence, count in work:
        start, end = sequence.done, sequence.done + count
        spans.append(Span(len(slots), count, end, tuple(sequence.blocks)))
        slots += sequence.slots(start, end)
        parts.append(slice(start, end))
        sequence.done = end
    backend.begin_step(StepPlan(torch.tensor(slots), tuple(spans), contiguous_gather))
    pairs = list(zip(work, parts, strict=True))
    q, k, v = (
        torch.cat([getattr(sequence, name)[part] for (sequence, _), part in pairs])
        for name in "qkv"
    )
    out = backend.attend(0, q, k, v, options)
    backend.end_step()
    return list(out.split([count for _, count in work]))


def check(sequence: Sequence, out: Tensor, options: AttentionOptions) -> None:
    """Compare `out`, the rows of the last step, with the reference."""
    end = sequence.done
    expected = reference(
        sequence.q[end - len(out) : end], sequence.k[:end], sequence.v[:end], options
    )
    rtol, atol = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
