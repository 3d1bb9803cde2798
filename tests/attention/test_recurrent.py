"""Recurrent layers compared with their definition in float64 and with transformers."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from headstart import native
from headstart.attention.recurrent import CHUNK
from tests.attention.recurrences import LAYERS, Batch, Conv, Delta, Layer, Mamba, Piece

SLOTS = 9
PADDING = 24  # numbers of a slot that are not the layer's
# Relative to a value, and absolute.
TOLERANCE = {torch.float32: (2e-4, 2e-5), torch.bfloat16: (0.01, 0.01)}

KERNELS = {"avx2": 0, "avx512": 2}
"""The argument of the compiled kernels that selects AVX2 alone, or AVX-512."""


@contextmanager
def computing(path: str) -> Iterator[None]:
    """Compute by torch operations or one of `KERNELS`; skip the test where that is impossible."""
    if path == "torch":
        with patch.dict(os.environ, HEADSTART_NATIVE="0"):
            yield
        return
    library, number = native.avx2_library(), KERNELS[path]
    if library is None or number & ~library.headstart_native_vnni():
        pytest.skip(f"no compiled kernels for {path} here")
    library.headstart_native_use_vnni(number)
    try:
        yield
    finally:
        library.headstart_native_use_vnni(native.vnni())


each_path = pytest.mark.parametrize("path", ["torch", *KERNELS])
each_kernel = pytest.mark.parametrize("path", KERNELS)
each_layer = pytest.mark.parametrize("name", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def make_states(layer: Layer, slots: int = SLOTS) -> Tensor:
    """Return random states as a strided view: states of other layers lie between them."""
    numbers = torch.Size(layer.state_shape).numel()
    wide = torch.randn(slots, numbers + PADDING) * 0.3
    wide[:, :8] = wide[:, 8 + numbers :] = float("nan")
    return wide[:, 8 : 8 + numbers].view(slots, *layer.state_shape)


def whole_slots(states: Tensor) -> Tensor:
    """Return the whole array that `make_states` created."""
    assert states._base is not None
    return states._base


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = TOLERANCE[dtype]
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol * (1 + scale))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw pieces of any length; each target is a separate slot, and no other piece's source."""
    counts = draw(st.lists(st.integers(0, 5) | st.integers(0, 150), min_size=1, max_size=4))
    slots = draw(st.permutations(range(SLOTS)))
    targets, others = slots[: len(counts)], [-1, *slots[len(counts) :]]
    sources = [draw(st.sampled_from([target, *others])) for target in targets]
    positions = draw(st.lists(st.integers(0, 200), min_size=len(counts), max_size=len(counts)))
    fields = zip(counts, sources, targets, positions, strict=True)
    return Batch(tuple(Piece(*piece) for piece in fields))


def run(
    layer: Layer, rows: list[Tensor], states: Tensor, batch: Batch, path: str, threads: int = 1
) -> Tensor:
    """Compute a step in place of `states`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with computing(path):
            return layer.run(rows, states, batch.recurrence())
    finally:
        torch.set_num_threads(before)


@each_path
@each_dtype
@each_layer
@settings(max_examples=15)  # of each of 60 cases
@given(batch=batches(), seed=st.integers(0, 5), threads=st.integers(1, 3))
def test_a_step_follows_the_definition(
    name: str, dtype: torch.dtype, path: str, batch: Batch, seed: int, threads: int
) -> None:
    """All inputs and states are surrounded by NaN; slots that are not targets do not change."""
    torch.manual_seed(seed)
    layer = LAYERS[name]()
    rows, states = layer.make_rows(batch.num_rows, dtype), make_states(layer)
    expected, after = layer.expect(rows, states, batch)
    before = states.clone()
    out = run(layer, rows, states, batch, path, threads)
    assert out.dtype == dtype
    if batch.num_rows:
        check(out, expected, dtype)
    check(states, after)
    targets = {piece.target for piece in batch.pieces}
    untouched = [slot for slot in range(SLOTS) if slot not in targets]
    assert torch.equal(states[untouched], before[untouched])
    assert whole_slots(states).isnan().sum() == SLOTS * PADDING


# Where a prompt of some rows is cut: up to 3 times.
cuts = st.lists(st.integers(0, 70), max_size=3).map(sorted)


@each_kernel
@each_dtype
@each_layer
@settings(max_examples=15)  # of each of 40 cases
@given(prompts=st.lists(cuts, min_size=1, max_size=3), threads=st.integers(1, 3))
def test_kernels_give_a_sequence_the_same_bits_in_any_cut_and_batch(
    name: str, dtype: torch.dtype, path: str, prompts: list[list[int]], threads: int
) -> None:
    torch.manual_seed(len(prompts[0]))
    layer, count = LAYERS[name](), len(prompts)
    sequences = [layer.make_rows(71, dtype) for _ in prompts]
    alone = make_states(layer, 2 * count)
    together = whole_slots(alone).clone()[:, 8:-16].view_as(alone)
    expected = [
        run(layer, rows, alone, Batch((Piece(71, count + number, number),)), path)
        for number, rows in enumerate(sequences)
    ]
    outs: list[list[Tensor]] = [[] for _ in prompts]
    ends = [[0, *prompt, *[71] * (4 - len(prompt))] for prompt in prompts]
    for step in range(4):
        spans = [(end[step], end[step + 1]) for end in ends]
        pieces = [
            Piece(end - start, number if step else count + number, number, start)
            for number, (start, end) in enumerate(spans)
        ]
        parts = [
            [part[start:end] for part in rows]
            for rows, (start, end) in zip(sequences, spans, strict=True)
        ]
        rows = [torch.cat(columns) for columns in zip(*parts, strict=True)]
        out = run(layer, rows, together, Batch(tuple(pieces)), path, threads)
        for number, part in enumerate(torch.split(out, [piece.count for piece in pieces])):
            outs[number].append(part)
    assert all(torch.equal(torch.cat(o), e) for o, e in zip(outs, expected, strict=True))
    assert torch.equal(together, alone)


@each_dtype
@each_layer
def test_all_instruction_sets_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, batch = LAYERS[name](), Batch((Piece(40, -1, 0), Piece(1, 1, 1), Piece(17, 3, 2)))
    rows, states = layer.make_rows(batch.num_rows, dtype), make_states(layer)
    results = []
    for path in KERNELS:
        after = states.clone()
        results.append((run(layer, rows, after, batch, path), after))
    (first, first_states), (second, second_states) = results
    assert torch.equal(first, second)
    assert torch.equal(first_states, second_states)


@each_layer
def test_torch_operations_give_a_prompt_one_result_wherever_it_is_cut(name: str) -> None:
    torch.manual_seed(0)
    layer, length = LAYERS[name](), 2 * CHUNK + 40
    rows, states = layer.make_rows(length, torch.float32), make_states(layer, 2)
    whole = run(layer, rows, states, Batch((Piece(length, -1, 0),)), "torch")
    for cut in (1, 2, 63, 64, 65, 127, length - 1):
        parts, source = [], -1
        for start, end in ((0, cut), (cut, length)):
            batch = Batch((Piece(end - start, source, 1, start),))
            parts.append(run(layer, [row[start:end] for row in rows], states, batch, "torch"))
            source = 1
        check(torch.cat(parts), whole.double())
        check(states[1], states[0].double())


@each_path
@each_dtype
@each_layer
def test_a_sequence_that_is_not_finite_does_not_affect_others(
    name: str, dtype: torch.dtype, path: str
) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name]()
    batch = Batch((Piece(30, 3, 2), Piece(40, 1, 1, 7), Piece(10, -1, 0), Piece(20, -1, 4)))
    rows, states = layer.make_rows(batch.num_rows, dtype), make_states(layer)
    states[3] = float("nan")
    for part in rows:
        part[80:] = float("nan")
    _, after = layer.expect(rows, states, batch)
    out = run(layer, rows, states, batch, path)
    assert out[0].isnan().any()
    assert out[80:].isnan().all()
    assert out[30:80].isfinite().all()
    check(states[:2], after[:2])


@each_path
def test_conv_equals_that_of_lfm2(path: str) -> None:
    torch.manual_seed(0)
    layer = Conv(48, 3, bias=True, silu=False)
    rows, states = layer.make_rows(50, torch.float32), make_states(layer, 1)
    whole = rows[0].T.unsqueeze(0)
    expected = lfm2.causal_conv1d_fn(whole, layer.weight, layer.bias)
    out = run(layer, rows, states, Batch((Piece(50, -1, 0),)), path)
    check(out, expected[0].T.double())
    state = whole[:, :, -2:].clone()
    [row] = layer.make_rows(1, torch.float32)
    expected = lfm2.causal_conv1d_update(row.T.unsqueeze(0), state, layer.weight, layer.bias)
    out = run(layer, [row], states, Batch((Piece(1, 0, 0, 50),)), path)
    check(out, expected[0].T.double())
    check(states[0], state[0].T.double())


@each_path
@pytest.mark.parametrize("function", ["chunk", "recurrent"])
def test_the_delta_rule_equals_that_of_qwen(function: str, path: str) -> None:
    torch.manual_seed(0)
    layer = Delta(2, 4, 32, 16)
    rows, states = layer.make_rows(150, torch.float32), make_states(layer, 2)
    query, key, value, a, b = (part.unsqueeze(0) for part in rows)
    expected, after = getattr(qwen, f"torch_{function}_gated_delta_rule")(
        query,
        key,
        value,
        g=-layer.a_log.exp() * F.softplus(a + layer.dt_bias),
        beta=b.sigmoid(),
        initial_state=states[:1].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = run(layer, rows, states, Batch((Piece(150, 0, 1, 5),)), path)
    check(out, expected[0].double())
    check(states[1], after[0].double())


@each_path
def test_the_scan_equals_that_of_granite(path: str) -> None:
    torch.manual_seed(0)
    layer = Mamba(2, 4, 16, 32)
    rows, states = layer.make_rows(150, torch.float32), make_states(layer, 2)
    x, b, c, dt = (part.unsqueeze(0) for part in rows)
    expected, after = granite.mamba2_chunk_scan(
        x,
        dt,
        -layer.a_log.exp(),
        b,
        c,
        chunk_size=32,
        D=layer.d,
        dt_bias=layer.dt_bias,
        initial_states=states[:1].clone(),
        dt_softplus=True,
        dt_limit=layer.limits,
        return_final_states=True,
    )
    out = run(layer, rows, states, Batch((Piece(150, 0, 1, 5),)), path)
    check(out, expected[0].double())
    check(states[1], after[0].double())


@each_path
@each_dtype
@each_layer
def test_states_are_saved_within_a_step(name: str, dtype: torch.dtype, path: str) -> None:
    """With the kernels, a saved state has the bits of a sequence that ends there."""
    torch.manual_seed(2)
    layer, length = LAYERS[name](), 70
    rows, states = layer.make_rows(length + 5, dtype), make_states(layer, 8)
    ends = (1, 16, 37, 64, length)
    saves = torch.tensor([[end - 1, 2 + i] for i, end in enumerate(ends)], dtype=torch.int32)
    recurrence = Batch((Piece(length, 1, 0), Piece(5, -1, 7))).recurrence()
    expected = states.clone()
    with computing(path):
        layer.run(rows, states, dataclasses.replace(recurrence, saves=saves))
    for i, end in enumerate(ends):
        part = [row[:end] for row in rows]
        run(layer, part, expected, Batch((Piece(end, 1, 2 + i),)), path)
    if path == "torch":
        check(states[2:7], expected[2:7].double())
    else:
        assert torch.equal(states[2:7], expected[2:7])
    assert torch.equal(states[1], expected[1])
