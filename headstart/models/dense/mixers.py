"""Recurrent mixers, which replace attention and have states of fixed size."""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from headstart.attention.backend import StateLayout
from headstart.attention.recurrent import (
    DeltaWeights,
    Recurrence,
    ScanWeights,
    causal_conv,
    gated_delta_rule,
    mamba2_scan,
)
from headstart.models.dense.modules import FamilyModule, LayerStep, RMSNorm, normalize
from headstart.models.shapes import ConvShape, DecoderShape, DeltaShape, ScanShape
from headstart.weights.reader import Reader


class CausalConv(nn.Module):
    """A convolution of each channel over its last inputs, in float32."""

    def __init__(self, channels: int, width: int, bias: bool, name: str, read: Reader) -> None:
        super().__init__()
        weight = read.tensor(f"{name}.weight", (channels, 1, width))
        # Stored tap by tap, as the kernel reads it.
        weight = weight.transpose(0, 2).contiguous().transpose(0, 2)
        self.weight = _parameter(weight)
        self.bias = None
        if bias:
            self.bias = _parameter(read.tensor(f"{name}.bias", (channels,)))

    def forward(self, x: Tensor, states: Tensor, recurrence: Recurrence, silu: bool) -> Tensor:
        """Return the convolution of rows `[rows, channels]`, in their dtype."""
        return causal_conv(x, self.weight[:, 0], self.bias, states, recurrence, silu=silu)


class Mixer(FamilyModule):
    """The base of recurrent mixers.

    `forward` returns the update of all rows, or of `output_rows`, and writes the states of all
    sequences.
    """

    state: StateLayout
    """The shapes of a sequence's states in this layer. The first state has the last inputs of the
    causal convolution."""

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__(shape)
        self._number = shape.number(index)

    def find_states(self, step: LayerStep) -> tuple[tuple[Tensor, ...], Recurrence]:
        """Return this layer's states by slot, and the slots of the step."""
        assert step.states is not None and step.states.recurrence is not None
        return step.states.layers[self._number], step.states.recurrence


class ShortConv(Mixer):
    """`out(c * conv(b * value))`, where b, c and value are projections of the rows (LFM2)."""

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape, index)
        conv = cast("ConvShape", shape.layers[index].mixer)
        hidden = shape.hidden_size
        self.state = StateLayout(((conv.width - 1, hidden),))
        self.in_proj = read.linear(f"{name}.in_proj", hidden, 3 * hidden, conv.bias)
        self.conv = CausalConv(hidden, conv.width, conv.bias, f"{name}.conv", read)
        self.out_proj = read.linear(f"{name}.out_proj", hidden, hidden, conv.bias)

    def forward(self, x: Tensor, step: LayerStep, output_rows: Tensor | None = None) -> Tensor:
        (states,), recurrence = self.find_states(step)
        b, c, value = self.in_proj(x).chunk(3, dim=-1)
        mixed = c * self.conv(b * value, states, recurrence, silu=False)
        if output_rows is not None:
            mixed = mixed.index_select(0, output_rows)
        out: Tensor = self.out_proj(mixed)
        return out


class GatedDelta(Mixer):
    """The gated delta rule over convolved queries, keys and values (Qwen3.5)."""

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape, index)
        delta = cast("DeltaShape", shape.layers[index].mixer)
        self._delta, hidden, heads = delta, shape.hidden_size, delta.heads
        keys, values = delta.key_heads * delta.key_dim, heads * delta.value_dim
        self._widths = [keys, keys, values]
        channels = sum(self._widths)
        self.state = StateLayout(
            ((delta.width - 1, channels), (heads, delta.key_dim, delta.value_dim))
        )
        self.in_proj_qkv = read.linear(f"{name}.in_proj_qkv", hidden, channels, bias=False)
        self.in_proj_z = read.linear(f"{name}.in_proj_z", hidden, values, bias=False)
        self.in_proj_b = read.linear(f"{name}.in_proj_b", hidden, heads, bias=False)
        self.in_proj_a = read.linear(f"{name}.in_proj_a", hidden, heads, bias=False)
        self.conv1d = CausalConv(channels, delta.width, False, f"{name}.conv1d", read)
        self.A_log = _parameter(read.tensor(f"{name}.A_log", (heads,)))
        self.dt_bias = _parameter(read.tensor(f"{name}.dt_bias", (heads,)))
        self.norm = RMSNorm(read.vector(f"{name}.norm", delta.value_dim), shape.epsilon, "llama")
        self.out_proj = read.linear(f"{name}.out_proj", values, hidden, bias=False)

    def forward(self, x: Tensor, step: LayerStep, output_rows: Tensor | None = None) -> Tensor:
        (inputs, states), recurrence = self.find_states(step)
        delta = self._delta
        mixed = self.conv1d(self.in_proj_qkv(x), inputs, recurrence, silu=True)
        query, key, value = mixed.split(self._widths, dim=-1)
        mixed = gated_delta_rule(
            query.view(len(x), delta.key_heads, delta.key_dim),
            key.view(len(x), delta.key_heads, delta.key_dim),
            value.view(len(x), delta.heads, delta.value_dim),
            self.in_proj_a(x),
            self.in_proj_b(x),
            DeltaWeights(self.A_log, self.dt_bias),
            states,
            recurrence,
        )
        if output_rows is not None:
            mixed, x = mixed.index_select(0, output_rows), x.index_select(0, output_rows)
        gate = self.in_proj_z(x).view(mixed.shape).float()
        mixed = (self.norm(mixed) * functional.silu(gate)).to(x.dtype)
        out: Tensor = self.out_proj(mixed.flatten(1))
        return out


class GatedNorm(nn.Module):
    """RMSNorm of each group of `x * silu(gate)`, in float32."""

    def __init__(self, weight: Tensor, epsilon: float, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon, self._groups = epsilon, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        exact = x.float() * functional.silu(gate.float())
        parts = exact.view(len(x), self._groups, x.shape[1] // self._groups)
        parts = normalize(parts, self.variance_epsilon)
        out: Tensor = (self.weight * parts.flatten(1)).to(x.dtype)
        return out


class Mamba2(Mixer):
    """Mamba-2's selective scan over convolved inputs (Granite 4 H)."""

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape, index)
        scan = cast("ScanShape", shape.layers[index].mixer)
        self._scan, hidden, heads = scan, shape.hidden_size, scan.heads
        inner, shared = heads * scan.head_dim, scan.groups * scan.state
        channels = inner + 2 * shared
        self._projected, self._convolved = [inner, channels, heads], [inner, shared, shared]
        self.state = StateLayout(((scan.width - 1, channels), (heads, scan.head_dim, scan.state)))
        self.in_proj = read.linear(f"{name}.in_proj", hidden, sum(self._projected), scan.bias)
        self.conv1d = CausalConv(channels, scan.width, scan.conv_bias, f"{name}.conv1d", read)
        self.A_log = _parameter(read.tensor(f"{name}.A_log", (heads,)))
        self.D = _parameter(read.tensor(f"{name}.D", (heads,)))
        self.dt_bias = _parameter(read.tensor(f"{name}.dt_bias", (heads,)))
        weight = read.vector(f"{name}.norm", inner)
        self.norm = GatedNorm(weight, shape.epsilon, scan.groups)
        self.out_proj = read.linear(f"{name}.out_proj", inner, hidden, scan.bias)

    def forward(self, x: Tensor, step: LayerStep, output_rows: Tensor | None = None) -> Tensor:
        (inputs, states), recurrence = self.find_states(step)
        scan = self._scan
        gate, mixed, dt = self.in_proj(x).split(self._projected, dim=-1)
        mixed = self.conv1d(mixed, inputs, recurrence, silu=True)
        value, b, c = mixed.split(self._convolved, dim=-1)
        mixed = mamba2_scan(
            value.view(len(x), scan.heads, scan.head_dim),
            b.view(len(x), scan.groups, scan.state),
            c.view(len(x), scan.groups, scan.state),
            dt,
            ScanWeights(self.A_log, self.D, self.dt_bias, scan.limits),
            states,
            recurrence,
        ).flatten(1)
        if output_rows is not None:
            mixed, gate = mixed.index_select(0, output_rows), gate.index_select(0, output_rows)
        out: Tensor = self.out_proj(self.norm(mixed, gate))
        return out


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


MIXERS = {ConvShape: ShortConv, DeltaShape: GatedDelta, ScanShape: Mamba2}
"""The classes of mixers by their shapes."""
