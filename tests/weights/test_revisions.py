"""The bits of compiled products: K and V that were saved with other bits must not be hit."""

import hashlib
from typing import Literal

import pytest
import torch
from torch import Tensor

from headstart.native import avx2_library
from headstart.weights.format import REVISIONS, WeightFormat, WeightKind
from headstart.weights.grouped import (
    GROUP,
    GroupedWeight,
    PackedForm,
    QuantizationGrid,
    pack_groups,
)
from headstart.weights.quantize import quantize

OUTPUTS, INPUTS = 40, 96
KNOWN = {
    ("int8", 6): "479acaa19f8ebfef",
    ("int5", 3): "b5f3fbbb666e10de",
    ("int4", 4): "43f9150c592093ad",
}


def spread(rows: int, columns: int, most: int) -> Tensor:
    """Whole numbers 0 to `most`, the same on every machine."""
    return (torch.arange(rows * columns) * 7919 % (most + 1)).view(rows, columns)


def make_layer(kind: WeightKind) -> WeightFormat:
    if kind == "int8":
        return quantize(spread(OUTPUTS, INPUTS, 1000).float() - 400, None, "int8")
    bits: Literal[4, 5] = 4 if kind == "int4" else 5
    groups = INPUTS // GROUP
    steps, starts = spread(OUTPUTS, groups, 250) + 1, spread(OUTPUTS, groups, 240)
    values = spread(OUTPUTS, INPUTS, 2**bits - 1)
    grid = QuantizationGrid(*(numbers.to(torch.uint8) for numbers in (values, steps, starts)))
    return GroupedWeight(pack_groups(grid, PackedForm(bits, True)))


@pytest.mark.parametrize("kind", REVISIONS)
def test_other_bits_have_another_revision(kind: WeightKind) -> None:
    """Otherwise a changed rounding would answer from K and V of the old one."""
    if avx2_library() is None:
        pytest.skip("no compiled products here")
    out = make_layer(kind).multiply(spread(5, INPUTS, 996) / 7 - 50)
    digest = hashlib.sha256(out.numpy().tobytes()).hexdigest()
    assert KNOWN[kind, REVISIONS[kind]] == digest[:16]
