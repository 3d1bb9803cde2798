"""The arithmetic of compiled products of bytes, as `native/narrow/integers.h` documents it."""

from typing import Any

import torch
from torch import Tensor, nn

from headstart.weights.format import Linear, WeightFormat
from headstart.weights.grouped import GROUP, GroupedWeight

__all__ = [
    "apart_in_most_rows",
    "check_rows_that_are_not_finite",
    "round_groups",
    "round_inputs",
    "round_rows",
]

# A number over a tensor is a product with its reciprocal: two roundings.
TOP, TINY = torch.tensor(127.0), 1e-30


def round_groups(rows: Tensor) -> Tensor:
    """Round finite rows to 8 bits in groups of 32 inputs; float64."""
    groups = nn.functional.pad(rows.float(), (0, -rows.shape[-1] % GROUP)).unflatten(
        -1, (-1, GROUP)
    )
    largest = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * torch.where(largest > TINY, TOP / largest, 0.0)).round()
    return (numbers.double() * (largest / TOP)).flatten(-2)[..., : rows.shape[-1]]


def round_rows(layer: WeightFormat, rows: Tensor) -> Tensor:
    """Round finite rows as a compiled product does; float64."""
    columns = layer.columns if isinstance(layer, GroupedWeight) else None
    columns = torch.ones(rows.shape[-1]) if columns is None else columns
    return round_groups(rows.float() * columns) / columns.double()


def round_inputs(plain: nn.Module, quantized: nn.Module) -> None:
    """Make a float model round its rows as layers with a compiled product do."""
    for name, layer in quantized.named_modules():
        if isinstance(layer, Linear) and layer.matrix.rounds_rows:
            module = plain.get_submodule(name)
            assert isinstance(module, nn.Linear)
            _add_what_rounding_loses(module, layer.matrix)


def _add_what_rounding_loses(module: nn.Linear, layer: WeightFormat) -> None:
    def add(module: nn.Linear, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        # Added to the output, so that an adapter's part of it takes the rows as they are.
        rows = inputs[0]
        lost = round_rows(layer, rows) - rows.double()
        return output + (lost @ module.weight.double().T).to(output.dtype)

    module.register_forward_hook(add)


def check_rows_that_are_not_finite(layer: WeightFormat, rows: Tensor) -> None:
    """Put NaN and infinities into three rows; only their results may change."""
    expected, others = layer.multiply(rows), [0, *range(4, len(rows))]
    rows[1, 3], rows[2, 5], rows[3, 0] = float("nan"), float("inf"), -float("inf")
    result = layer.multiply(rows)
    assert not result[1:4].isfinite().any()
    assert torch.equal(result[others], expected[others])


def apart_in_most_rows(actual: Tensor, expected: Tensor) -> float:
    """Return the relative distance that at least three quarters of the rows have.

    Rounding may differ by 1/127 of an input for near ties in one layer, and then for a few more
    rows in the next. In a wrong layer, all rows are wrong.
    """
    distances = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(distances.quantile(0.25))
