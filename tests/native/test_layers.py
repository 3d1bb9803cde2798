"""Compiled parts of decoder layers compared with float64, and whole layers with their parts."""

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.attention import (
    AttentionOptions,
    LayerLayout,
    NativeAttention,
    PagedKVMemory,
)
from headstart.native import library
from headstart.native.bindings import GELU_TANH, SILU, Layer, LayerRun, Norm
from headstart.weights.bf16 import PackedWeight
from tests.attention.rows import BLOCK, TOLERANCE, plan_of, reference, spoil
from tests.native.foreign_rows import among_nonfinite
from tests.native.near import Near, exactly

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no compiled kernels here"),
    pytest.mark.usefixtures("bf16_products"),
]

BF16 = torch.bfloat16
FEW = st.integers(1, 40)
ROWS = st.one_of(FEW, FEW, FEW, st.sampled_from([130, 513]))  # 512 fit between two products
SEEDS, THREADS = st.integers(0, 2**20), st.integers(1, 3)
EPSILON = 1e-5
NUM_BLOCKS = 14


@dataclass(frozen=True)
class Shape:
    """The widths of a layer, and its optional parts."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    bias: bool
    head_norms: bool
    update_norms: bool
    gemma: bool  # norms multiply by 1 + weight
    gelu: bool


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 2)]))
    head_dim = draw(st.integers(1, 20).map(lambda half: 2 * half) | st.just(64))
    width, inner = draw(st.integers(1, 70)), draw(st.integers(1, 90))
    parts = (draw(st.booleans()) for _ in range(5))
    return Shape(width, kv_heads * group, kv_heads, head_dim, inner, *parts)


@dataclass
class RandomLayer:
    """Random weights of a layer, as floats and in the form of the kernels."""

    shape: Shape
    seed: int
    weights: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    norms: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one = self.shape
        self._generator = torch.Generator().manual_seed(self.seed)
        queries, keys = one.heads * one.head_dim, one.kv_heads * one.head_dim
        for name, outputs, inputs in (
            ("q", queries, one.width),
            ("k", keys, one.width),
            ("v", keys, one.width),
            ("o", one.width, queries),
            ("gate", one.inner, one.width),
            ("up", one.inner, one.width),
            ("down", one.width, one.inner),
        ):
            weight = self.draw(outputs, inputs) / inputs**0.5
            self.weights[name] = weight, self.draw(outputs) if one.bias else None
        for name, width in (("before", one.width), ("after", one.width)):
            self.norms[name] = 1 + self.draw(width) / 4
        for name in ("q_heads", "k_heads"):
            self.norms[name] = 1 + self.draw(one.head_dim) / 4 if one.head_norms else None
        for name in ("attention_update", "mlp_update"):
            self.norms[name] = 1 + self.draw(one.width) / 4 if one.update_norms else None
        self._packed = {name: PackedWeight(*parts) for name, parts in self.weights.items()}
        self.struct = Layer(head_dim=one.head_dim, activation=GELU_TANH if one.gelu else SILU)
        for name, packed in self._packed.items():
            setattr(self.struct, name, packed.product.struct)
        for name, norm in self.norms.items():
            if norm is not None:
                setattr(self.struct, name, Norm(norm.data_ptr(), EPSILON, one.gemma))
        self.address = ctypes.addressof(self.struct)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(BF16)

    def angles(self, rows: int) -> tuple[Tensor, Tensor]:
        turns = torch.rand(rows, self.shape.head_dim, generator=self._generator) * 6.3
        return among_nonfinite(turns.cos().to(BF16)), among_nonfinite(turns.sin().to(BF16))

    def before(self, hidden: Tensor, angles: tuple[Tensor, Tensor], threads: int) -> list[Tensor]:
        """Return queries, keys and values of the kernel, each `[rows, heads, head_dim]`."""
        heads = (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
        outs = [torch.empty(len(hidden), count, self.shape.head_dim, dtype=BF16) for count in heads]
        addresses = [part.data_ptr() for part in (*angles, *outs)]
        kernels().headstart_before_attention(
            self.address, hidden.data_ptr(), len(hidden), *addresses, threads
        )
        return outs

    def after(self, attended: Tensor, hidden: Tensor, threads: int) -> Tensor:
        """Return the next layer's hidden rows, by the kernel."""
        out = torch.empty_like(hidden)
        kernels().headstart_after_attention(
            self.address,
            attended.data_ptr(),
            hidden.data_ptr(),
            len(hidden),
            out.data_ptr(),
            threads,
        )
        return out

    def near_before(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> list[Near]:
        """Return the reference of `before`."""
        rows, dim = len(hidden), self.shape.head_dim
        normed = self._norm(exactly(hidden), "before")
        q, k, v = (normed.linear(*self.weights[name]).view(rows, -1, dim) for name in "qkv")
        return [
            self._norm(q, "q_heads").rotated(*angles),
            self._norm(k, "k_heads").rotated(*angles),
            v,
        ]

    def near_after(self, attended: Tensor, hidden: Tensor) -> Near:
        """Return the reference of `after`."""
        update = self._norm(exactly(attended).linear(*self.weights["o"]), "attention_update")
        middle = (update + exactly(hidden)).rounded()
        normed = self._norm(middle, "after")
        gate, up = (normed.linear(*self.weights[name]) for name in ("gate", "up"))
        inner = ((gate.gelu() if self.shape.gelu else gate.silu()) * up).rounded()
        return (self._norm(inner.linear(*self.weights["down"]), "mlp_update") + middle).rounded()

    def _norm(self, rows: Near, name: str) -> Near:
        return rows.norm(self.norms[name], EPSILON, self.shape.gemma)


def kernels() -> ctypes.CDLL:
    built = library()
    assert built is not None
    return built


@given(shape=shapes(), rows=ROWS, seed=SEEDS, threads=THREADS)
def test_queries_keys_and_values_are_those_of_float64(
    shape: Shape, rows: int, seed: int, threads: int
) -> None:
    layer = RandomLayer(shape, seed)
    hidden, angles = among_nonfinite(layer.draw(rows, shape.width)), layer.angles(rows)
    outputs = layer.before(hidden, angles, threads)
    for out, expected in zip(outputs, layer.near_before(hidden, angles), strict=True):
        expected.check(out)


@given(shape=shapes(), rows=ROWS, seed=SEEDS, threads=THREADS)
def test_hidden_rows_after_attention_are_those_of_float64(
    shape: Shape, rows: int, seed: int, threads: int
) -> None:
    layer = RandomLayer(shape, seed)
    hidden = among_nonfinite(layer.draw(rows, shape.width))
    attended = among_nonfinite(layer.draw(rows, shape.heads * shape.head_dim))
    layer.near_after(attended, hidden).check(layer.after(attended, hidden, threads))


class PagedLayers:
    """Layers over one memory, whose slots are not finite until a step writes them."""

    def __init__(self, layers: list[RandomLayer], windows: list[int | None], seed: int) -> None:
        shape = layers[0].shape
        self.layers, self.shape = layers, shape
        self.options = [AttentionOptions(shape.head_dim**-0.5, window) for window in windows]
        layout = LayerLayout(shape.kv_heads, shape.head_dim, shape.head_dim)
        memory = PagedKVMemory([layout] * len(layers), NUM_BLOCKS, BLOCK, BF16, "cpu")
        spoil(memory)
        self.backend = NativeAttention(memory, kernels())
        generator = torch.Generator().manual_seed(seed)
        self.blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()

    def run(self, hidden: Tensor, angles: list[tuple[Tensor, Tensor]], threads: int) -> Tensor:
        """Run all layers in one call, each with its angles."""
        rows = (len(hidden), self.shape.heads)
        runs = (LayerRun * len(self.layers))()
        for at, (layer, options) in enumerate(zip(self.layers, self.options, strict=True)):
            call = self.backend.compiled(at, rows, options, BF16)
            assert call is not None
            runs[at] = LayerRun(layer.address, *call, *(part.data_ptr() for part in angles[at]))
        rows_between = among_nonfinite(hidden)
        kernels().headstart_layers(
            ctypes.addressof(runs), len(runs), rows_between.data_ptr(), len(rows_between), threads
        )
        return rows_between


@given(shape=shapes(), data=st.data(), seed=SEEDS, threads=THREADS)
def test_layers_are_their_parts_bit_for_bit(
    shape: Shape, data: st.DataObject, seed: int, threads: int
) -> None:
    """Attention between them is that of float64, over this step's rows and earlier ones."""
    counts = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    windows = data.draw(st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=3))
    layers = [RandomLayer(shape, seed + at) for at in range(len(windows))]
    paged = PagedLayers(layers, windows, seed)
    caches: dict[tuple[int, int], list[list[Tensor]]] = {}  # K and V of a layer and a sequence
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for extra, rows in ((0, counts), (1, [1] * len(counts))):
            plan = plan_of(rows, [count + extra for count in counts], paged.blocks)
            hidden = layers[0].draw(len(plan.slots), shape.width)
            angles = [layer.angles(len(hidden)) for layer in layers]
            paged.backend.begin_step(plan)
            together = paged.run(hidden, angles, threads)
            for at, (layer, options) in enumerate(zip(layers, paged.options, strict=True)):
                q, k, v = layer.before(hidden, angles[at], threads)
                attended = paged.backend.attend(at, q, k, v, options)
                for number, span in enumerate(plan.spans):
                    own = slice(span.first_row, span.first_row + span.num_rows)
                    parts = caches.setdefault((at, number), [[], []])
                    parts[0].append(k[own])
                    parts[1].append(v[own])
                    expected = reference(q[own], *(torch.cat(part) for part in parts), options)
                    rtol, atol = TOLERANCE[BF16]
                    torch.testing.assert_close(
                        attended[own].double(), expected, rtol=rtol, atol=atol
                    )
                hidden = layer.after(attended, hidden, threads)
            paged.backend.end_step()
            assert torch.equal(together, hidden)
    finally:
        torch.set_num_threads(before)
