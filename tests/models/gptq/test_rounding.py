"""GPTQ compared with plain rounding, on inputs that it has not seen."""

import pytest
import torch

from headstart.models.gptq import SCHEME, pack
from headstart.models.gptq_rounding import InputStatistics, round_weight
from headstart.weights.prequantized import Grouped

compressors = pytest.importorskip("compressed_tensors.compressors")
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402


def inputs_and_weight(inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, and rows whose inputs correlate in a few directions, as in models."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(inputs // 8, inputs, generator=generator)
    rows = torch.randn(1200, inputs // 8, generator=generator) @ mixed
    rows += 0.3 * torch.randn(1200, inputs, generator=generator)
    return rows, torch.randn(48, inputs, generator=generator)


@pytest.mark.parametrize("inputs", [64, 160, 288])
def test_outputs_lose_less_than_by_plain_rounding(inputs: int) -> None:
    rows, weight = inputs_and_weight(inputs)
    calibration, others = rows[:800], rows[800:]
    rounded = round_weight(
        weight, InputStatistics(calibration.T @ calibration / len(calibration)), torch.float16
    )
    # Uncorrelated inputs: no error can be compensated.
    plain = round_weight(weight, InputStatistics(torch.eye(inputs)), torch.float16)
    errors = [float((others @ (one.weight() - weight).T).norm()) for one in (rounded, plain)]
    assert errors[0] < 0.6 * errors[1]


def test_plain_rounding_is_to_the_nearest() -> None:
    """On a grid from the smallest to the largest no element is off by more than half a step."""
    _, weight = inputs_and_weight(64)
    rounded = round_weight(weight, InputStatistics(torch.eye(64)), torch.float16)
    off = (rounded.weight() - weight).abs() / rounded.steps[:, rounded.groups]
    assert float(off.median()) < 0.3 and float(off.max()) < 2  # a narrower grid cuts its ends
    assert rounded.values.max() <= 15


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    rows, weight = inputs_and_weight(64)
    rows[:, 5] = 0
    rounded = round_weight(weight, InputStatistics(rows.T @ rows / len(rows)), torch.bfloat16)
    assert torch.isfinite(rounded.weight()).all()
    assert torch.isfinite(
        round_weight(weight, InputStatistics(torch.zeros(64, 64)), torch.bfloat16).weight()
    ).all()


@pytest.mark.parametrize("outputs", [40, 44])
def test_the_library_unpacks_packed_weights(outputs: int) -> None:
    rows, weight = inputs_and_weight(64)
    rounded = round_weight(weight[:outputs], InputStatistics(rows.T @ rows), torch.float16)
    parts = {
        name.removeprefix("a."): part for name, part in pack("a", rounded, torch.float16).items()
    }
    scheme = QuantizationScheme(**SCHEME["config_groups"]["group_0"])
    unpack = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress
    parts["weight_scale"] = parts["weight_scale"].float()
    expected = unpack(dict(parts), scheme)["weight"]
    torch.testing.assert_close(rounded.weight(), expected, rtol=1e-6, atol=1e-6)


def test_parts_of_a_weight_are_its_rows() -> None:
    rows, weight = inputs_and_weight(64)
    rounded = round_weight(weight, InputStatistics(rows.T @ rows), torch.float16)
    parts = rounded.split([8, 40])
    assert all(isinstance(part, Grouped) for part in parts)
    assert torch.equal(torch.cat([part.weight() for part in parts]), rounded.weight())
