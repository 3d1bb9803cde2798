"""Recurrent mixers: layers whose state has a fixed size, in the place of attention.

A mixer's `state` has the shapes of a sequence's state in this layer. Its first state is always that
of the causal convolution, the last inputs of each channel.
"""

from typing import cast

from torch import Tensor, nn

from headstart.attention.backend import StateLayout
from headstart.attention.recurrent import Recurrence, causal_conv
from headstart.models.dense.modules import FamilyModule, LayerStep
from headstart.models.families import ConvShape, DecoderShape
from headstart.weights.reader import Reader


def make_mixer(shape: DecoderShape, index: int, name: str, read: Reader) -> "Mixer":
    """Return the mixer of a recurrent layer."""
    mixer = shape.layers[index].mixer
    assert mixer is not None
    return _MIXERS[type(mixer)](shape, index, name, read)


class CausalConv(nn.Module):
    """A convolution of each channel over its last inputs, in float32."""

    def __init__(self, channels: int, width: int, bias: bool, name: str, read: Reader) -> None:
        super().__init__()
        weight = read.tensor(f"{name}.weight", (channels, 1, width))
        # In memory tap by tap, as the kernel reads it.
        weight = weight.transpose(0, 2).contiguous().transpose(0, 2)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if bias:
            tensor = read.tensor(f"{name}.bias", (channels,))
            self.bias = nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: Tensor, states: Tensor, recurrence: Recurrence, silu: bool) -> Tensor:
        """Return the convolution of rows `[rows, channels]`, in their dtype."""
        return causal_conv(x, self.weight[:, 0], self.bias, states, recurrence, silu=silu)


class Mixer(FamilyModule):
    """The base of recurrent mixers: finds the layer's states in a step."""

    state: StateLayout

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__(shape)
        self._number = shape.number(index)

    def find_states(self, step: LayerStep) -> tuple[tuple[Tensor, ...], Recurrence]:
        """Return this layer's states by slot, and the slots of the step."""
        assert step.states is not None and step.states.recurrence is not None
        return step.states.layers[self._number], step.states.recurrence


class ShortConv(Mixer):
    """`out(c * conv(b * x))`, where b, c and x are projections of the rows (LFM2)."""

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape, index)
        conv = cast("ConvShape", shape.layers[index].mixer)
        hidden = shape.hidden_size
        self.state = StateLayout(((conv.width - 1, hidden),))
        self.in_proj = read.linear(f"{name}.in_proj", hidden, 3 * hidden, conv.bias)
        self.conv = CausalConv(hidden, conv.width, conv.bias, f"{name}.conv", read)
        self.out_proj = read.linear(f"{name}.out_proj", hidden, hidden, conv.bias)

    def forward(self, x: Tensor, step: LayerStep, kept_rows: Tensor | None = None) -> Tensor:
        """Return the update of all rows, or of `kept_rows`; write the states of all sequences."""
        (states,), recurrence = self.find_states(step)
        before, after, value = self.in_proj(x).chunk(3, dim=-1)
        mixed = after * self.conv(before * value, states, recurrence, silu=False)
        if kept_rows is not None:
            mixed = mixed.index_select(0, kept_rows)
        out: Tensor = self.out_proj(mixed)
        return out


_MIXERS: dict[type, type[ShortConv]] = {ConvShape: ShortConv}
