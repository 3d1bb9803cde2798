"""Weights in groups compared with the product in float64, alone and in batches, in any shape."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.native import AMX, library
from headstart.weights import products
from headstart.weights.format import WeightFormat, WeightKind
from headstart.weights.grouped import (
    GROUP,
    GroupedValues,
    GroupedWeight,
    PackedForm,
    QuantizationGrid,
    pack_groups,
    quantize_groups,
)
from headstart.weights.int8 import Int8Weight
from headstart.weights.quantize import is_quantized_from, quantize
from tests.examples import at_least
from tests.native.byte_products import BYTE_PRODUCTS, use_byte_product
from tests.native.foreign_rows import among_nonfinite
from tests.rounded_rows import check_rows_that_are_not_finite, round_rows

SHAPES = [(1, 1), (7, 3), (64, 48), (131, 95), (300, 896), (2100, 512)]
COUNTS = [1, 2, 16, 65, 200]
FORMS = [
    PackedForm(4, False),
    PackedForm(4, True),
    PackedForm(5, False),
    PackedForm(5, True),
    PackedForm(8, False),
]
KINDS = pytest.mark.parametrize("kind", ["int4", "int5"])
PATHS = pytest.mark.parametrize("path", ["bfloat16", *BYTE_PRODUCTS, "tiles"])
COMPILED = pytest.mark.parametrize("path", ["bfloat16", *BYTE_PRODUCTS])

pytestmark = pytest.mark.usefixtures("own_byte_product")


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def draw_weight(
    outputs: int, inputs: int, seed: int, form: PackedForm
) -> tuple[GroupedValues, Tensor]:
    """Draw any values, steps and starts of a form.

    Outputs and inputs have common factors or not. The two parts of each output's weights may cancel
    out.
    """
    generator, groups = torch.Generator().manual_seed(seed), -(-inputs // GROUP)
    values = torch.randint(2**form.bits, (outputs, groups * GROUP), generator=generator)
    steps, starts = draw(outputs, groups, seed).half(), draw(outputs, groups, seed + 1).half()
    if form.in_bytes:
        steps, starts = steps.mul(40).abs().byte(), starts.mul(40).abs().byte()
    levels = max(form.zero, 2**form.bits - 1 - form.zero)
    size = levels * steps.double().abs() + abs(form.start_unit) * starts.double().abs()
    common = draw(outputs, 1, seed).exp().flatten(), draw(inputs, 1, seed).exp().flatten()
    grid = QuantizationGrid(values.byte(), steps, starts)
    weight = pack_groups(grid, form, *common) if seed % 2 else pack_groups(grid, form)
    return weight, size.amax(1)


def use(path: str, patch: pytest.MonkeyPatch) -> None:
    """Let layers multiply by one path; skip paths that this machine lacks."""
    if path == "bfloat16" and library() is None:
        pytest.skip("no compiled kernels for AVX-512 here")
    patch.setattr(products, "level", lambda: AMX if path == "bfloat16" else AMX - 1)
    if path in BYTE_PRODUCTS:
        use_byte_product(path)
    elif path == "tiles":
        patch.setattr(products, "avx2_library", lambda: None)


def own_dtype(path: str) -> torch.dtype:
    """Return the dtype of a path's rows; without AMX, too, their weight is then bfloat16."""
    return torch.bfloat16 if path == "bfloat16" else torch.float32


def make_layer(
    weight: Tensor,
    bias: Tensor | None,
    path: str,
    patch: pytest.MonkeyPatch,
    kind: WeightKind = "int5",
) -> WeightFormat:
    use(path, patch)
    layer = quantize(weight, bias, kind, own_dtype(path))
    assert isinstance(layer, GroupedWeight)
    assert (layer.struct(torch.bfloat16) is not None) == (path == "bfloat16")
    return layer


def limits(layer: GroupedWeight, rows: Tensor, path: str) -> Tensor:
    """Return the error bound of a product: half a step of each input, and of sums.

    With bfloat16 rows, also half a step of each weight and of the result.
    """
    weight = layer.unpack().double().abs()
    limit = 3e-6 * (rows.double().abs() @ weight.T)
    # A sum of values and one of starts are added: each may be larger than the sum of both.
    scales = layer.scales.double()
    columns = torch.ones(rows.shape[1]) if layer.columns is None else layer.columns
    size = (rows.double() * columns).abs().sum(1, keepdim=True)
    limit += 3e-6 * size * scales * (weight / (scales.unsqueeze(1) * columns)).amax(1)
    if path == "tiles":
        return limit + 1e-30
    if path == "bfloat16":
        limit += 2**-8 * (rows.double().abs() @ weight.T)
        return limit + 2**-8 * ((rows.double() @ layer.unpack().double().T).abs() + limit) + 1e-30
    scaled = torch.nn.functional.pad(rows.double() * columns, (0, -rows.shape[1] % GROUP))
    step = scaled.view(len(rows), -1, GROUP).abs().amax(-1) / 127
    steps = step.repeat_interleave(GROUP, dim=1)[:, : rows.shape[1]] / columns
    return limit + 0.501 * steps @ weight.T + 1e-30


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_error_of_a_weight_is_limited(outputs: int, inputs: int, bits: Literal[4, 5]) -> None:
    """It is half a step of its group's range, in units of its output and input."""
    weight = draw(outputs, inputs) * torch.logspace(-3, 3, inputs)
    weight *= torch.logspace(-9, 9, outputs).unsqueeze(1)
    grouped = GroupedWeight(quantize_groups(weight, bits))
    assert grouped.columns is not None
    common = weight.abs().amax(1, keepdim=True) * grouped.columns
    fill = torch.nn.functional.pad(weight / common, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    low, high = fill.amin(-1, keepdim=True), fill.amax(-1, keepdim=True)
    low, high = low.clamp_max(0), high.clamp_min(0)
    levels = 2**bits - 1
    # Steps and starts are 255th parts of the largest, and a start moves by half of one.
    largest = torch.maximum((high - low) / levels, -2 * low / (levels + 1)).amax(1, keepdim=True)
    units = largest / 255
    limit = (high - low) / levels / 2 + units * (levels + 1) * 0.8
    apart = torch.nn.functional.pad((grouped.unpack() - weight) / common, (0, -inputs % GROUP))
    size = apart.view_as(fill).square().mean(-1, keepdim=True).sqrt()
    assert (size <= limit + 1e-6).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_read_by_number(form: PackedForm) -> None:
    for seed in (0, 1):  # without common factors of outputs and inputs, and with them
        layer = GroupedWeight(draw_weight(37, 70, seed, form)[0])
        numbers = torch.tensor([[36, 0, 0], [15, 16, 31]])
        rows = layer.rows(numbers)
        assert rows.shape == (2, 3, layer.inputs) and torch.equal(rows, layer.unpack()[numbers])
        assert layer.rows(numbers[:, :0]).shape == (2, 0, layer.inputs)
        for outside in (-1, 37):
            with pytest.raises(IndexError, match="allowed: 0 to 36"):
                layer.rows(torch.tensor([outside]))


@PATHS
@pytest.mark.parametrize("form", FORMS)
def test_values_on_a_grid_are_stored_bit_for_bit(
    path: str, form: PackedForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, monkeypatch)
    if form.bits == 8 and path == "bfloat16":
        pytest.skip("8 bits in groups have no product of bfloat16")
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2**form.bits, (70, 96), generator=generator, dtype=torch.uint8)
    steps, starts = draw(70, 3).half(), draw(70, 3, 1).half()
    if form.in_bytes:
        steps, starts = steps.mul(40).abs().byte(), starts.mul(40).abs().byte()
    wide = [part.double().repeat_interleave(GROUP, dim=1) for part in (steps, starts)]
    unit = -(2 ** (form.bits - 1)) if form.in_bytes else 1
    expected = (values.double() - 128 * (form.bits == 8)) * wide[0] + unit * wide[1]
    layer = GroupedWeight(
        pack_groups(QuantizationGrid(values, steps, starts), form), rows=own_dtype(path)
    )
    torch.testing.assert_close(layer.unpack().double(), expected, rtol=1e-6, atol=1e-6)
    scales, columns = draw(70, 1).exp().flatten(), draw(90, 1, 2).exp().flatten()
    expected = expected[:, :90] * scales.double().unsqueeze(1) * columns.double()
    layer = GroupedWeight(
        pack_groups(QuantizationGrid(values, steps, starts), form, scales, columns),
        rows=own_dtype(path),
    )
    torch.testing.assert_close(layer.unpack().double(), expected, rtol=1e-5, atol=1e-4)
    rows = draw(5, 90, 3).to(own_dtype(path))
    apart = (layer.multiply(rows).double() - rows.double() @ expected.T).abs()
    assert (apart <= limits(layer, rows, path)).all()


@PATHS
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(
    outputs: int, inputs: int, path: str, kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(outputs, inputs), None, path, monkeypatch, kind)
    assert isinstance(layer, GroupedWeight)
    weight = layer.unpack().double()
    for count in COUNTS:
        rows = draw(count, inputs, 1) * torch.logspace(-4, 4, count).unsqueeze(1)
        rows = rows.to(own_dtype(path))
        apart = (layer.multiply(rows).double() - rows.double() @ weight.T).abs()
        assert (apart <= limits(layer, rows, path)).all()


@pytest.mark.parametrize("path", BYTE_PRODUCTS)
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_compiled_product_is_that_of_the_rounded_rows(
    outputs: int, inputs: int, path: str, kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(outputs, inputs), None, path, monkeypatch, kind)
    assert isinstance(layer, GroupedWeight)
    rows = draw(9, inputs, 1) * torch.logspace(-4, 4, 9).unsqueeze(1)
    apart = (
        layer.multiply(rows).double() - round_rows(layer, rows) @ layer.unpack().double().T
    ).abs()
    assert (apart <= 1.02 * limits(layer, rows, "tiles")).all()


@COMPILED
@at_least(100)
@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 130) | st.sampled_from([896, 1000]),
    count=st.integers(1, 20),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
    form=st.sampled_from(FORMS),
    is_rounded=st.booleans(),
)
def test_any_shape_and_form_on_any_number_of_threads(
    path: str,
    outputs: int,
    inputs: int,
    count: int,
    seed: int,
    threads: int,
    form: PackedForm,
    is_rounded: bool,
) -> None:
    """Weights are quantized here or as in a file; the memory around rows is not finite."""
    with pytest.MonkeyPatch.context() as patch:
        use(path, patch)
        dtype = torch.float32 if form.bits == 8 else own_dtype(path)
        taken = "avx2" if form.bits == 8 else path
        size = torch.zeros(outputs)
        if is_rounded and form.bits != 8:
            layer = GroupedWeight(
                quantize_groups(draw(outputs, inputs, seed), form.bits), None, dtype
            )
        else:
            weight, size = draw_weight(outputs, inputs, seed, form)
            layer = GroupedWeight(weight, None, dtype)
        assert (layer.struct(torch.bfloat16) is not None) == (taken == "bfloat16")
        rows = among_nonfinite(draw(count, layer.inputs, seed + 1).to(dtype))
        alone = torch.cat([layer.multiply(row) for row in rows.split(1)])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            together = layer.multiply(rows)
        finally:
            torch.set_num_threads(before)
    apart = (alone.double() - rows.double() @ layer.unpack().double().T).abs()
    columns = torch.ones(rows.shape[1]) if layer.columns is None else layer.columns
    summed = (rows.double() * columns).abs().sum(1, keepdim=True)
    parts = 3e-6 * summed * layer.scales.double() * size
    assert (apart <= limits(layer, rows, taken) + parts).all()
    assert torch.equal(together, alone)


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_dtype_and_leading_axes(
    dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = torch.linspace(-5, 5, 20)
    layer = make_layer(draw(20, 48).to(dtype), bias.to(dtype), path, monkeypatch)
    rows = draw(6, 48, 2).view(2, 3, 48).to(dtype)
    out = layer.multiply(rows)
    assert out.shape == (2, 3, 20) and out.dtype == dtype
    assert isinstance(layer, GroupedWeight)
    if path == "bfloat16":  # rows and a bias of another dtype are rounded to it
        rows, bias = rows.bfloat16(), bias.bfloat16()
    flat = rows.view(6, 48)
    limit = limits(layer, flat, path).view(2, 3, 20)
    expected = rows.double() @ layer.unpack().double().T + bias.to(dtype).double()
    # The bias is added in float32; then a result is rounded to its dtype.
    for step in (torch.finfo(torch.float32).eps, torch.finfo(rows.dtype).eps):
        limit += step / 2 * (expected.abs() + limit)
    assert ((out.double() - expected).abs() <= limit).all()
    assert layer.multiply(rows[:, :0]).shape == (2, 0, 20)


@COMPILED
@KINDS
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    path: str, kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(300, 896), None, path, monkeypatch, kind)
    rows = draw(130, 896, 1).to(own_dtype(path))
    together = layer.multiply(rows)
    for start, stop in [(0, 1), (5, 6), (47, 48), (3, 7), (0, 17), (20, 48), (60, 130)]:
        assert torch.equal(layer.multiply(rows[start:stop]), together[start:stop])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", BYTE_PRODUCTS[1:])
def test_all_cpus_give_the_same_bits(path: str, form: PackedForm) -> None:
    use_byte_product("avx2")
    rows = draw(9, 95, 1)
    layer = GroupedWeight(draw_weight(131, 95, 1, form)[0])
    expected = layer.multiply(rows)
    use_byte_product(path)
    assert torch.equal(layer.multiply(rows), expected)


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_the_largest_values_do_not_overflow(form: PackedForm) -> None:
    ones = torch.ones(20, 2, dtype=torch.uint8)
    for value in (0, 2**form.bits - 1):
        values = torch.full((20, 64), value, dtype=torch.uint8)
        layer = GroupedWeight(pack_groups(QuantizationGrid(values, ones, 0 * ones), form))
        expected = torch.full((5, 20), 64.0 * (value - form.zero))
        torch.testing.assert_close(layer.multiply(torch.ones(5, 64)), expected)
        torch.testing.assert_close(layer.multiply(-torch.ones(5, 64)), -expected)


@pytest.mark.usefixtures("amx_products")
def test_eight_bits_in_groups_take_rows_in_bfloat16() -> None:
    """With AMX, they use the product of rows in float32 too."""
    layer = GroupedWeight(draw_weight(40, 70, 1, FORMS[-1])[0], rows=torch.bfloat16)
    rows = draw(3, 70, 1).bfloat16()
    assert layer.struct(torch.bfloat16) is None and torch.equal(
        layer.multiply(rows), layer.multiply(rows.float()).bfloat16()
    )


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("form", [form for form in FORMS if not form.in_bytes])
def test_a_step_or_a_start_may_be_not_finite(form: PackedForm, number: float) -> None:
    for at in range(2):
        grid = [torch.ones(20, 64), torch.ones(20, 2), torch.ones(20, 2)]
        assert pack_groups(QuantizationGrid(grid[0].byte(), *grid[1:]), form).is_finite()
        grid[1 + at][17, 1] = number
        assert not pack_groups(QuantizationGrid(grid[0].byte(), *grid[1:]), form).is_finite()


def test_floats_are_rounded_to_eight_bits_without_groups() -> None:
    weight, bias = draw(20, 48), draw(20, 1).flatten()
    layer = quantize(weight, bias, "int8")
    assert isinstance(layer, Int8Weight) and is_quantized_from(layer, weight)
    assert layer.bias is not None and torch.equal(layer.bias, bias)


@PATHS
@pytest.mark.parametrize("count", [4, 100])
def test_rows_that_are_not_finite_affect_no_other_row(
    count: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(64, 48), None, path, monkeypatch)
    check_rows_that_are_not_finite(layer, draw(count, 48, 1).to(own_dtype(path)))


@PATHS
def test_constant_and_zero_groups_are_finite(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(64, 96)
    weight[0], weight[1], weight[2], weight[3], weight[:, 7] = 0, 0.7, 1e-38, 1e30, 0
    layer = make_layer(weight, None, path, monkeypatch)
    out = layer.multiply(torch.zeros(3, 96) + torch.tensor([[0.0], [1e-42], [1.0]]))
    assert out.isfinite().all() and (out[0] == 0).all() and (out[:, 0] == 0).all()
    near = layer.unpack()
    assert (near[:, 7].abs() <= 1e-14 * weight.abs().amax(1)).all()
    torch.testing.assert_close(near[1, :7], torch.full((7,), 0.7), rtol=0.2, atol=0)
    torch.testing.assert_close(near[3, :7], torch.full((7,), 1e30), rtol=0.2, atol=0)


@PATHS
def test_memory_beyond_the_rows_is_not_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory around the rows is NaN."""
    layer = make_layer(draw(5, 13), None, path, monkeypatch)
    room = torch.full((3 + 2 * 13 + 3,), float("nan"))
    room[3:-3] = draw(2, 13, 1).flatten()
    assert torch.equal(layer.multiply(room[3:-3].view(2, 13)), layer.multiply(draw(2, 13, 1)))
