"""Recurrent layers written out in float64, token by token, and random batches for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.attention.recurrent import (
    DeltaWeights,
    Recurrence,
    ScanWeights,
    causal_conv,
    gated_delta_rule,
    mamba2_scan,
)

__all__ = ["LAYERS", "Batch", "Conv", "Delta", "Layer", "Mamba", "Piece"]


@dataclass(frozen=True)
class Piece:
    """Rows of one sequence in a step."""

    count: int
    source: int
    target: int
    position: int = 0


@dataclass(frozen=True)
class Batch:
    """The pieces of one step, one after another in the flat batch."""

    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        return sum(piece.count for piece in self.pieces)

    def recurrence(self) -> Recurrence:
        counts = torch.tensor([0, *(piece.count for piece in self.pieces)])
        columns = [(piece.source, piece.target, piece.position) for piece in self.pieces]
        sources, targets, positions = torch.tensor(columns, dtype=torch.int32).view(-1, 3).T
        starts = counts.cumsum(0).to(torch.int32)
        return Recurrence(starts, sources.clone(), targets.clone(), positions.clone())


class Layer:
    """One layer's weights, and the shapes of its rows and its state."""

    state_shape: tuple[int, ...]
    widths: tuple[tuple[int, ...], ...]
    """The shape of a row of each input."""

    def make_rows(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Return random inputs, slices of one tensor with NaN in between and around."""
        numbers = [torch.Size(width).numel() for width in self.widths]
        wide = torch.full((count + 2, sum(numbers) + 3 * len(numbers)), float("nan")).to(dtype)
        rows, column = [], 1
        for number, width in zip(numbers, self.widths, strict=True):
            part = wide[1:-1, column : column + number].view(count, *width)
            rows.append(part.copy_(torch.randn(count, *width)))
            column += number + 3
        return rows

    def run(self, rows: list[Tensor], states: Tensor, recurrence: Recurrence) -> Tensor:
        raise NotImplementedError

    def token(self, row: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the next state of one token, in float64."""
        raise NotImplementedError

    def expect(self, rows: list[Tensor], states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the output and all states after a step, in float64."""
        states, outs, row = states.double(), [], 0
        before = states.clone()
        for piece in batch.pieces:
            state = before[piece.source] if piece.source >= 0 else torch.zeros_like(before[0])
            for number in range(row, row + piece.count):
                out, state = self.token([part[number].double() for part in rows], state)
                outs.append(out)
            states[piece.target] = state
            row += piece.count
        return torch.stack(outs) if outs else torch.empty(0), states


class Conv(Layer):
    def __init__(self, channels: int, width: int, bias: bool = False, silu: bool = True) -> None:
        self.weight = torch.randn(channels, width)
        self.bias = torch.randn(channels) if bias else None
        self.silu = silu
        self.state_shape = (width - 1, channels)
        self.widths = ((channels,),)

    def run(self, rows: list[Tensor], states: Tensor, recurrence: Recurrence) -> Tensor:
        return causal_conv(rows[0], self.weight, self.bias, states, recurrence, silu=self.silu)

    def token(self, row: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, row[0].unsqueeze(0)])
        out = (inputs * self.weight.double().T).sum(0)
        if self.bias is not None:
            out = out + self.bias.double()
        return F.silu(out) if self.silu else out, inputs[1:]


class Delta(Layer):
    def __init__(self, key_heads: int, heads: int, key_dim: int, value_dim: int) -> None:
        self.a_log = torch.empty(heads).uniform_(0.01, 16).log()
        self.dt_bias = torch.randn(heads) - 2
        self.state_shape = (heads, key_dim, value_dim)
        self.widths = ((key_heads, key_dim),) * 2 + ((heads, value_dim), (heads,), (heads,))

    def run(self, rows: list[Tensor], states: Tensor, recurrence: Recurrence) -> Tensor:
        weights = DeltaWeights(self.a_log, self.dt_bias)
        return gated_delta_rule(*rows, weights, states, recurrence)

    def token(self, row: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, a, b = row
        group = len(value) // len(key)
        query, key = (
            (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
            for part in (query, key)
        )
        decay = torch.exp(-self.a_log.double().exp() * F.softplus(a + self.dt_bias.double()))
        state = state * decay.view(-1, 1, 1)
        delta = (value - torch.einsum("hk,hkv->hv", key, state)) * torch.sigmoid(b).unsqueeze(-1)
        state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
        return torch.einsum("hk,hkv->hv", query, state) * query.shape[-1] ** -0.5, state


class Mamba(Layer):
    limits = (0.01, 3.0)

    def __init__(self, groups: int, heads: int, head_dim: int, state: int) -> None:
        self.a_log = torch.empty(heads).uniform_(1, 16).log()
        self.d = torch.randn(heads)
        self.dt_bias = torch.randn(heads) - 2
        self.state_shape = (heads, head_dim, state)
        self.widths = ((heads, head_dim), (groups, state), (groups, state), (heads,))

    def run(self, rows: list[Tensor], states: Tensor, recurrence: Recurrence) -> Tensor:
        weights = ScanWeights(self.a_log, self.d, self.dt_bias, self.limits)
        return mamba2_scan(*rows, weights, states, recurrence)

    def token(self, row: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c, dt = row
        group = len(x) // len(b)
        b, c = (part.repeat_interleave(group, 0) for part in (b, c))
        dt = F.softplus(dt + self.dt_bias.double()).clamp(*self.limits)
        decay = torch.exp(-self.a_log.double().exp() * dt)
        state = state * decay.view(-1, 1, 1)
        state = state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        return torch.einsum("hpn,hn->hp", state, c) + self.d.double().unsqueeze(-1) * x, state


LAYERS: dict[str, Callable[[], Layer]] = {
    "conv": lambda: Conv(70, 4),
    "conv with bias": lambda: Conv(16, 4, bias=True),
    "short conv": lambda: Conv(129, 3, silu=False),
    "conv of two": lambda: Conv(5, 2),
    "delta": lambda: Delta(2, 2, 32, 32),
    "delta, shared key heads": lambda: Delta(2, 6, 17, 40),
    "delta, as Qwen3.5": lambda: Delta(1, 2, 128, 128),
    "mamba": lambda: Mamba(1, 3, 16, 32),
    "mamba, two groups": lambda: Mamba(2, 4, 9, 21),
    "mamba, as Granite 4 H": lambda: Mamba(1, 2, 64, 128),
}
