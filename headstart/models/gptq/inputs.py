"""What a decoder layer sees of a text that is cut into windows.

The layers are headstart's own, with attention over whole windows in place of paged memory.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headstart.attention.backend import AttentionOptions
from headstart.models.dense.decoder import Description
from headstart.models.dense.modules import DecoderLayer, LayerStep
from headstart.models.dense.rotary import AngleTable
from headstart.models.dense.shape import DecoderShape

__all__ = ["Seen", "linear_of", "make_step", "see_input", "see_inputs", "stages"]


def stages(shape: DecoderShape) -> list[list[str]]:
    """The linear layers of a decoder layer in their order; those of a list have one input."""
    qkv = ["qkv"] if shape.fused else ["q", "k", "v"]
    gate_up = ["gate_up"] if shape.fused else ["gate", "up"]
    return [
        [f"self_attn.{part}_proj" for part in qkv],
        ["self_attn.o_proj"],
        [f"mlp.{part}_proj" for part in gate_up],
        ["mlp.down_proj"],
    ]


def linear_of(layer: DecoderLayer, name: str) -> nn.Linear:
    """The linear layer of this name in a decoder layer of floats."""
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def make_step(about: Description, windows: int, length: int) -> LayerStep:
    """What layers need to read so many windows of so many tokens, one behind another."""
    places = torch.arange(length).repeat(windows)
    like = torch.empty(0)
    angles = {kind: AngleTable(own, like)(places) for kind, own in about.frequencies.items()}
    return LayerStep(_Windows(length), angles)  # type: ignore[arg-type]


class _Seen(Exception):
    """Ends a layer when the wanted input was seen."""


def see_input(layer: DecoderLayer, name: str, rows: Tensor, step: LayerStep) -> Tensor:
    """The input `[rows, inputs]` of a linear layer; what comes behind it is not computed."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])
        raise _Seen

    made = linear_of(layer, name).register_forward_pre_hook(hook)
    try:
        with suppress(_Seen):
            layer(rows, step)
    finally:
        made.remove()
    return seen[0]


class Seen(NamedTuple):
    """What a layer gives `[rows, hidden]`, and the inputs of its linear layers by name."""

    out: Tensor
    inputs: dict[str, Tensor]


def see_inputs(layer: DecoderLayer, names: Sequence[str], rows: Tensor, step: LayerStep) -> Seen:
    """What a whole layer does."""
    inputs: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in names:

            def hook(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                inputs[name] = given[0]

            made = linear_of(layer, name).register_forward_pre_hook(hook)
            hooks.callback(made.remove)
        return Seen(layer(rows, step), inputs)


class _Windows:
    """Attention of rows that are whole windows of `length` tokens, one behind another."""

    def __init__(self, length: int) -> None:
        self._length = length

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """As `AttentionBackend.attend`; keeps no K/V."""
        queries, keys, values = (torch.split(part, self._length) for part in (query, key, value))
        windows = zip(queries, keys, values, strict=True)
        return torch.cat([self._attend(*window, options) for window in windows])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Of one window: `[tokens, heads, head_dim]`."""
        tokens, heads, width = query.shape
        by_head = query.reshape(tokens, key.shape[1], -1, width).permute(1, 2, 0, 3)
        keys, values = key.permute(1, 2, 0).unsqueeze(1), value.transpose(0, 1).unsqueeze(1)
        scores = by_head @ keys * options.scaling
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh_() * options.softcap
        places = torch.arange(tokens)
        behind = places.unsqueeze(1) - places
        hidden = behind < 0
        if options.sliding_window is not None:
            hidden |= behind >= options.sliding_window
        mixed = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values
        return mixed.permute(2, 0, 1, 3).reshape(tokens, heads, width)
