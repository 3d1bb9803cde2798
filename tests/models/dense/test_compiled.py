"""Layers with products of float32 as one compiled call, compared with float64 and modules."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headstart.attention import LayerLayout, NativeAttention, PagedKVMemory, Span, StepPlan
from headstart.models.dense.compiled import CompiledLayers, compile_layers
from headstart.models.dense.layer import DecoderLayer
from headstart.models.dense.modules import ACTIVATIONS, LayerStep, RMSNorm
from headstart.models.shapes import DecoderShape, LayerShape
from headstart.native import avx2_library, library
from headstart.weights.bf16 import MANY_ROWS, Bf16Weight
from headstart.weights.format import Linear
from headstart.weights.quantize import quantize
from tests.attention.rows import BLOCK, plan_of, reference, spoil
from tests.native.foreign_rows import among_nonfinite

pytestmark = pytest.mark.skipif(avx2_library() is None, reason="no compiled kernels for AVX2 here")

NUM_BLOCKS = 14
KINDS = ["near", "far"]  # of angles
Angles = dict[str, tuple[Tensor, Tensor]]


class RandomReader:
    """A reader of seeded random weights, in bfloat16 or of a kind; other numbers are in `dtype`."""

    def __init__(self, seed: int, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._kind, self._dtype = kind, dtype

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        weight = (self.draw(outputs, inputs) / inputs**0.5).bfloat16()
        own = self.draw(outputs) if bias else None
        if self._kind == "bfloat16":
            return Linear(Bf16Weight(weight, own))
        return Linear(quantize(weight, own, self._kind))  # type: ignore[arg-type]

    def vector(self, name: str, width: int) -> Tensor:
        return 1 + self.draw(width) / 4

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.draw(*shape)

    def draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self._dtype)


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 2)]))
    bias = draw(st.booleans())
    windows = draw(st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=3))
    kinds = [draw(st.sampled_from(KINDS)) for _ in windows]
    head_dim = draw(st.integers(1, 20).map(lambda half: 2 * half) | st.just(64))
    return DecoderShape(
        vocab_size=1,
        hidden_size=draw(st.integers(1, 70)),
        intermediate_size=draw(st.integers(1, 90)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(map(LayerShape, windows, kinds)),
        epsilon=1e-5,
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        scaling=head_dim**-0.5,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_norms=draw(st.sampled_from([None, "head"])),
        norm=draw(st.sampled_from(["llama", "gemma"])),
        norms=draw(st.sampled_from(["before", "around"])),
    )


@dataclass
class Exact:
    """Layers in float64, with the K and V of all rows so far by layer and sequence."""

    layers: list[DecoderLayer]
    shape: DecoderShape

    def __post_init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    def run(self, x: Tensor, angles: Angles, plan: StepPlan) -> Tensor:
        for layer, about in zip(self.layers, self.shape.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            normed = self._norm(layer.input_layernorm, x)
            q, k, v = (
                _linear(attention.get_submodule(f"{name}_proj"), normed).view(
                    len(x), -1, self.shape.head_dim
                )
                for name in "qkv"
            )
            if self.shape.head_norms is not None:
                q, k = self._norm(attention.q_norm, q), self._norm(attention.k_norm, k)
            assert about.angles is not None
            q, k = _turn(q, angles[about.angles]), _turn(k, angles[about.angles])
            attended = torch.cat(
                [self._attend(layer, *each, q, k, v) for each in enumerate(plan.spans)]
            )
            update = _linear(attention.o_proj, attended.flatten(1))
            after = layer.post_attention_layernorm
            if self.shape.norms == "around":
                update = self._norm(after, update)
                after = layer.pre_feedforward_layernorm
            x = x + update
            normed = self._norm(after, x)
            gate, up = _linear(mlp.gate_proj, normed), _linear(mlp.up_proj, normed)
            update = _linear(mlp.down_proj, ACTIVATIONS[self.shape.activation](gate) * up)
            if self.shape.norms == "around":
                update = self._norm(layer.post_feedforward_layernorm, update)
            x = x + update
        return x

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(norm, RMSNorm)
        weight = norm.weight.double() + (self.shape.norm == "gemma")
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def _attend(
        self, layer: DecoderLayer, number: int, span: Span, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        own = slice(span.first_row, span.first_row + span.num_rows)
        place = (layer.self_attn.layer_idx, number)
        before = self._kept.get(place, [k[:0], v[:0]])
        self._kept[place] = [torch.cat([a, b[own]]) for a, b in zip(before, (k, v), strict=True)]
        return reference(q[own], *self._kept[place], layer.self_attn.options)


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, Linear) and isinstance(module.matrix, Bf16Weight)
    weight, bias = module.matrix.weight.double(), module.matrix.bias
    return x @ weight.T + (0.0 if bias is None else bias.double())


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.double().unsqueeze(1) for part in angles)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@dataclass
class Step:
    plan: StepPlan
    rows: Tensor
    angles: Angles
    compiled: Tensor
    modules: Tensor

    def apart(self, expected: Tensor) -> float:
        """Return the distance of the compiled rows, relative to the expected rows."""
        return float((self.compiled.double() - expected).norm() / (1 + expected.norm()))


@dataclass
class Pair:
    """Random layers as modules and as one compiled call, each with separate memory.

    Rows are in bfloat16 if the memory is, otherwise in float32.
    """

    shape: DecoderShape
    kind: str
    memory_dtype: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        is_half = self.memory_dtype == torch.bfloat16
        self._dtype = torch.bfloat16 if is_half else torch.float32
        self._reader = RandomReader(self.seed, self.kind, self._dtype)
        count = len(self.shape.layers)
        self.layers = [DecoderLayer(self.shape, at, "", self._reader) for at in range(count)]
        compiled, kernels = compile_layers(self.layers, self.shape, self._dtype), avx2_library()
        assert isinstance(compiled, CompiledLayers) and kernels is not None
        self._compiled = compiled
        layout = LayerLayout(self.shape.kv_heads, self.shape.head_dim, self.shape.head_dim)
        self._backends = []
        for _ in range(2):
            memory = PagedKVMemory([layout] * count, NUM_BLOCKS, BLOCK, self.memory_dtype, "cpu")
            spoil(memory)
            self._backends.append(NativeAttention(memory, kernels))

    def run(self, counts: list[int]) -> Iterator[Step]:
        """Yield a step of `counts` rows, and a step of one more row for each sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        for extra, rows in ((0, counts), (1, [1] * len(counts))):
            plan = plan_of(rows, [count + extra for count in counts], blocks)
            hidden = among_nonfinite(self._reader.draw(len(plan.slots), self.shape.hidden_size))
            original_rows = hidden.clone()
            angles = {kind: self._angles(len(hidden), generator) for kind in KINDS}
            for backend in self._backends:
                backend.begin_step(plan)
            compiled = self._compiled(hidden, angles, self._backends[0], None)
            assert compiled is not None and torch.equal(hidden, original_rows)
            x = hidden
            for layer in self.layers:
                x = layer(x, LayerStep(self._backends[1], angles, hooked=False))
            for backend in self._backends:
                backend.end_step()
            yield Step(plan, hidden, angles, compiled, x)

    def _angles(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        turns = torch.rand(rows, self.shape.head_dim, generator=generator) * 6.3
        cos, sin = (among_nonfinite(part.to(self._dtype)) for part in (turns.cos(), turns.sin()))
        return cos, sin


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


COUNTS = st.lists(st.integers(1, 7), min_size=1, max_size=3)
ATTEMPTS = 100
SEEDS, THREADS = st.integers(0, 2**20), st.integers(1, 3)
TOLERANCE = 2e-5
NEAR = 0.1  # a few in a hundred draws are more than TOLERANCE apart, and those by 0.003 at most


@given(shape=shapes(), counts=COUNTS, seed=SEEDS, threads=THREADS)
def test_layers_are_those_of_float64_and_of_their_modules(
    shape: DecoderShape, counts: list[int], seed: int, threads: int
) -> None:
    """Attention reads rows of this step and earlier ones; other slots are not finite."""
    pair = Pair(shape, "bfloat16", torch.float32, seed)
    exact = Exact(pair.layers, shape)
    with on_threads(threads):
        for step in pair.run(counts):
            assert step.apart(step.modules) <= TOLERANCE
            assert step.apart(exact.run(step.rows.double(), step.angles, step.plan)) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "memory_dtype"),
    [
        *(("bfloat16", dtype) for dtype in (torch.float32, torch.int8)),
        *product(["int8", "int5", "int4"], [torch.float32, torch.int8, torch.bfloat16]),
    ],
)
@given(shape=shapes(), counts=COUNTS, seed=SEEDS, threads=THREADS)
def test_layers_that_round_numbers_are_their_modules(
    kind: str,
    memory_dtype: torch.dtype,
    shape: DecoderShape,
    counts: list[int],
    seed: int,
    threads: int,
) -> None:
    """One of many draws must have the modules' rows; with a wrong layer none has them.

    Where an 8-bit number is a near tie and is rounded the other way in the modules, later ones may
    be too: such a draw differs a little, and none by much. In bfloat16 the same is true of every
    number.
    """
    if memory_dtype == torch.bfloat16 and library() is None:
        pytest.skip("no compiled kernels for bfloat16 here")
    with on_threads(threads):
        for at in range(ATTEMPTS):
            pair = Pair(shape, kind, memory_dtype, seed + at)
            apart = [step.apart(step.modules) for step in pair.run(counts)]
            # The norm of a row of few numbers near zero makes a small error large.
            assert all(one <= (NEAR if shape.hidden_size >= 8 else math.inf) for one in apart)
            if all(one <= TOLERANCE for one in apart):
                return
    pytest.fail(f"of {ATTEMPTS} draws none has the modules' rows")


SHAPE = DecoderShape(
    vocab_size=1,
    hidden_size=48,
    intermediate_size=80,
    heads=4,
    kv_heads=2,
    head_dim=12,
    layers=(LayerShape(), LayerShape()),
    epsilon=1e-5,
    activation="silu",
    scaling=0.3,
    tied=True,
)


def test_output_rows_equal_all_rows_and_many_rows_are_left_to_modules() -> None:
    reader = RandomReader(1, "bfloat16")
    layers = [DecoderLayer(SHAPE, at, "", reader) for at in range(2)]
    compiled = compile_layers(layers, SHAPE, torch.float32)
    kernels = avx2_library()
    assert compiled is not None and kernels is not None
    blocks = list(range(-(-MANY_ROWS // BLOCK)))
    layouts = [LayerLayout(2, 12, 12)] * 2
    memory = PagedKVMemory(layouts, len(blocks), BLOCK, torch.float32, "cpu")
    backend = NativeAttention(memory, kernels)
    for rows in (5, MANY_ROWS - 1, MANY_ROWS):
        plan = StepPlan(torch.arange(rows), (Span(0, rows, rows, blocks),))
        hidden, turns = reader.draw(rows, 48), reader.draw(rows, 12)
        angles = {"": (turns.cos(), turns.sin())}
        backend.begin_step(plan)
        full = compiled(hidden, angles, backend, None)
        output_rows = torch.tensor([0, rows - 1])
        some = compiled(hidden, angles, backend, output_rows)
        backend.end_step()
        if rows < MANY_ROWS:
            assert full is not None and some is not None
            assert torch.equal(some, full[output_rows])
        else:
            assert full is None and some is None


@pytest.mark.skipif(library() is None, reason="no compiled kernels for bfloat16 here")
def test_rows_in_bfloat16_have_the_same_bits_in_steps_of_any_size() -> None:
    reader = RandomReader(1, "int8", torch.bfloat16)
    layers = [DecoderLayer(SHAPE, at, "", reader) for at in range(2)]
    compiled, kernels = compile_layers(layers, SHAPE, torch.bfloat16), library()
    assert compiled is not None and kernels is not None
    rows, blocks = 600, list(range(-(-600 // BLOCK)))
    memory = PagedKVMemory([LayerLayout(2, 12, 12)] * 2, len(blocks), BLOCK, torch.bfloat16, "cpu")
    backend = NativeAttention(memory, kernels)
    hidden, turns = reader.draw(rows, 48), reader.draw(rows, 12)

    def run(first: int, last: int) -> Tensor:
        part = slice(first, last)
        plan = StepPlan(torch.arange(first, last), (Span(0, last - first, last, blocks),))
        backend.begin_step(plan)
        out = compiled(hidden[part], {"": (turns[part].cos(), turns[part].sin())}, backend, None)
        backend.end_step()
        assert out is not None
        return out

    expected = run(0, rows)
    edges = (0, 1, 300, 590, rows)
    assert torch.equal(torch.cat([run(*edge) for edge in pairwise(edges)]), expected)


@pytest.mark.parametrize(
    "changes",
    [
        *({"activation": "gelu"}, {"norm": "olmo"}, {"norms": "after"}, {"head_norms": "row"}),
        *({"residual_scale": 0.5}, {"value_norm": True}, {"layer_scalars": True}),
        *({"fused": True}, {"partial_rotary": True}, {"exact_angles": True}),
        {"layers": (LayerShape(), LayerShape(angles=None))},
        {"layers": (LayerShape(), LayerShape(kv_heads=1))},
    ],
    ids=str,
)
def test_layers_of_another_kind_are_left_to_modules(changes: dict[str, Any]) -> None:
    for shape, runs in ((SHAPE, True), (replace(SHAPE, **changes), False)):
        reader = RandomReader(1, "bfloat16")
        layers = [DecoderLayer(shape, at, "", reader) for at in range(2)]
        assert (compile_layers(layers, shape, torch.float32) is not None) == runs
        assert compile_layers(layers, shape, torch.bfloat16) is None
