"""Packed weights give the right products, with the same bits for a row in any batch."""

import mmap
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from headstart.native import library
from headstart.weights.bf16 import PackedWeight, can_pack
from headstart.weights.format import Embedding, Linear
from headstart.weights.memory import map_pages
from tests.examples import at_least
from tests.native.foreign_rows import among_nonfinite

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no compiled kernels here"),
    pytest.mark.usefixtures("bf16_products"),
]

BF16 = torch.bfloat16
# Widths that differ from the kernels': pairs, panels of 32, 4 pairs, cut after 256 or 640.
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([128, 1279, 1280, 1281, 1288, 2600]))
ROWS = st.one_of(st.integers(1, 70), st.sampled_from([252, 253, 300, 520]))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture
def threads() -> int:
    """Return more threads than other tests of this folder use."""
    torch.set_num_threads(3)
    return 3


@at_least(80)
@given(ROWS, WIDTHS, WIDTHS, st.booleans(), st.integers(1, 3))
def test_products_are_those_of_float64(
    rows: int, inputs: int, outputs: int, bias: bool, threads: int
) -> None:
    weight, x = (
        among_nonfinite(noise(outputs, inputs)),
        among_nonfinite(noise(rows, inputs, seed=1)),
    )
    added = noise(outputs, seed=2) if bias else None
    torch.set_num_threads(threads)
    out = PackedWeight(weight, added).multiply(x)
    exact = linear(x.double(), weight.double(), None if added is None else added.double())
    size = linear(x.double().abs(), weight.double().abs())  # rounding grows with the summed numbers
    assert out.shape == (rows, outputs) and out.dtype == BF16
    assert bool(((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all())


@at_least(40)
@given(ROWS, WIDTHS, WIDTHS, st.integers(0, 2**20), st.integers(1, 3))
def test_a_row_has_the_same_bits_in_every_batch(
    rows: int, inputs: int, outputs: int, place: int, threads: int
) -> None:
    """Deterministic mode and exact hits depend on this."""
    packed, x = PackedWeight(noise(outputs, inputs)), noise(rows, inputs, seed=1)
    torch.set_num_threads(threads)
    together = packed.multiply(x)
    torch.set_num_threads(1)
    at = place % rows
    assert torch.equal(packed.multiply(x[at : at + 1])[0], together[at])
    assert torch.equal(packed.multiply(x[at:]), together[at:])


@at_least(40)
@given(WIDTHS, WIDTHS)
def test_the_weight_can_be_unpacked(outputs: int, inputs: int) -> None:
    weight = noise(outputs, inputs)
    packed = PackedWeight(weight)
    assert torch.equal(packed.unpack(), weight)
    numbers = torch.tensor([[outputs - 1, 0], [outputs // 2, 0]])
    assert torch.equal(packed.rows(numbers), nn.functional.embedding(numbers, weight))


@pytest.mark.usefixtures("threads")
def test_packing_and_reading_on_several_threads() -> None:
    weight = noise(1000, 77)
    assert torch.equal(PackedWeight(weight).unpack(), weight)


def test_modules_take_any_shape() -> None:
    weight = noise(40, 24)
    module, x = Linear(PackedWeight(weight, noise(40))), noise(2, 3, 24)
    assert module(x).shape == (2, 3, 40)
    assert module(x[:, :0]).shape == (2, 0, 40)
    assert torch.equal(module(x.transpose(0, 1)), module(x).transpose(0, 1))
    table = Embedding(PackedWeight(weight), BF16)
    assert table(torch.tensor([[[3]]])).shape == (1, 1, 1, 24)
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, 24)


def test_wrong_inputs_are_refused() -> None:
    packed = PackedWeight(noise(40, 24))
    with pytest.raises(
        ValueError, match=r"have 23 elements in .* allowed: 24 in torch\.bfloat16 on cpu"
    ):
        packed.multiply(noise(1, 23))
    with pytest.raises(ValueError, match="float32"):
        packed.multiply(noise(1, 24).float())
    with pytest.raises(ValueError, match="on meta"):
        packed.multiply(torch.empty(1, 24, dtype=BF16, device="meta"))
    for number in (-1, 40):
        with pytest.raises(IndexError, match="0 to 39"):
            packed.rows(torch.tensor([0, number]))


def test_rows_are_read_by_integers_of_any_width() -> None:
    """Regression: numbers of 32 bits were read as half as many of 64, beyond their end."""
    weight = noise(40, 24)
    numbers = torch.tensor([39, 0, 7], dtype=torch.int32)
    assert torch.equal(PackedWeight(weight).rows(numbers), weight[[39, 0, 7]])


def test_weights_that_cannot_be_packed() -> None:
    assert can_pack(noise(2, 3))
    assert not can_pack(noise(2, 3).float())
    assert not can_pack(noise(2, 3).half())
    assert not can_pack(noise(2, 3, 4))
    assert not can_pack(noise(0, 3))
    assert not can_pack(torch.empty(2, 3, dtype=BF16, device="meta"))


def test_pages_of_a_file_are_mapped_at_once() -> None:
    """Other memory, empty ranges and ranges between two pages do not change."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(256)) * 64)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        weight = torch.frombuffer(mapped, dtype=torch.uint8)[100:9000]
        other = noise(50, 3)
        before = other.clone()
        map_pages([weight, other, torch.empty(0)])
        assert weight.tolist() == [at % 256 for at in range(100, 9000)]
        assert torch.equal(other, before)
