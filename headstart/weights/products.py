"""Which product multiplies rows by a weight on this machine: decided here, and nowhere else.

The CPU's flags decide, by what was measured on such CPUs (docs/log.md); integers with AVX-512 VNNI
were not. What a product uses besides, VNNI or AMX, the compiled library knows (`headstart.native`).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from headstart.native import AMX, avx2_library, level, library
from headstart.weights.fbgemm import has_fbgemm

__all__ = ["Product", "WeightForm", "choose_product"]

WeightForm = Literal["bfloat16", "int8", "int8 in groups", "fewer bits"]
"""How a weight is kept: in bfloat16; in 8 bits with one scale for an output; in 8 bits, or 5 or 4,
with steps for a group of inputs."""

Product = Literal["bfloat16", "float32", "integers", "fbgemm", "torch"]
"""bfloat16: compiled, over panels of pairs, of which fewer bits become bfloat16 as they are read.
float32: compiled for few rows; for many, the weight becomes float32 tile by tile. integers:
compiled; rows are rounded to 8 bits for each 32 inputs. fbgemm: rows in 14 bits. torch: the weight
as torch has it, or dequantised tile by tile."""


class _Row(NamedTuple):
    forms: tuple[WeightForm, ...]
    rows: torch.dtype | None  # any
    is_here: Callable[[], bool]
    product: Product


_TABLE = (
    _Row(("bfloat16",), torch.bfloat16, lambda: library() is not None, "bfloat16"),
    _Row(("bfloat16",), torch.float32, lambda: avx2_library() is not None, "float32"),
    _Row(("int8", "fewer bits"), torch.bfloat16, lambda: level() >= AMX, "bfloat16"),
    _Row(
        ("int8", "int8 in groups", "fewer bits"),
        None,
        lambda: avx2_library() is not None,
        "integers",
    ),
    _Row(("int8",), None, lambda: has_fbgemm(), "fbgemm"),
)


def choose_product(form: WeightForm, rows: torch.dtype, device: torch.device) -> Product:
    """The product of a weight kept in a form, for rows of a dtype: the first row that fits."""
    for row in _TABLE:
        fits = form in row.forms and row.rows in (None, rows) and device.type == "cpu"
        if fits and row.is_here():
            return row.product
    return "torch"
