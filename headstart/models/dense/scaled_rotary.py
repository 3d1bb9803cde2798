"""Rotary positions that are scaled, as transformers reads and computes them; imports it."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["RotaryConfig", "scale_frequencies"]


class RotaryConfig(PreTrainedConfig):
    """transformers' configuration of no architecture in particular.

    It brings the reading of rotary parameters, old and new, with their checks. All other keys
    become attributes.
    """

    model_type = "headstart_dense"
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int = 2048


def scale_frequencies(rope: str, config: RotaryConfig, kind: str) -> tuple[Tensor, float] | None:
    """Radians per position of each rotated pair, and a factor of cosines and sines.

    rope: how they are scaled; None is returned for an unknown way. kind: of layers, "" for all.
    """
    if rope not in ROPE_INIT_FUNCTIONS:
        return None
    named = {"layer_type": kind} if kind else {}
    values, scale = ROPE_INIT_FUNCTIONS[rope](config, torch.device("cpu"), **named)
    return values.float(), float(scale)
