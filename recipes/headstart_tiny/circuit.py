"""Parts of the hand-set weights: registers of the residual stream, heads, neurons.

Glossary
    register    adjacent coordinates of the residual stream with a name
    form        a linear form of registers, `{name: factor}` or rows of a matrix `[n, width]`
    marker      a coordinate that is 1 at the tokens to which a head may attend
    fast, slow  rotary pairs with a large or a negligible rotation over the context

A Llama has no biases. The register ONE replaces them. Before a norm, ONE is so large that it alone
determines the divisor. So the divisor is nearly equal at all tokens, and the norm leaves the other
registers unchanged. After the norm, ONE is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

LOUD = 256.0  # value of ONE in the embedding, far larger than all other registers together
STEEP = 20.0  # steepness of a neuron's condition
NEXT = 0.22  # radians per token; faster rotary pairs distinguish adjacent tokens
SOUGHT = 4000.0  # score of a marked token that is selected by distance
Form = dict[str, float]


class Registers:
    """Registers by name.

    later: names that reuse the coordinates of another name after it is cleared.
    """

    def __init__(self, sizes: dict[str, int], later: dict[str, str], width: int) -> None:
        self.width = width
        self.slices: dict[str, slice] = {}
        first = 0
        for name, count in sizes.items():
            self.slices[name] = slice(first, first + count)
            first += count
        if first > width:
            raise ValueError(f"the registers need a width of {first}, the model has {width}")
        self.slices |= {name: self.slices[before] for name, before in later.items()}

    def rows(self, name: str) -> Tensor:
        """Return the rows `[count, width]` that read a register."""
        return torch.eye(self.width)[self.slices[name]]

    def form(self, form: Form) -> Tensor:
        """Return the row `[width]` of a weighted sum; "NAME.3" is coordinate 3 of a register."""
        row = torch.zeros(self.width)
        for key, factor in form.items():
            name, _, offset = key.partition(".")
            row[self.slices[name].start + int(offset or 0)] += factor
        return row

    def forms(self, *forms: Form) -> Tensor:
        """Return the rows of several forms, `[len(forms), width]`."""
        return torch.stack([self.form(form) for form in forms])


@dataclass(frozen=True)
class Match:
    """A part of a head's score: `gain` times the product of the query's and key's readings."""

    query: Tensor
    key: Tensor
    gain: float = 1.0


class Wirer:
    """Writer of the weights of a new Llama."""

    def __init__(self, model: Any, registers: Registers) -> None:
        config = model.config
        self.at = registers
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size, self.width = config.head_dim, config.hidden_size
        self.layers = list(model.model.layers)
        self.next_neuron = [0] * len(self.layers)
        half = self.size // 2
        base = config.rope_parameters["rope_theta"]
        self.angles = (base ** (-torch.arange(half, dtype=torch.float64) / half)).float()
        slow = [i for i in range(half - 1, -1, -1) if self.angles[i] < 2.5e-5]
        self.slow = torch.tensor([d for i in slow for d in (i, i + half)])
        self.norms(model)

    def norms(self, model: Any) -> None:
        """Set every norm's weight so that registers stay unchanged and ONE becomes 1."""
        for layer in self.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(LOUD / self.width**0.5)
                norm.weight[self.at.slices["ONE"]] = self.width**-0.5
        model.model.norm.weight.copy_(self.layers[0].input_layernorm.weight)

    def span(self, index: int) -> slice:
        return slice(index * self.size, (index + 1) * self.size)

    def near(self, distance: Sequence[float], value: Sequence[float], low: float, high: float,
             ridge: float = 1e-2) -> tuple[list[int], Tensor]:  # fmt: skip
        """Return rotary pairs with angles in [low, high), and amplitudes `[2 * pairs + 1]`.

        The amplitudes are fitted so that the score at `distance[i]` is near `value[i]`. The last
        amplitude is a constant.
        """
        d = torch.tensor(distance, dtype=torch.float64)
        goal = torch.tensor(value, dtype=torch.float64)
        chosen = [i for i, angle in enumerate(self.angles.tolist()) if low <= angle < high]
        t = self.angles[chosen].double()
        waves = [torch.cos(d[:, None] * t), -torch.sin(d[:, None] * t), torch.ones(len(d), 1)]
        basis = torch.cat(waves, dim=1)
        weight = (d + 3).rsqrt()[:, None]
        left = (basis * weight).T @ (basis * weight) + ridge * torch.eye(basis.shape[1])
        right = (basis * weight).T @ (goal * weight[:, 0])
        return chosen, torch.linalg.solve(left, right).float()

    def key_marker(self, layer: int, group: int, pairs: list[int], marker: Tensor) -> None:
        """Write `marker` `[width]` into these rotary pairs of the keys of `group`."""
        weight = self.layers[layer].self_attn.k_proj.weight
        weight[[group * self.size + i for i in pairs]] = 8.0 * marker

    def point(self, layer: int, head: int, pairs: list[int], amplitude: Tensor,
              gate: Tensor | None = None) -> None:  # fmt: skip
        """Let a head score marked keys by their distance; `gate` [width] scales the score."""
        half, weight = self.size // 2, self.layers[layer].self_attn.q_proj.weight
        gate = self.at.form({"ONE": 1.0}) if gate is None else gate
        scale = self.size**0.5 / 8.0
        for index, pair in enumerate(pairs):
            weight[head * self.size + pair] = amplitude[index] * scale * gate
            weight[head * self.size + pair + half] = amplitude[index + len(pairs)] * scale * gate

    def latest(self, layer: int, head: int, group: int, marker: Form, gate: Form | None = None
               ) -> None:  # fmt: skip
        """Attend to the latest token that has `marker`, which may be the current token."""
        d = [*range(200), *range(200, 4200, 5)]
        fall = [-1000.0 * log((x + 20) / 20) for x in d]
        pairs, amplitude = self.near(d, fall, 1e-4, NEXT)
        steady = [int(self.slow[-2])]
        self.key_marker(layer, group, pairs + steady, self.at.form(marker))
        gates = None if gate is None else self.at.form(gate)
        self.point(layer, head, pairs, amplitude[:-1], gates)
        base = torch.tensor([SOUGHT + float(amplitude[-1]), 0.0])
        self.point(layer, head, steady, base, gates)

    def match(self, layer: int, head: int, group: int, matches: Sequence[Match]) -> None:
        """Score by the sum of `matches`, in slow coordinates."""
        query = torch.cat([m.gain * m.query * self.size**0.5 for m in matches])
        key = torch.cat([m.key for m in matches])
        share = (query.norm(dim=1) / key.norm(dim=1).clamp(min=1e-6)).sqrt().clamp(min=1e-3)
        if len(query) > len(self.slow) - 2:
            raise ValueError(f"{len(query)} products, {len(self.slow) - 2} slow coordinates")
        attention, slots = self.layers[layer].self_attn, self.slow[: len(query)]
        attention.q_proj.weight[slots + head * self.size] = query / share[:, None]
        attention.k_proj.weight[slots + group * self.size] = key * share[:, None]

    def values(self, layer: int, group: int, read: Tensor) -> None:
        """Let the values of `group` be `read` `[n, width]`."""
        self.layers[layer].self_attn.v_proj.weight[self.span(group)][: len(read)] = read

    def write(self, layer: int, head: int, first: int, rows: Tensor, gain: float = 1.0) -> None:
        """Write the head's values, from index `first`, to the residual stream through `rows`."""
        weight = self.layers[layer].self_attn.o_proj.weight
        start = head * self.size + first
        weight[:, start : start + len(rows)] += gain * rows.T

    def neurons(self, layer: int, condition: Form, read: Tensor, write: Tensor) -> None:
        """Add `write.T @ read @ x`, for the normed stream x, where `condition` is positive.

        The condition is a sum of flags minus a threshold. The addition is scaled by twice the
        condition. read, write: `[n, width]`.
        """
        start, count = self.next_neuron[layer], len(read)
        self.next_neuron[layer] += count
        mlp = self.layers[layer].mlp
        chosen = slice(start, start + count)
        if chosen.stop > mlp.gate_proj.weight.shape[0]:
            raise ValueError(f"layer {layer} has too few neurons")
        mlp.gate_proj.weight[chosen] = STEEP * self.at.form(condition)
        mlp.up_proj.weight[chosen] = (2 / STEEP) * read
        mlp.down_proj.weight[:, chosen] = write.T

    def flag(self, layer: int, condition: Form, *names: str) -> None:
        """Add 1 to registers where `condition` is positive; for "-NAME", subtract 1.

        Two neurons are used. Their difference is 1 for any condition above the threshold.
        """
        write = self.at.form({n.removeprefix("-"): -1.0 if n[0] == "-" else 1.0 for n in names})
        one = self.at.forms({"ONE": 1.0})
        for shift, sign in ((0.25, 1.0), (-0.25, -1.0)):
            moved = condition | {"ONE": condition.get("ONE", 0.0) + shift}
            self.neurons(layer, moved, one, sign * write[None])

    def clear(self, layer: int, *names: str) -> None:
        """Empty registers at every token."""
        read = torch.cat([self.at.rows(name) for name in names])
        self.neurons(layer, {"ONE": 0.5}, read, -read)

    def squares(self, layer: int, name: str, into: str) -> None:
        """Write the sum of a register's squares, as silu(x) x + silu(-x) (-x) = x^2."""
        rows = self.at.rows(name)
        start = self.next_neuron[layer]
        self.next_neuron[layer] += 2 * len(rows)
        mlp, chosen = self.layers[layer].mlp, slice(start, start + 2 * len(rows))
        mlp.gate_proj.weight[chosen] = torch.cat([rows, -rows])
        mlp.up_proj.weight[chosen] = torch.cat([rows, -rows])
        mlp.down_proj.weight[:, chosen] = self.at.form({into: 1.0})[:, None]
