"""Cosines and sines of rotary positions (RoFormer, https://arxiv.org/abs/2104.09864)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.imports import load_module
from headstart.models.families import DecoderShape
from headstart.weights.scheme import UnsupportedLayerError

__all__ = ["AngleTable", "Angles", "Frequencies", "read_frequencies", "rotate"]

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each `[rows, width]`, `width` at most the head dim."""

_FIRST_POSITIONS = 1024
_MOST_POSITIONS = 1 << 17  # a table of 128 columns in float32 takes 128 MiB
_FACTORS = ("short_factor", "long_factor")  # one for each pair


class Frequencies(NamedTuple):
    """Radians per position of each rotated pair, float32, and a factor of cosines and sines."""

    values: Tensor
    scale: float = 1.0


def read_frequencies(config: Any, kind: str, shape: DecoderShape) -> Frequencies:
    """The frequencies of one kind of layer in `config.rope_parameters`; "" if all are alike.

    Raises `UnsupportedLayerError` for rotary positions of a type that the family does not have.
    """
    parameters = config.rope_parameters[kind] if kind else config.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedLayerError("its rotary positions differ from layer to layer")
    rope, head_dim = parameters["rope_type"], shape.head_dim
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not shape.partial_rotary:
        raise UnsupportedLayerError(f"a part of a head is rotated ({part})")
    if rope == "default":
        width = int(head_dim * part)
        powers = torch.arange(0, width, 2, dtype=torch.float32) / width
        found = Frequencies(1.0 / parameters["rope_theta"] ** powers)
    else:
        scaling = load_module("headstart.models.dense.scaled_rotary")
        scaled = scaling.scale_frequencies(rope, config, kind)
        if scaled is None:
            raise UnsupportedLayerError(f"its rotary positions are {rope}")
        found = Frequencies(*scaled)
        count, lengths = len(found.values), {len(parameters.get(n, found.values)) for n in _FACTORS}
        if lengths != {count}:
            raise UnsupportedLayerError(
                f"its rotary positions have factors for {lengths} of {count}"
            )
    if not torch.isfinite(found.values).all() or 2 * len(found.values) > head_dim:
        raise UnsupportedLayerError(
            f"its rotary positions have {len(found.values)} frequencies, or infinite"
        )
    if not math.isfinite(found.scale):
        raise UnsupportedLayerError(f"its rotary positions are scaled by {found.scale}")
    return found


class AngleTable:
    """The angles of each position, from a table that grows with the largest position.

    `like` has the dtype and the device of the result.
    """

    def __init__(self, frequencies: Frequencies, like: Tensor) -> None:
        self._frequencies = frequencies
        self.width = 2 * len(frequencies.values)
        """Elements of a head that are rotated, from its first on."""
        self._like = like
        self._table: Angles = (like.new_empty((0, self.width)), like.new_empty((0, self.width)))

    def __call__(self, positions: Tensor) -> Angles:
        """Two tensors `[rows, width]` for positions int64 `[rows]`, at least one."""
        needed = int(positions.max()) + 1
        if needed > _MOST_POSITIONS:
            return self._angles(positions.to(torch.float32).cpu())
        self.cover(needed)
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def cover(self, num_positions: int) -> None:
        """Have the first positions in the table, as far as one of its size goes."""
        needed = min(num_positions, _MOST_POSITIONS)
        if needed > len(self._table[0]):
            size = max(_FIRST_POSITIONS, 1 << (needed - 1).bit_length())
            with torch.inference_mode(False):  # outlives the step that needs it
                self._table = self._angles(torch.arange(size, dtype=torch.float32))

    def _angles(self, positions: Tensor) -> Angles:
        values, scale = self._frequencies
        places = positions.unsqueeze(1) * values
        cos, sin = places.cos().mul_(scale), places.sin_().mul_(scale)
        return self._both_halves(cos), self._both_halves(sin)

    def _both_halves(self, pairs: Tensor) -> Tensor:
        """A pair's number for each of its elements, which lie half a width apart."""
        pairs = pairs.to(self._like)
        return torch.cat((pairs, pairs), dim=-1)


def rotate(rows: Tensor, angles: Angles) -> Tensor:
    """`rows` `[rows, heads, head_dim]` rotated by their positions, in the dtype of `rows`.

    Elements of a head past the angles' width stay as they are.
    """
    cos, sin = (part.unsqueeze(1) for part in angles)
    width = cos.shape[-1]
    turned = rows[..., :width]
    half = width // 2
    other = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    out = (turned * cos + other * sin).to(rows.dtype)
    return out if width == rows.shape[-1] else torch.cat((out, rows[..., width:]), dim=-1)
