"""int4 weights: against the product in float64, alone and in batches, in every shape."""

import pytest
import torch
from torch import Tensor

from headstart.models.linear import QuantizedLinear, make_linear
from headstart.models.linear import int4 as kinds
from headstart.models.linear.int4 import GROUP, Int4Linear, pack_int4, quantize_int4

SHAPES = [(1, 1), (7, 3), (64, 48), (131, 95), (300, 896), (2100, 512)]
COUNTS = [1, 2, 16, 48, 49, 200]
PATHS = pytest.mark.parametrize("path", ["kernel", "tiles"])


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def make_layer(
    weight: Tensor, bias: Tensor | None, path: str, patch: pytest.MonkeyPatch
) -> QuantizedLinear:
    if path == "tiles":
        patch.setattr(kinds, "_kernel_panel", lambda: None)
    elif kinds._kernel_panel() is None:
        pytest.skip("this torch has no such product")
    layer = make_linear(weight, bias, "int4")
    assert isinstance(layer, Int4Linear)
    return layer


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_weight_is_near_in_4_bits(outputs: int, inputs: int) -> None:
    """Within half a step of its group's grid, which is itself rounded to 8 bits."""
    weight = draw(outputs, inputs)
    found = Int4Linear(quantize_int4(weight)).unpack()
    fill = torch.nn.functional.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    low, high = fill.amin(-1, keepdim=True), fill.amax(-1, keepdim=True)
    limit = ((high - low) / 15 / 2 + 0.012 * torch.maximum(high.abs(), low.abs())).expand_as(fill)
    apart = (found - weight).abs()
    assert found.shape == weight.shape
    assert (apart <= limit.reshape(outputs, -1)[:, :inputs] + 1e-6).all()


@PATHS
def test_values_on_a_grid_are_kept_bit_for_bit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (70, 96), generator=generator, dtype=torch.uint8)
    scales, zeros = draw(70, 3).bfloat16(), draw(70, 3, 1).bfloat16()
    if path == "tiles":
        monkeypatch.setattr(kinds, "_kernel_panel", lambda: None)
    layer = Int4Linear(pack_int4(values, scales, zeros, 90))
    wide = [part.float().repeat_interleave(GROUP, dim=1) for part in (scales, zeros)]
    expected = (values.double() - 8) * wide[0].double() + wide[1].double()
    assert layer.unpack().shape == (70, 90)
    torch.testing.assert_close(layer.unpack().double(), expected[:, :90], rtol=1e-6, atol=1e-6)


@PATHS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(
    outputs: int, inputs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(outputs, inputs), None, path, monkeypatch)
    weight = layer.unpack().double()
    for count in COUNTS:
        rows = draw(count, inputs, 1) * torch.logspace(-4, 4, count).unsqueeze(1)
        found, expected = layer(rows), rows.double() @ weight.T
        few = path == "kernel" and count <= 48
        # Rows, the dequantised weight and the result, each rounded to 8 bits.
        limit = (3 * 2**-9 if few else 1e-6) * (rows.double().abs() @ weight.abs().T)
        assert ((found.double() - expected).abs() <= 1.01 * limit + 1e-30).all()


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_dtype_and_leading_axes(
    dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = torch.linspace(-5, 5, 20)
    layer = make_layer(draw(20, 48).to(dtype), bias.to(dtype), path, monkeypatch)
    rows = draw(6, 48, 2).view(2, 3, 48).to(dtype)
    found = layer(rows)
    assert found.shape == (2, 3, 20) and found.dtype == dtype
    expected = rows.double() @ layer.unpack().double().T + bias.to(dtype).double()
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.1)
    assert layer(rows[:, :0]).shape == (2, 0, 20)


def test_a_row_has_the_same_bits_alone_and_in_any_batch_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = make_layer(draw(300, 896), None, "kernel", monkeypatch)
    rows = draw(48, 896, 1)
    together = layer(rows)
    for start, stop in [(0, 1), (5, 6), (47, 48), (3, 7), (0, 17), (20, 48)]:
        assert torch.equal(layer(rows[start:stop]), together[start:stop])


@PATHS
@pytest.mark.parametrize("count", [4, 100])
def test_rows_that_are_not_finite_stay_so_and_disturb_no_other(
    count: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(draw(64, 48), None, path, monkeypatch)
    rows = draw(count, 48, 1)
    expected = layer(rows)
    rows[1, 3], rows[2, 5], rows[3, 0] = float("nan"), float("inf"), -float("inf")
    found = layer(rows)
    assert not found[1:4].isfinite().any()
    assert torch.equal(found[[0, *range(4, count)]], expected[[0, *range(4, count)]])


@PATHS
def test_constant_and_zero_groups_are_finite(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(64, 96)
    weight[0], weight[1, :32], weight[2], weight[3] = 0, 0.7, 1e-38, 1e30
    layer = make_layer(weight, None, path, monkeypatch)
    found = layer(torch.zeros(3, 96) + torch.tensor([[0.0], [1e-42], [1.0]]))
    assert found.isfinite().all() and (found[0] == 0).all() and (found[:, 0] == 0).all()
    torch.testing.assert_close(layer.unpack()[1, :32], torch.full((32,), 0.7), rtol=0.01, atol=0)
