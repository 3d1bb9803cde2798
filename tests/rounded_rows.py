"""The arithmetic of int4 and int5 layers, as `models/linear/int4.py` documents it."""

from typing import Any

import torch
from torch import Tensor, nn

from headstart.models.linear.int4 import GROUP, Int4Linear

__all__ = ["round_inputs", "round_rows"]

TOP, TINY = 127, 1e-30


def round_rows(layer: Int4Linear, rows: Tensor) -> Tensor:
    """What a compiled product takes for finite rows, float64: 8 bits for each 32 inputs."""
    columns = torch.ones(rows.shape[-1]) if layer.columns is None else layer.columns
    scaled = nn.functional.pad(rows.float() * columns, (0, -rows.shape[-1] % GROUP))
    groups = scaled.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * torch.where(largest > TINY, TOP / largest, 0.0)).round()
    rounded = (numbers.double() * (largest / TOP)).flatten(-2)[..., : rows.shape[-1]]
    return rounded / columns.double()


def round_inputs(module: nn.Linear, layer: Int4Linear) -> None:
    """Let a float module multiply rows as a layer does, where that has a compiled product."""
    if layer.float_weight is None:
        return

    def rounded(module: nn.Linear, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        # Added to the output, so that an adapter's part of it takes the rows as they are.
        rows = inputs[0]
        lost = round_rows(layer, rows) - rows.double()
        return output + (lost @ module.weight.double().T).to(output.dtype)

    module.register_forward_hook(rounded)
