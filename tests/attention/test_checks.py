"""Arguments that compiled attention refuses before it reads an address, as its only guard."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.attention import (
    AttentionOptions,
    LayerLayout,
    NativeAttention,
    PagedKVMemory,
    Span,
    StepPlan,
    TorchAttention,
    make_backend,
)
from headstart.errors import EngineError
from tests.attention.rows import (
    LIBRARIES,
    TOLERANCE,
    as_stored,
    each_kernel,
    kernels,
    reference,
    row_dtype,
)

BF16 = torch.bfloat16
LAYOUT = LayerLayout(2, 16, 12)
PLAN = StepPlan(torch.arange(4), (Span(0, 3, 3, [0, 1]), Span(3, 1, 8, [1, 0])))
NUM_BLOCKS, BLOCK = 3, 4


def make(dtype: torch.dtype) -> NativeAttention:
    memory = PagedKVMemory([LAYOUT], NUM_BLOCKS, BLOCK, dtype, "cpu")
    return NativeAttention(memory, kernels(dtype))


def rows(tokens: int = 4, heads: int = 6, layout: LayerLayout = LAYOUT) -> list[Tensor]:
    widths = (heads, layout.key_dim), (layout.kv_heads, layout.key_dim)
    shapes = (*widths, (layout.kv_heads, layout.value_dim))
    return [torch.zeros(tokens, *shape) for shape in shapes]


def typed(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(row_dtype(dtype)) for tensor in tensors]


@pytest.mark.parametrize("dtype", LIBRARIES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 12, 24])
def test_block_sizes_of_any_kind_give_the_right_result(size: int, dtype: torch.dtype) -> None:
    """Regression: blocks of 24 went to the compiled kernel, which took them for blocks of 16."""
    torch.manual_seed(0)
    memory = PagedKVMemory([LAYOUT], 60, size, dtype, "cpu")
    backend = make_backend(memory)
    assert size in (1, 8) or isinstance(backend, TorchAttention)
    table = torch.randperm(60).tolist()[: -(-50 // size)]
    q, k, v = torch.randn(50, 6, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 12)
    q, k, v = q.to(row_dtype(dtype)), as_stored(k, dtype), as_stored(v, dtype)
    for start, end in ((0, 30), (30, 49), (49, 50)):
        slots = torch.tensor([table[p // size] * size + p % size for p in range(start, end)])
        backend.begin_step(StepPlan(slots, (Span(0, end - start, end, table),)))
        part = slice(start, end)
        out = backend.attend(0, q[part], k[part], v[part], AttentionOptions(0.3))
        backend.end_step()
        expected = reference(q[part], k[:end], v[:end], AttentionOptions(0.3))
        rtol, atol = TOLERANCE[q.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)


WRONG_PLANS: dict[str, dict[str, Any]] = {
    r"slots are 0 to 13; allowed: 0 to 12": {"slots": torch.tensor([0, 13, 1, 2])},
    r"slots are -1 to 2; allowed: 0 to 12": {"slots": torch.tensor([0, -1, 1, 2])},
    r"3 rows from row 2 on": {"spans": (Span(2, 3, 3, [0, 1]),)},
    r"1 rows from row -1 on": {"spans": (Span(-1, 1, 3, [0, 1]),)},
    r"0 rows from row 0 on": {"spans": (Span(0, 0, 3, [0, 1]),)},
    r"a context of 3 tokens, does not fit": {"spans": (Span(0, 4, 3, [0, 1]),)},
    r"a context of 9 .* block table for 8": {"spans": (Span(0, 4, 9, [0, 1]),)},
    r"a block table for 0": {"spans": (Span(0, 4, 4, []),)},
    r"ids from 0 to 3; allowed: 0 to 2": {"spans": (Span(0, 4, 8, [0, 3]),)},
    r"ids from -2 to 1; allowed: 0 to 2": {"spans": (Span(0, 4, 8, (1, -2)),)},
    r"to 4294967296; allowed: 0 to 2": {"spans": (Span(0, 4, 8, [1, 2**32]),)},
}


@each_kernel
@pytest.mark.parametrize("text", WRONG_PLANS)
def test_a_step_that_does_not_fit_the_memory_is_refused(text: str, dtype: torch.dtype) -> None:
    """The next step runs as if the refused one had not been called."""
    backend = make(dtype)
    with pytest.raises(EngineError, match=text):
        backend.begin_step(replace(PLAN, **WRONG_PLANS[text]))
    with pytest.raises(AssertionError, match="begin_step"):
        backend.attend(0, *typed(rows(), dtype), AttentionOptions(1.0))
    backend.begin_step(PLAN)
    assert not backend.attend(0, *typed(rows(), dtype), AttentionOptions(1.0)).any()


WRONG_ROWS = {
    "more rows than the step": rows(5),
    "fewer rows than the step": rows(3),
    "another width of keys": rows(layout=LayerLayout(2, 18, 12)),
    "another width of values": rows(layout=LayerLayout(2, 16, 14)),
    "other heads of keys": rows(layout=LayerLayout(3, 16, 12)),
    "query heads that are no multiple": rows(heads=5),
    "no query heads": rows(heads=0),
    "keys of fewer tokens": [rows()[0], *rows(3)[1:]],
    "values of fewer tokens": [*rows()[:2], rows(3)[2]],
    "values of fewer heads": [*rows()[:2], rows(layout=LayerLayout(1, 16, 12))[2]],
    "queries of two dims": [rows()[0].flatten(1), *rows()[1:]],
}


@each_kernel
@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_that_do_not_fit_the_step_are_refused(name: str, dtype: torch.dtype) -> None:
    backend = make(dtype)
    backend.begin_step(PLAN)
    with pytest.raises(EngineError, match=r"heads"):
        backend.attend(0, *typed(WRONG_ROWS[name], dtype), AttentionOptions(1.0))


@each_kernel
def test_sinks_have_one_value_for_each_query_head(dtype: torch.dtype) -> None:
    backend = make(dtype)
    backend.begin_step(PLAN)
    with pytest.raises(EngineError, match=r"queries \[4, 6, 16\].* and 5 sinks do not fit"):
        backend.attend(0, *typed(rows(), dtype), AttentionOptions(1.0, sinks=torch.zeros(5)))


def test_compiled_code_declares_its_rows() -> None:
    """Fused layers call the kernel directly, with rows that Python does not see."""
    backend = make(BF16)
    backend.begin_step(PLAN)
    assert backend.compiled(0, (4, 6), AttentionOptions(1.0), BF16) is not None
    for rows_and_heads in ((5, 6), (3, 6), (4, 3), (4, 0)):
        with pytest.raises(EngineError, match="allowed: 4 rows of a multiple of"):
            backend.compiled(0, rows_and_heads, AttentionOptions(1.0), BF16)


def test_compiled_code_of_layers_is_in_bf16() -> None:
    backend = make(torch.float32)
    backend.begin_step(PLAN)
    assert backend.compiled(0, (4, 6), AttentionOptions(1.0), BF16) is None
