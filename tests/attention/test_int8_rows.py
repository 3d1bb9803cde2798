"""Rows in 8 bits: their error, values that are not finite, and equal bits from every backend."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from headstart.attention import LayerLayout, NativeAttention, PagedKVMemory, Span, StepPlan
from headstart.attention.backend import AttentionOptions
from headstart.attention.memory import quantize_rows, scale_rows
from tests.attention.rows import kernels

LARGEST = torch.finfo(torch.float32).max
TINY = float(torch.finfo(torch.float32).tiny)
ANY = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rows(
    elements: st.SearchStrategy[float], widths: tuple[int, int] = (1, 21)
) -> st.SearchStrategy:
    """Draw rows `[tokens, 2, width]`, with widths that fill vectors of 8 and widths that do not."""
    shapes = st.tuples(st.integers(1, 4), st.just(2), st.integers(*widths))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=elements))


@given(numbers=rows(FINITE))
def test_every_element_is_off_by_half_a_step_at_most(numbers: np.ndarray) -> None:
    codes, scales = quantize_rows(torch.from_numpy(numbers))
    exact, most = numbers.astype(np.float64), np.abs(numbers).max(-1).astype(np.float64)
    unpacked = codes.double().numpy() * scales.double().numpy()[..., None]
    assert codes.abs().max() <= 127
    for step, largest, off in zip(
        scales.double().numpy().flat,
        most.flat,
        np.abs(unpacked - exact).max(-1).flat,
        strict=True,
    ):
        if largest / 127 < TINY * (1 - 1e-6):
            assert step == 0 and off == largest < 1.5e-36
        else:
            assert step == pytest.approx(largest / 127, rel=1e-6)
            assert off <= step / 2 * (1 + 1e-4)  # 127 steps of a rounded scale


@given(numbers=rows(ANY))
def test_only_a_head_that_is_not_finite_is_nan(numbers: np.ndarray) -> None:
    codes, scales = quantize_rows(torch.from_numpy(numbers))
    unpacked = scale_rows(codes.flatten(0, 1), scales.flatten(), torch.float32)
    for head, head_out in zip(numbers.reshape(-1, numbers.shape[-1]), unpacked, strict=True):
        if np.isfinite(head).all():
            assert head_out.isfinite().all()
        else:
            assert head_out.isnan().all()


@given(numbers=rows(ANY), other=rows(ANY))
def test_a_row_depends_on_itself_alone(numbers: np.ndarray, other: np.ndarray) -> None:
    mine = torch.from_numpy(numbers)
    others = torch.from_numpy(np.resize(other, (3, *numbers.shape[1:])))
    alone = quantize_rows(mine)
    together = quantize_rows(torch.cat([others, mine, others]))
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one.view(torch.int8), many[3:-3].contiguous().view(torch.int8))


def write(memory: PagedKVMemory, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return a memory's contents after compiled attention has written to it."""
    tokens = len(key)
    backend = NativeAttention(memory, kernels(torch.int8))
    backend.begin_step(StepPlan(torch.arange(tokens), (Span(0, tokens, tokens, [0, 1]),)))
    query = torch.zeros(tokens, key.shape[1], key.shape[2])
    backend.attend(0, query, key, value, AttentionOptions(1.0))
    backend.end_step()
    return [memory.keys[0], memory.values[0], memory.key_scales[0], memory.value_scales[0]]


@settings(max_examples=200)
@given(key=rows(ANY), value=rows(ANY))
def test_compiled_code_writes_the_same_bits(key: np.ndarray, value: np.ndarray) -> None:
    """Blocks of one backend are equal to those that another would have written."""
    k, v = torch.from_numpy(key), torch.from_numpy(np.resize(value, (len(key), *value.shape[1:])))
    layout = LayerLayout(2, k.shape[2], v.shape[2])
    memories = [PagedKVMemory([layout], 2, 4, torch.int8, "cpu") for _ in range(2)]
    compiled = write(memories[0], k, v)
    memories[1].write(0, torch.arange(len(k)), k, v)
    expected = [
        *(memories[1].keys[0], memories[1].values[0]),
        *(memories[1].key_scales[0], memories[1].value_scales[0]),
    ]
    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "largest", [0.0, 1e-45, 127 * TINY * 0.999, 127 * TINY * 1.001, 3.4e38, LARGEST]
)
def test_the_ends_of_the_range(largest: float) -> None:
    row = torch.tensor([[[largest, -largest / 2, 0.0]] * 2])
    codes, scales = quantize_rows(row)
    if largest < 127 * TINY:
        assert not codes.any() and not scales.any()
    else:
        assert codes[0, 0].tolist() in ([127, -64, 0], [127, -63, 0])
        assert math.isclose(float(scales[0, 0]), largest / 127, rel_tol=1e-6)
    assert scale_rows(codes[0], scales[0], torch.float32).isfinite().all()
    memory = PagedKVMemory([LayerLayout(2, 3, 3)], 2, 4, torch.int8, "cpu")
    native = write(memory, row, row)
    assert torch.equal(native[0][:1], codes) and torch.equal(native[2][:1], scales)
