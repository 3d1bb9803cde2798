"""int8 weights compared with the product in float64, and single rows with batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.native import AMX, library
from headstart.weights import int8, products
from headstart.weights.format import Embedding, WeightFormat
from headstart.weights.int8 import Int8Values, Int8Weight, quantize_int8
from headstart.weights.products import has_fbgemm
from headstart.weights.quantize import quantize
from tests.native.byte_products import BYTE_PRODUCTS, use_byte_product
from tests.native.foreign_rows import among_nonfinite
from tests.rounded_rows import check_rows_that_are_not_finite, round_groups

SHAPES = [(1, 1), (7, 3), (64, 48), (131, 95), (300, 896), (2100, 512)]
COUNTS = [1, 2, 5, 16, 128, 129, 200]
PATHS = pytest.mark.parametrize("path", ["bfloat16", *BYTE_PRODUCTS, "fbgemm", "tiles"])
COMPILED = pytest.mark.parametrize("path", ["bfloat16", *BYTE_PRODUCTS])

pytestmark = pytest.mark.usefixtures("own_byte_product")


def make_weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Outputs of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= torch.logspace(-3, 3, outputs).unsqueeze(1)
    weight[outputs // 2] = 0
    return weight


def make_rows(count: int, inputs: int) -> Tensor:
    """Return rows of very different sizes, each with one much larger element, as in decoders."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    rows[:, inputs // 3] *= 50
    return rows * torch.logspace(-4, 4, count).unsqueeze(1)


def take_path(path: str, patch: pytest.MonkeyPatch) -> None:
    if path == "bfloat16" and library() is None:
        pytest.skip("no products of bfloat16 here")  # without AMX the same weight is multiplied
    patch.setattr(products, "level", lambda: AMX if path == "bfloat16" else AMX - 1)
    if path in BYTE_PRODUCTS:
        use_byte_product(path)
    elif path != "bfloat16":
        patch.setattr(products, "avx2_library", lambda: None)
    if path == "tiles":
        patch.setattr(products, "has_fbgemm", lambda: False)
    elif path == "fbgemm" and not has_fbgemm():
        pytest.skip("this torch has no FBGEMM")


def own_dtype(path: str) -> torch.dtype:
    """Return the dtype of a path's rows."""
    return torch.bfloat16 if path == "bfloat16" else torch.float32


def make_layer(
    weight: Tensor, bias: Tensor | None, path: str, patch: pytest.MonkeyPatch
) -> WeightFormat:
    take_path(path, patch)
    layer = quantize(weight, bias, "int8", own_dtype(path))
    assert (layer.struct(torch.bfloat16) is not None) == (path == "bfloat16")
    assert isinstance(layer, WeightFormat)
    return layer


def assert_near(actual: Tensor, rows: Tensor, weight: Tensor, path: str) -> None:
    """Check the result of a product with rows rounded to 8 or 14 bits.

    FBGEMM's rows have 14 bits of their largest; those of products of bytes are `round_groups`'s.
    Sums in float32 may add their own error. Results in bfloat16 are rounded once more; as inputs
    such rows are not.
    """
    size = rows.double().abs() @ weight.double().abs().T
    taken = round_groups(rows) if path in BYTE_PRODUCTS else rows.double()
    expected = taken @ weight.double().T
    limit = 1e-6 * size
    if path == "fbgemm":
        step = rows.double().abs().amax(1, keepdim=True) / (2 * 63 * 126)
        limit = limit + step * weight.double().abs().sum(1)
    if actual.dtype == torch.bfloat16:
        limit = limit + 2**-8 * expected.abs()
    assert ((actual.double() - expected).abs() <= 1.001 * limit + 1e-40).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_weight_is_the_nearest_in_8_bits(outputs: int, inputs: int) -> None:
    weight = make_weight(outputs, inputs)
    quantized = quantize_int8(weight)
    half = weight.abs().amax(1, keepdim=True) / 127 / 2
    assert ((quantized.unpack() - weight).abs() <= half * 1.001).all()
    assert quantized.values.abs().max() <= 127


@pytest.mark.parametrize("path", ["avx2", "tiles"])
def test_a_weight_that_is_quantized_tile_by_tile_is_the_same(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles consist of whole panels for any number of outputs."""
    take_path(path, monkeypatch)
    weight = make_weight(131, 95)
    whole = quantize_int8(weight)
    monkeypatch.setattr(int8, "tile_outputs", lambda inputs: 20)
    quantized = quantize_int8(weight)
    assert torch.equal(quantized.values, whole.values) and torch.equal(
        quantized.scales, whole.scales
    )


@PATHS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(
    outputs: int, inputs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(outputs, inputs), None, path, monkeypatch)
    for count in COUNTS:
        rows = make_rows(count, inputs).to(own_dtype(path))
        assert_near(layer.multiply(rows), rows, layer.unpack(), path)


@pytest.mark.parametrize("path", BYTE_PRODUCTS)
def test_rounding_is_the_step_of_a_row(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check distinguishes models that run in transformers from models that paged K/V change."""
    layer = make_layer(torch.eye(64), None, path, monkeypatch)
    rows = torch.rand(20, 64, generator=torch.Generator().manual_seed(0))
    rows[:, ::32] = 1
    lost = float((layer.multiply(rows) - rows).abs().max())
    assert 0.45 * layer.rounding < lost < 0.501 * layer.rounding


@PATHS
@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 90) | st.sampled_from([896, 1000, 4864]),
    count=st.integers(0, 40),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    path: str, outputs: int, inputs: int, count: int, threads: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        weight = make_weight(outputs, inputs, seed)
        layer = make_layer(weight, None, path, patch)
        assert torch.equal(layer.unpack(), quantize_int8(weight).unpack())
        rows = among_nonfinite(make_rows(count, inputs).to(own_dtype(path)))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert_near(layer.multiply(rows), rows, layer.unpack(), path)
        finally:
            torch.set_num_threads(before)


@COMPILED
@pytest.mark.parametrize("inputs", [4864, 20000])
def test_sums_of_long_rows_do_not_overflow(
    inputs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights and inputs are the largest."""
    layer = make_layer(torch.ones(5, inputs), None, path, monkeypatch)
    expected = torch.full((3, 5), 7.0 * inputs)
    dtype = own_dtype(path)
    expected = expected.to(dtype)
    torch.testing.assert_close(layer.multiply(torch.full((3, inputs), 7.0, dtype=dtype)), expected)
    lowest = torch.full((5, inputs), -128, dtype=torch.int8)
    layer = Int8Weight(Int8Values(lowest, torch.full((5,), 1 / 128)), rows=dtype)
    torch.testing.assert_close(layer.multiply(torch.full((3, inputs), -7.0, dtype=dtype)), expected)


@PATHS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_checkpoints_may_have_128_steps_down(
    outputs: int, inputs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: -128, which torchao and llm-compressor write, was read as -127."""
    take_path(path, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator).char()
    values[0] = -128
    weight = Int8Values(values, torch.logspace(-3, 3, outputs))
    layer = Int8Weight(weight, rows=own_dtype(path))
    assert torch.equal(layer.unpack(), weight.unpack())
    rows = make_rows(33, inputs).to(own_dtype(path))
    rows[0], rows[1] = 7.0, -7.0
    assert_near(layer.multiply(rows), rows, weight.unpack(), path)


@COMPILED
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_rows_and_threads(
    threads: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(67, 101), None, path, monkeypatch)
    rows = make_rows(67, 101).to(own_dtype(path))
    alone = torch.cat([layer.multiply(row) for row in rows.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (*range(1, 21), 65, 67):  # two threads: blocks of odd numbers of rows
            assert torch.equal(layer.multiply(rows[:count]), alone[:count])
    finally:
        torch.set_num_threads(before)


@PATHS
def test_the_unpacked_weight_is_the_quantized_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = make_weight(131, 95)
    assert torch.equal(
        make_layer(weight, None, path, monkeypatch).unpack(), quantize_int8(weight).unpack()
    )


@pytest.mark.parametrize("number", [-1, 7])
def test_rows_that_a_weight_does_not_have_are_refused(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its panels have 16 rows; the padding is not a row."""
    layer = make_layer(make_weight(7, 3), None, "avx2", monkeypatch)
    assert layer.rows(torch.tensor([6, 0])).shape == (2, 3)
    with pytest.raises(IndexError, match="are requested; allowed: 0 to 6"):
        layer.rows(torch.tensor([0, number]))


@PATHS
def test_a_layer_has_its_values_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(make_weight(64, 96), None, path, monkeypatch)
    assert isinstance(layer, Int8Weight)
    if path in BYTE_PRODUCTS:
        assert layer.product is not None and layer.values is None
    else:
        assert (layer.product is not None) == (path == "bfloat16")
        assert (layer.values is not None) == (path == "tiles")


@PATHS
def test_an_embedding_reads_its_rows_where_the_head_has_them(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_path(path, monkeypatch)
    weight = Int8Values((torch.arange(40 * 33) * 37).view(40, 33).char(), torch.rand(40))
    head = Int8Weight(weight, rows=own_dtype(path), table=True)
    table, numbers = Embedding(head, torch.float32), torch.tensor([[39, 0], [16, 15]])
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert torch.equal(table(numbers.to(kind)), weight.unpack()[numbers])
    assert (head.values is None) == (path not in ("fbgemm", "tiles"))
    for outside in (-1, 40):
        with pytest.raises(IndexError, match="allowed: 0 to 39"):
            table(torch.tensor([0, outside]))
    rows = torch.ones(3, 33)
    assert torch.equal(head.multiply(rows), Int8Weight(weight, rows=own_dtype(path)).multiply(rows))


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_dtype_and_leading_axes(
    dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = make_weight(20, 48).clamp(-10, 10), torch.linspace(-5, 5, 20)
    layer = make_layer(weight.to(dtype), bias.to(dtype), path, monkeypatch)
    rows = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = layer.multiply(rows)
    assert out.shape == (2, 3, 20) and out.dtype == dtype
    if path == "bfloat16":  # rows and a bias of another dtype are rounded to it
        rows, bias = rows.bfloat16(), bias.bfloat16()
    taken = round_groups(rows) if path in BYTE_PRODUCTS else rows.double()
    expected = taken @ layer.unpack().double().T + bias.to(dtype).double()
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
    assert layer.multiply(rows[:, :0]).shape == (2, 0, 20)


@pytest.mark.parametrize(
    ("path", "count"), [("bfloat16", 1500), *((path, 300) for path in ("fbgemm", *BYTE_PRODUCTS))]
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    path: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(300, 896), None, path, monkeypatch)
    rows = make_rows(count, 896).to(own_dtype(path))
    together = layer.multiply(rows)
    for start, stop in [(0, 1), (5, 6), (count - 1, count), (3, 7), (0, 20), (count // 5, count)]:
        assert torch.equal(layer.multiply(rows[start:stop]), together[start:stop])


@pytest.mark.parametrize("inputs", [1, 33, 95, 896])
def test_tiny_numbers_count_equally_alone_and_in_a_batch(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX takes denormal numbers for zero, and one row is multiplied without it."""
    layer = make_layer(make_weight(70, inputs), None, "bfloat16", monkeypatch)
    rows = make_rows(40, inputs) * torch.logspace(-41, -33, 40).unsqueeze(1)
    rows = rows.bfloat16()
    alone = torch.cat([layer.multiply(row) for row in rows.split(1)])
    assert torch.equal(layer.multiply(rows).view(torch.int16), alone.view(torch.int16))


@pytest.mark.parametrize("path", BYTE_PRODUCTS[1:])
@pytest.mark.parametrize("inputs", [1, 95, 4864])
def test_all_cpus_give_the_same_bits(
    path: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(67, inputs), None, "avx2", monkeypatch)
    rows = make_rows(67, inputs)
    expected = layer.multiply(rows)
    use_byte_product(path)
    assert torch.equal(layer.multiply(rows), expected)


@PATHS
@pytest.mark.parametrize("count", [4, 150])
def test_rows_that_are_not_finite_affect_no_other_row(
    count: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(64, 48) + 0.1, None, path, monkeypatch)
    check_rows_that_are_not_finite(layer, make_rows(count, 48).to(own_dtype(path)))


@PATHS
def test_finite_rows_of_any_size_give_finite_rows(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(make_weight(64, 48).clamp(-1, 1), None, path, monkeypatch)
    rows = torch.stack([torch.zeros(48), torch.full((48,), 1e-42), torch.full((48,), 1e30)])
    rows = rows.to(own_dtype(path))
    out = layer.multiply(rows)
    assert out.isfinite().all() and (out[0] == 0).all()
    assert_near(out[2:], rows[2:], layer.unpack(), path)
