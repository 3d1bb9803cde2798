"""Recurrent layers against their definition in float64 and against transformers' functions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from headstart.attention.recurrent import CHUNK
from tests.attention.recurrences import LAYERS, Batch, Conv, Delta, Layer, Mamba, Piece

SLOTS = 9
# Relative to a value, and absolute.
TOLERANCE = {torch.float32: (2e-4, 2e-5), torch.bfloat16: (0.01, 0.01)}

each_layer = pytest.mark.parametrize("name", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def make_states(layer: Layer, slots: int = SLOTS) -> Tensor:
    """Random states, as a strided view: other layers' states lie between them."""
    numbers = torch.Size(layer.state_shape).numel()
    wide = torch.randn(slots, numbers + 24)
    wide[:, :8] = wide[:, 8 + numbers :] = float("nan")
    return wide[:, 8 : 8 + numbers].view(slots, *layer.state_shape)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = TOLERANCE[dtype]
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol * (1 + scale))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Pieces of any length; each target is a slot of its own, and no other piece's source."""
    counts = draw(st.lists(st.integers(0, 5) | st.integers(0, 150), min_size=1, max_size=4))
    slots = draw(st.permutations(range(SLOTS)))
    targets, others = slots[: len(counts)], [-1, *slots[len(counts) :]]
    sources = [draw(st.sampled_from([target, *others])) for target in targets]
    positions = draw(st.lists(st.integers(0, 200), min_size=len(counts), max_size=len(counts)))
    fields = zip(counts, sources, targets, positions, strict=True)
    return Batch(tuple(Piece(*piece) for piece in fields))


@each_dtype
@each_layer
@given(batch=batches(), seed=st.integers(0, 5))
def test_a_step_is_that_of_the_definition(
    name: str, dtype: torch.dtype, batch: Batch, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = LAYERS[name]()
    rows, states = layer.make_rows(batch.num_rows, dtype), make_states(layer)
    states[:, ..., :1] *= 3
    expected, after = layer.expect(rows, states, batch)
    before, recurrence = states.clone(), batch.recurrence()
    out = layer.run(rows, states, recurrence)
    assert out.dtype == dtype
    if batch.num_rows:
        check(out, expected, dtype)
    check(states, after)
    targets = {piece.target for piece in batch.pieces}
    untouched = [slot for slot in range(SLOTS) if slot not in targets]
    assert torch.equal(states[untouched], before[untouched])


@each_layer
def test_a_prompt_cut_anywhere_has_one_result(name: str) -> None:
    torch.manual_seed(0)
    layer, length = LAYERS[name](), 2 * CHUNK + 40
    rows, states = layer.make_rows(length, torch.float32), make_states(layer, 2)
    whole = layer.run(rows, states, Batch((Piece(length, -1, 0),)).recurrence())
    for cut in (1, 2, 63, 64, 65, 127, length - 1):
        parts, source = [], -1
        for start, end in ((0, cut), (cut, length)):
            piece = Piece(end - start, source, 1, start)
            part = [row[start:end] for row in rows]
            parts.append(layer.run(part, states, Batch((piece,)).recurrence()))
            source = 1
        check(torch.cat(parts), whole.double())
        check(states[1], states[0].double())


@each_layer
def test_a_sequence_that_is_not_finite_leaves_others_alone(name: str) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name]()
    rows, states = layer.make_rows(80, torch.float32), make_states(layer)
    states[3] = float("nan")
    batch = Batch((Piece(30, 3, 2), Piece(40, 1, 1, 7), Piece(10, -1, 0)))
    _, after = layer.expect(rows, states, batch)
    out = layer.run(rows, states, batch.recurrence())
    assert out[:30].isnan().any()
    assert out[30:].isfinite().all()
    check(states[:2], after[:2])


def test_conv_is_that_of_lfm2() -> None:
    torch.manual_seed(0)
    layer = Conv(48, 3, bias=True, silu=False)
    rows, states = layer.make_rows(50, torch.float32), make_states(layer, 1)
    whole = rows[0].T.unsqueeze(0)
    expected = lfm2.causal_conv1d_fn(whole, layer.weight, layer.bias)
    out = layer.run(rows, states, Batch((Piece(50, -1, 0),)).recurrence())
    check(out, expected[0].T.double())
    state = whole[:, :, -2:].clone()
    [row] = layer.make_rows(1, torch.float32)
    expected = lfm2.causal_conv1d_update(row.T.unsqueeze(0), state, layer.weight, layer.bias)
    out = layer.run([row], states, Batch((Piece(1, 0, 0, 50),)).recurrence())
    check(out, expected[0].T.double())
    check(states[0], state[0].T.double())


@pytest.mark.parametrize("function", ["chunk", "recurrent"])
def test_the_delta_rule_is_that_of_qwen(function: str) -> None:
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
    out = layer.run(rows, states, Batch((Piece(150, 0, 1, 5),)).recurrence())
    check(out, expected[0].double())
    check(states[1], after[0].double())


def test_the_scan_is_that_of_granite() -> None:
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
    out = layer.run(rows, states, Batch((Piece(150, 0, 1, 5),)).recurrence())
    check(out, expected[0].double())
    check(states[1], after[0].double())
