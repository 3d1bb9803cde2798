"""The torch backend against attention written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.attention import (
    AttentionOptions,
    LayerLayout,
    PagedKVMemory,
    Span,
    StepPlan,
    TorchAttention,
    torch_ops,
)
from tests.attention.rows import BLOCK, OPTIONS, Sequence, check, reference, run_step


def setup(
    lengths: list[int], layout: LayerLayout, heads: int = 6, seed: int = 0
) -> tuple[TorchAttention, list[Sequence], PagedKVMemory]:
    torch.manual_seed(seed)
    needed = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(needed) + 3).tolist()
    memory = PagedKVMemory([layout], len(blocks), BLOCK, torch.float32, "cpu")
    sequences = []
    for length, count in zip(lengths, needed, strict=True):
        sequences.append(Sequence(length, layout, heads, [blocks.pop() for _ in range(count)]))
    return TorchAttention(memory), sequences, memory


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "layout", [LayerLayout(2, 8, 8), LayerLayout(6, 8, 5), LayerLayout(1, 4, 8)], ids=str
)
def test_prompts_in_pieces_and_decodes_side_by_side(
    options: AttentionOptions, layout: LayerLayout
) -> None:
    backend, (a, b, c), _ = setup([23, 17, 9], layout)
    for work in (
        [(a, 7), (b, 5)],
        [(b, 1), (a, 9), (c, 8)],
        [(a, 1), (b, 1), (c, 1)],
        [(a, 1), (b, 10), (a, 0)][:2],
        [(a, 5)],
    ):
        for (sequence, _), out in zip(work, run_step(backend, work, options), strict=True):
            check(sequence, out, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_of_rows(options: AttentionOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "CHUNK_ROWS", 3)
    backend, (a, b), _ = setup([22, 11], LayerLayout(3, 4, 6))
    for work in ([(a, 2), (b, 10)], [(a, 20)]):
        for (sequence, _), out in zip(work, run_step(backend, work, options), strict=True):
            check(sequence, out, options)


@settings(max_examples=60)
@given(data=st.data(), window=st.none() | st.integers(1, 30), seed=st.integers(0, 5))
def test_any_batch(data: st.DataObject, window: int | None, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    backend, sequences, _ = setup(lengths, LayerLayout(2, 4, 3), heads=4, seed=seed)
    options = AttentionOptions(scaling=0.7, sliding_window=window)
    while waiting := [s for s in sequences if s.done < len(s.q)]:
        work = []
        for sequence in waiting:
            left = len(sequence.q) - sequence.done
            work.append((sequence, data.draw(st.sampled_from([1, 1, 2, 5, left])) if left else 0))
        work = [(sequence, min(n, len(sequence.q) - sequence.done)) for sequence, n in work]
        gather = data.draw(st.booleans())
        outs = run_step(backend, work, options, contiguous_gather=gather)
        for (sequence, _), out in zip(work, outs, strict=True):
            check(sequence, out, options)


@pytest.mark.parametrize("group_tokens", [1, 40, 16_384])
def test_many_decodes_of_all_lengths(group_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "GROUP_TOKENS", group_tokens)
    monkeypatch.setattr(torch_ops, "SMALL_GAP", 2)
    lengths = [40, 3, 39, 1, 17, 30, 31, 2]
    backend, sequences, _ = setup(lengths, LayerLayout(2, 8, 8))
    long = [(s, len(s.q) - 1) for s in sequences if len(s.q) > 1]
    run_step(backend, long, OPTIONS["plain"])
    work = [(sequence, 1) for sequence in sequences]
    for (sequence, _), out in zip(work, run_step(backend, work, OPTIONS["plain"]), strict=True):
        check(sequence, out, OPTIONS["plain"])


def test_sequences_of_one_step_share_blocks_that_one_is_filling() -> None:
    backend, (a, b), _ = setup([12, 12], LayerLayout(2, 8, 8))
    b.blocks = [*a.blocks[:2], b.blocks[2]]
    b.k[:8], b.v[:8] = a.k[:8], a.v[:8]
    b.done = 8
    work = [(b, 4), (a, 12)]
    for (sequence, _), out in zip(work, run_step(backend, work, OPTIONS["plain"]), strict=True):
        check(sequence, out, OPTIONS["plain"])


def test_scratch_rows_are_not_stored() -> None:
    backend, (a,), memory = setup([10], LayerLayout(2, 8, 8))
    run_step(backend, [(a, 10)], OPTIONS["plain"])
    before = memory.keys[0][:-1].clone(), memory.values[0][:-1].clone()
    plan = StepPlan(torch.tensor([memory.scratch_slot] * 2), (Span(0, 2, 10, tuple(a.blocks)),))
    backend.begin_step(plan)
    # Other keys than those in memory: the rows that are read must be those of the blocks.
    out = backend.attend(0, a.q[8:], torch.randn(2, 2, 8), torch.randn(2, 2, 8), OPTIONS["plain"])
    check(a, out, OPTIONS["plain"])
    assert torch.equal(memory.keys[0][:-1], before[0])
    assert torch.equal(memory.values[0][:-1], before[1])


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("name", ["all", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, name: str, size: float) -> None:
    """Queries and keys of size 8 give scores up to 250, where bfloat16 has whole numbers only.

    Regression: scores were rounded to it, and a look-up repeated the digit that it had found.
    """
    torch.manual_seed(0)
    layout = LayerLayout(2, 16, 16)
    memory = PagedKVMemory([layout], 20, BLOCK, dtype, "cpu")
    backend = TorchAttention(memory)
    a = Sequence(30, layout, 6, torch.randperm(20).tolist()[:8])
    a.q, a.k = a.q * size, a.k * size
    a.to(dtype)
    options = OPTIONS[name]
    for count in (20, 9, 1):
        (out,) = run_step(backend, [(a, count)], options)
        assert out.dtype == dtype
        end = a.done
        expected = reference(a.q[end - count : end], a.k[:end], a.v[:end], options)
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def in_order_alone(gather: bool, heads: int, layout: LayerLayout) -> list[Tensor]:
    torch.manual_seed(3)
    memory = PagedKVMemory([layout], 16, BLOCK, torch.float32, "cpu")
    a = Sequence(31, layout, heads, list(range(8)))
    backend = TorchAttention(memory)
    return [run_step(backend, [(a, n)], OPTIONS["all"], gather)[0] for n in (8, 8, 8, 7)]


@pytest.mark.parametrize("layout", [LayerLayout(2, 8, 8), LayerLayout(6, 24, 16)], ids=str)
def test_bits_of_contiguous_gather_do_not_depend_on_block_ids_or_neighbors(
    layout: LayerLayout,
) -> None:
    expected = in_order_alone(True, 6, layout)
    torch.manual_seed(3)
    a = Sequence(31, layout, 6, [13, 2, 9, 0, 4, 11, 15, 6])
    b = Sequence(12, layout, 6, [5, 1, 14])
    memory = PagedKVMemory([layout], 16, BLOCK, torch.float32, "cpu")
    # Rows of earlier owners, in blocks that this sequence has not filled.
    for tensor in (*memory.keys, *memory.values):
        tensor.normal_(0.0, 100.0)
    backend = TorchAttention(memory)
    outs = []
    for count, other in ((8, 3), (8, 0), (8, 8), (7, 1)):
        work = [(b, other), (a, count)] if other else [(a, count)]
        outs.append(run_step(backend, work, OPTIONS["all"], contiguous_gather=True)[-1])
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


def test_rows_beyond_the_causal_limit_count_exactly_zero() -> None:
    """In a block that is computed whole, later rows change no bit of earlier rows."""
    layout = LayerLayout(2, 8, 8)
    outs = []
    for fill in (0.0, 1e4):
        backend, (a,), _ = setup([16], layout)
        run_step(backend, [(a, 8)], OPTIONS["plain"], contiguous_gather=True)
        a.k[12:], a.v[12:], a.q[12:] = fill, fill, fill
        outs.append(run_step(backend, [(a, 8)], OPTIONS["plain"], contiguous_gather=True)[0])
    assert torch.equal(outs[0][:4], outs[1][:4])
    assert not torch.equal(outs[0][4:], outs[1][4:])


def test_attend_outside_of_a_step_is_an_error() -> None:
    backend, (a,), _ = setup([4], LayerLayout(2, 8, 8))
    run_step(backend, [(a, 4)], OPTIONS["plain"])
    with pytest.raises(AssertionError, match="begin_step"):
        backend.attend(0, a.q, a.k, a.v, OPTIONS["plain"])
    backend.end_step()
