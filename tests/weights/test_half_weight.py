"""Products of float32 rows with weights in bfloat16, against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.native import avx2_library
from headstart.weights import format as formats
from headstart.weights.bf16 import MANY_ROWS, Bf16Weight
from headstart.weights.format import Embedding, Linear
from tests.examples import at_least
from tests.native.foreign_rows import among_nonfinite

pytestmark = pytest.mark.skipif(avx2_library() is None, reason="no compiled kernels for AVX2 here")
CPU = torch.device("cpu")


def make(outputs: int, inputs: int, seed: int, bias: bool) -> Bf16Weight:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    weight = among_nonfinite(weight)
    return Bf16Weight(weight, torch.randn(outputs, generator=generator) if bias else None)


def exact(weight: Bf16Weight, x: Tensor) -> Tensor:
    product = x.double() @ weight.weight.double().t()
    return product if weight.bias is None else product + weight.bias.double()


@at_least(300)
@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 90) | st.sampled_from([896, 1000, 4864]),
    rows=st.integers(0, MANY_ROWS + 2),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_any_shape(
    outputs: int, inputs: int, rows: int, bias: bool, seed: int, threads: int
) -> None:
    weight = make(outputs, inputs, seed, bias)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed + 1))
    x = among_nonfinite(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = weight.multiply(x)
    finally:
        torch.set_num_threads(before)
    size = x.double().abs() @ weight.weight.double().abs().t() + 4  # of the sums' terms
    assert bool(((out - exact(weight, x)).abs() <= 1e-5 * size).all())


@pytest.mark.parametrize("inputs", [7, 48, 896])
def test_a_row_has_the_same_bits_alone_and_among_others(inputs: int) -> None:
    weight = make(131, inputs, 0, bias=True)
    x = torch.randn(MANY_ROWS - 1, inputs)
    for count in range(1, len(x) + 1):
        together = weight.multiply(x[:count])
        assert torch.equal(together[-1:], weight.multiply(x[count - 1 : count]))


def test_few_rows_alone_take_the_compiled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = make(5, 8, 0, bias=False), []
    compiled = weight.product.multiply

    def spy(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return compiled(rows)

    monkeypatch.setattr(weight.product, "multiply", spy)
    for rows in (0, 1, MANY_ROWS - 1, MANY_ROWS):
        assert weight.multiply(torch.ones(rows, 8)).shape == (rows, 5)
    assert seen == [1, MANY_ROWS - 1]


@pytest.mark.parametrize(("elements", "outputs"), [(1000, 10), (5000, 32), (1 << 21, 131)])
def test_many_rows_are_multiplied_tile_by_tile(
    elements: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_TILE", elements)
    assert min(131, formats.tile_outputs(96)) == outputs
    for bias in (False, True):
        weight = make(131, 96, 3, bias)
        x = torch.randn(MANY_ROWS, 96)
        torch.testing.assert_close(weight.multiply(x).double(), exact(weight, x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_memory_beyond_the_tensors_is_neither_read_nor_written(rows: int) -> None:
    """The memory around the tensors is NaN, and does not change."""
    room = torch.full((7 + 5 * 13 + 7,), float("nan")).bfloat16()
    room[7:-7] = torch.randn(65).bfloat16()
    weight = Bf16Weight(room[7:-7].view(5, 13))
    x = torch.full((3 + rows * 13 + 3,), float("nan"))
    x[3:-3] = torch.randn(rows * 13)
    out = weight.multiply(x[3:-3].view(rows, 13))
    torch.testing.assert_close(
        out.double(), exact(weight, x[3:-3].view(rows, 13)), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(value: float) -> None:
    weight = make(40, 50, 1, bias=False)
    x = torch.randn(6, 50)
    clean = weight.multiply(x)
    x[2, 49] = value
    out = weight.multiply(x)
    assert not torch.isfinite(out[2]).any()
    assert torch.equal(out[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


def test_modules() -> None:
    weight = make(20, 12, 2, bias=True)
    linear, embedding = Linear(weight), Embedding(weight, torch.float32)
    x = torch.randn(2, 3, 12)
    assert torch.equal(linear(x)[1, 2], weight.multiply(x[1, 2]))
    assert linear(x).shape == (2, 3, 20)
    assert torch.equal(embedding(torch.tensor([3, 19])), weight.weight[[3, 19]].float())


@pytest.mark.parametrize("x", [torch.zeros(2, 11), torch.zeros(2, 12, device="meta")])
def test_rows_that_do_not_fit(x: Tensor) -> None:
    with pytest.raises(ValueError, match="allowed: 12 in"):
        make(20, 12, 2, bias=False).multiply(x)
