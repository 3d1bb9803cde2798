"""The modules of a dense decoder. They have transformers' names, to which adapters refer.

Rows are a flat batch `[rows, hidden]`. Every `Linear` is called as a module, so that its hooks run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.attention.backend import AttentionBackend, AttentionOptions
from headstart.attention.memory import StateMemory
from headstart.imports import load_module
from headstart.models.shapes import Activation, DecoderShape, NormKind
from headstart.weights.format import Linear
from headstart.weights.reader import Reader
from headstart.weights.scheme import UnsupportedLayerError

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each `[rows, width]`, `width` at most the head dim."""

_FIRST_POSITIONS = 1024
_MAX_POSITIONS = 1 << 17  # two tables of 128 columns in float32 take 128 MiB
_FACTORS = ("short_factor", "long_factor")  # lists of one factor for each pair


class Frequencies(NamedTuple):
    """Radians per position of each rotated pair, float32; `scale` multiplies cosines and sines."""

    values: Tensor
    scale: float = 1.0


def read_frequencies(config: Any, kind: str, shape: DecoderShape) -> Frequencies:
    """Return the frequencies of the layers whose `LayerShape.angles` is `kind`.

    Raises `UnsupportedLayerError` for rotary positions that headstart's modules do not support.
    """
    parameters = config.rope_parameters[kind] if kind else config.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedLayerError("its rotary positions differ from layer to layer")
    widths = (layer.head_dim for layer in shape.layers if layer.angles == kind)
    head_dim = next(widths, None) or shape.head_dim
    rope, part = parameters["rope_type"], parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not shape.partial_rotary and rope != "proportional":
        raise UnsupportedLayerError(f"only a part of a head is rotated ({part})")
    if rope == "default":
        width = int(head_dim * part)
        powers = torch.arange(0, width, 2, dtype=torch.float32) / width
        frequencies = Frequencies(1.0 / parameters["rope_theta"] ** powers)
    elif rope == "proportional":
        # The first pairs have the frequencies of a fully rotated head. Other frequencies are 0.
        count = int(part * head_dim // 2)
        powers = torch.arange(0, 2 * count, 2, dtype=torch.float32) / head_dim
        rotated = 1.0 / parameters["rope_theta"] ** powers / parameters.get("factor", 1.0)
        frequencies = Frequencies(torch.cat((rotated, torch.zeros(head_dim // 2 - count))))
    else:
        scalings = load_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
        if rope not in scalings or head_dim != shape.head_dim:
            raise UnsupportedLayerError(f"its rotary positions are {rope}")
        options = {"layer_type": kind} if kind else {}
        values, scale = scalings[rope](config, torch.device("cpu"), **options)
        frequencies = Frequencies(values.float(), float(scale))
        count = len(frequencies.values)
        lengths = {len(parameters.get(name, frequencies.values)) for name in _FACTORS}
        if lengths != {count}:
            raise UnsupportedLayerError(
                f"its rotary positions have factors for {lengths} pairs; allowed: {count}"
            )
    if not torch.isfinite(frequencies.values).all() or 2 * len(frequencies.values) > head_dim:
        raise UnsupportedLayerError(
            f"its rotary positions have {len(frequencies.values)} frequencies for heads of width "
            f"{head_dim}, or infinite frequencies"
        )
    if not math.isfinite(frequencies.scale):
        raise UnsupportedLayerError(f"its rotary positions are scaled by {frequencies.scale}")
    return frequencies


class AngleTable:
    """The angles of each position, from a table that grows with the largest position.

    `like` has the dtype and the device of the result.
    """

    def __init__(self, frequencies: Frequencies, like: Tensor) -> None:
        self._frequencies, self._like = frequencies, like
        self._table: Angles = (like.new_empty(0), like.new_empty(0))

    def __call__(self, positions: Tensor) -> Angles:
        """Return the angles of positions int64 `[rows]`, with at least one row."""
        needed = int(positions.max()) + 1
        if needed > _MAX_POSITIONS:
            return self._angles(positions.to(torch.float32).cpu())
        self.extend(needed)
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def extend(self, num_positions: int) -> None:
        """Extend the table to the first `num_positions` positions, up to its largest size."""
        needed = min(num_positions, _MAX_POSITIONS)
        if needed > len(self._table[0]):
            size = max(_FIRST_POSITIONS, 1 << (needed - 1).bit_length())
            with torch.inference_mode(False):  # normal tensors: the table outlives the step
                self._table = self._angles(torch.arange(size, dtype=torch.float32))

    def _angles(self, positions: Tensor) -> Angles:
        values, scale = self._frequencies
        phases = positions.unsqueeze(1) * values
        pairs = (phases.cos().mul_(scale).to(self._like), phases.sin_().mul_(scale).to(self._like))
        # The two elements of a pair lie half a width apart.
        cos, sin = (torch.cat((part, part), dim=-1) for part in pairs)
        return cos, sin


def rotate(rows: Tensor, angles: Angles) -> Tensor:
    """Rotate `rows` `[rows, heads, head_dim]` by their positions, in the dtype of `rows`.

    Elements of a head beyond the angles' width do not change.
    """
    cos, sin = (part.unsqueeze(1) for part in angles)
    width = cos.shape[-1]
    rotated = rows[..., :width]
    half = width // 2
    other = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
    out = (rotated * cos + other * sin).to(rows.dtype)
    return out if width == rows.shape[-1] else torch.cat((out, rows[..., width:]), dim=-1)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": partial(functional.silu, inplace=True),
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Functions that may write to their argument, since no other code reads the tensor."""

# An MLP computes its rows in pieces, whose widest product has at most this many elements (16 MiB of
# float32). The allocator returns larger tensors to the system, and getting new pages for the next
# tensor took 5% of the time of a long prefill with int8 weights.
_PIECE = 1 << 22
_BLOCK = 128  # rows of the largest KV block, which deterministic mode computes at once


@dataclass(frozen=True)
class LayerStep:
    """The arguments that all layers share in a step.

    angles: angles of the rows, by `LayerShape.angles`. hooked: True if linear layers may have
    hooks, which need all rows at once. states: states of recurrent layers. inputs: the embeddings
    of `DecoderShape.layer_inputs`, `[rows, layers, width]`. shared: the step's K and V that later
    layers read, by `layer_idx`. row_numbers: int64 numbers of the rows that the layers compute;
    None for all rows.
    """

    backend: AttentionBackend
    angles: dict[str, Angles]
    hooked: bool = True
    states: StateMemory | None = None
    inputs: Tensor | None = None
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    row_numbers: Tensor | None = None

    def select_rows(self, rows: Tensor) -> "LayerStep":
        """Return the step for the last layers, which compute only these rows and no K and V."""
        angles = {
            kind: (cos.index_select(0, rows), sin.index_select(0, rows))
            for kind, (cos, sin) in self.angles.items()
        }
        inputs = None if self.inputs is None else self.inputs.index_select(0, rows)
        return replace(self, angles=angles, inputs=inputs, row_numbers=rows)


class FamilyModule(nn.Module):
    """A module that registers its parts under the family's names. Code uses Llama's names."""

    _names: Mapping[str, str] = {}

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._names = shape.names

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self._names:
            self.__dict__[name] = value  # so that code finds it by Llama's name
            name = self._names[name]
        super().__setattr__(name, value)


def normalize(x: Tensor, epsilon: float) -> Tensor:
    """Return `x / sqrt(mean(x ** 2) + epsilon)` in float32."""
    exact = x.float()
    return exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x ** 2) + epsilon)`, rounded as in the family."""

    def __init__(self, weight: Tensor, epsilon: float, kind: NormKind) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        exact = normalize(x, self.variance_epsilon)
        if self._kind == "llama":
            return self.weight * exact.to(x.dtype)
        weight = self.weight.float() + 1.0 if self._kind == "gemma" else self.weight
        return (exact * weight).to(x.dtype)


class Attention(FamilyModule):
    """Queries, keys and values of rows, attention over paged K/V, and the output projection."""

    qkv_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape)
        layer = shape.layers[index]
        self.layer_idx = shape.number(index)
        kv_heads, self.head_dim = shape.kv_widths(index)
        self._kind = layer.angles
        self._widths = [count * self.head_dim for count in (shape.heads, kv_heads, kv_heads)]
        self.options = AttentionOptions(shape.scaling, layer.window, shape.softcap)
        hidden, bias = shape.hidden_size, shape.qkv_bias
        self._fused, self._gated = shape.fused, shape.gated
        self._has_source, self._keys_are_values = layer.source is not None, layer.keys_are_values
        self._is_source = any(other.source == index for other in shape.layers)
        self._head_norms = shape.head_norms
        self._value_epsilon = shape.epsilon if shape.value_norm else None
        outputs = {"q_proj": self._widths[0] * (1 + shape.gated)}
        if not self._has_source:
            outputs["k_proj"] = self._widths[1]
            if not layer.keys_are_values:
                outputs["v_proj"] = self._widths[2]
        if shape.fused:
            outputs = {"qkv_proj": sum(self._widths)}
        for part, width in outputs.items():
            setattr(self, part, read.linear(f"{name}.{part}", hidden, width, bias))
        self.o_proj = read.linear(f"{name}.o_proj", self._widths[0], hidden, shape.o_bias)
        if shape.head_norms is not None:
            for part, width in zip("q" if self._has_source else "qk", self._widths, strict=False):
                count = width if shape.head_norms == "row" else self.head_dim
                weight = read.vector(f"{name}.{part}_norm", count)
                setattr(self, f"{part}_norm", RMSNorm(weight, shape.epsilon, shape.norm))

    def forward(self, x: Tensor, step: LayerStep, output_rows: Tensor | None = None) -> Tensor:
        """Return the update of all rows, or of `output_rows`; write K and V of all rows."""
        query, *others = self._project(x)
        if self._gated:
            query, gate = query.reshape(len(x), -1, 2 * self.head_dim).chunk(2, dim=-1)
        query = self._arrange(query, "q_norm", step)
        if self._has_source:
            key, value = step.shared[self.layer_idx]
        else:
            key, value = self._arrange(others[0], "k_norm", step), others[1]
            value = value.reshape(len(x), -1, self.head_dim)
            if self._value_epsilon is not None:
                value = normalize(value, self._value_epsilon).to(value.dtype)
        if self._is_source:
            step.shared[self.layer_idx] = key, value
        if step.row_numbers is not None:
            # Attention takes a query for every row. Rows outside `row_numbers` get zeros.
            queries = query.new_zeros((len(key), *query.shape[1:]))
            query, output_rows = queries.index_copy(0, step.row_numbers, query), step.row_numbers
        attended = step.backend.attend(self.layer_idx, query, key, value, self.options)
        if self._gated:
            attended = attended * torch.sigmoid(gate)
        if output_rows is not None:
            attended = attended.index_select(0, output_rows)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values, or only queries for a layer with a source."""
        if self._fused:
            parts: Sequence[Tensor] = self.qkv_proj(x).split(self._widths, dim=-1)
            return parts
        if self._has_source:
            return [self.q_proj(x)]
        query, key = self.q_proj(x), self.k_proj(x)
        return [query, key, key if self._keys_are_values else self.v_proj(x)]

    def _arrange(self, rows: Tensor, norm: str, step: LayerStep) -> Tensor:
        """Return queries or keys by head, normalized and rotated by their positions."""
        if self._head_norms == "row":
            rows = getattr(self, norm)(rows)
        rows = rows.reshape(len(rows), -1, self.head_dim)
        if self._head_norms == "head":
            rows = getattr(self, norm)(rows)
        return rows if self._kind is None else rotate(rows, step.angles[self._kind])


class MLP(FamilyModule):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape)
        hidden, bias = shape.hidden_size, shape.mlp_bias
        inner = shape.layers[index].intermediate_size or shape.intermediate_size
        self._fused = shape.fused or shape.fused_mlp
        self._widest = inner * (1 + self._fused)
        if self._fused:
            self.gate_up_proj = read.linear(f"{name}.gate_up_proj", hidden, self._widest, bias)
        else:
            self.gate_proj = read.linear(f"{name}.gate_proj", hidden, inner, bias)
            self.up_proj = read.linear(f"{name}.up_proj", hidden, inner, bias)
        self.down_proj = read.linear(f"{name}.down_proj", inner, hidden, bias)
        self._activation = ACTIVATIONS[shape.activation]
        # If True, bfloat16 rows are converted to float32 once, not around each product.
        self._computes_float32 = all(
            isinstance(linear, Linear) and linear.matrix.computes_float32
            for linear in self.children()
        )

    def forward(self, x: Tensor, hooked: bool = True) -> Tensor:
        """Return the update of `x`. hooked: see `LayerStep`."""
        if hooked or x.device.type != "cpu":
            return self._update(x)
        max_rows = max(_BLOCK, _PIECE // self._widest)
        dtype = torch.float32 if self._computes_float32 else x.dtype
        updates = [
            self._update(rows.to(dtype)).to(x.dtype)
            for rows in x.tensor_split(max(1, -(-len(x) // max_rows)))
        ]
        return torch.cat(updates) if len(updates) > 1 else updates[0]

    def _update(self, x: Tensor) -> Tensor:
        if self._fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        # In place: with many rows, fresh memory costs more than the arithmetic.
        out: Tensor = self.down_proj(self._activation(gate).mul_(up))
        return out
