"""The compiled kernels against attention written out in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    Span,
    StepPlan,
    TorchAttention,
    make_backend,
    native,
)
from headstart.native.bindings import AttentionStep
from tests.attention.rows import (
    BLOCK,
    LIBRARIES,
    NONFINITE,
    OPTIONS,
    Sequence,
    check,
    each_kernel,
    each_product,
    kernels,
    row_dtype,
    run_step,
    spoil,
)

BF16, FLOAT32, INT8 = torch.bfloat16, torch.float32, torch.int8


def make_sequences(
    dtype: torch.dtype, lengths: list[int], layout: LayerLayout, heads: int, seed: int = 0
) -> tuple[PagedKVMemory, list[Sequence]]:
    torch.manual_seed(seed)
    needed = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(needed) + 3).tolist()
    memory = PagedKVMemory([layout], len(blocks), BLOCK, dtype, "cpu")
    sequences = [
        Sequence(length, layout, heads, [blocks.pop() for _ in range(count)]).to(dtype)
        for length, count in zip(lengths, needed, strict=True)
    ]
    return memory, sequences


def make(
    dtype: torch.dtype, lengths: list[int], layout: LayerLayout, heads: int
) -> tuple[NativeAttention, list[Sequence]]:
    memory, sequences = make_sequences(dtype, lengths, layout, heads)
    return NativeAttention(memory, kernels(dtype)), sequences


def fitting(options: AttentionOptions, heads: int, key_dim: int = 16) -> AttentionOptions:
    """Return options with a sink for each of `heads`, and scores as large as with 16 dims."""
    sinks = None if options.sinks is None else options.sinks.repeat(4)[:heads]
    return replace(options, scaling=options.scaling * 4 / key_dim**0.5, sinks=sinks)


@each_product
@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        (LayerLayout(2, 64, 64), 14),  # several chunks of rows
        (LayerLayout(3, 16, 16), 3),
        (LayerLayout(1, 34, 21), 20),  # widths that fill no vector; two vectors of heads
        (LayerLayout(1, 256, 256), 3),
        (LayerLayout(2, 128, 64), 2),  # in decoding a row is one vector, or two, or a quarter
        (LayerLayout(2, 64, 128), 4),
        (LayerLayout(2, 16, 40), 8),
        (LayerLayout(2, 7, 8), 4),  # in bf16 goes through torch operations
    ],
    ids=str,
)
def test_prompts_in_pieces_and_decodes_side_by_side(
    dtype: torch.dtype, options: AttentionOptions, layout: LayerLayout, heads: int
) -> None:
    options = fitting(options, heads, layout.key_dim)
    backend, (a, b, c) = make(dtype, [150, 90, 9], layout, heads)
    for work in ([(a, 70), (b, 5)], [(b, 1), (a, 63), (c, 8)], [(a, 1), (b, 1), (c, 1)], [(b, 30)]):
        for (sequence, _), out in zip(work, run_step(backend, work, options), strict=True):
            check(sequence, out, options)


@st.composite
def cases(draw: st.DrawFn) -> tuple[LayerLayout, int, AttentionOptions]:
    """A layer's layout, its query heads, and options of all kinds."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 17), (3, 2), (4, 4), (1, 7)]))
    even = st.integers(1, 40).map(lambda half: 2 * half)  # else bf16 goes through torch operations
    widths = draw(st.tuples(even, even) | st.sampled_from([(32, 64), (64, 64), (128, 128)]))
    heads = kv_heads * group
    sinks = draw(st.none() | st.just(torch.linspace(-2, 6, heads)))
    window, softcap = draw(st.none() | st.integers(1, 80)), draw(st.none() | st.just(1.5))
    scaling = draw(st.sampled_from([0.7, 1.0])) / widths[0] ** 0.5
    return LayerLayout(kv_heads, *widths), heads, AttentionOptions(scaling, window, softcap, sinks)


@each_product
@pytest.mark.usefixtures("bf16_products")
@given(data=st.data(), seed=st.integers(0, 5), threads=st.integers(1, 3), gather=st.booleans())
def test_any_batch_in_a_memory_with_stale_rows(
    dtype: torch.dtype, data: st.DataObject, seed: int, threads: int, gather: bool
) -> None:
    """Every slot that no row of these sequences was written to is NaN or infinite.

    All K and V of one sequence may be so too; then only its rows are lost.
    """
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))
    layout, heads, options = data.draw(cases())
    memory, sequences = make_sequences(dtype, lengths, layout, heads, seed)
    backend = NativeAttention(memory, kernels(dtype))
    spoil(memory)
    lost = data.draw(st.none() | st.sampled_from(sequences))
    if lost is not None:
        for rows in (lost.k, lost.v):
            rows[:] = NONFINITE[torch.arange(len(rows)) % 3].view(-1, 1, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "SPLIT_KEYS", data.draw(st.sampled_from([16, 512])))
            while waiting := [s for s in sequences if s.done < len(s.q)]:
                work = []
                for sequence in waiting:
                    left = len(sequence.q) - sequence.done
                    work.append((sequence, data.draw(st.sampled_from([1, min(left, 40), left]))))
                outs = run_step(backend, work, options, gather)
                for (sequence, _), out in zip(work, outs, strict=True):
                    if sequence is not lost:
                        check(sequence, out, options)
    finally:
        torch.set_num_threads(before)


@each_kernel
def test_sequences_of_one_step_share_blocks_that_one_is_filling(
    dtype: torch.dtype,
) -> None:
    backend, (a, b) = make(dtype, [12, 12], LayerLayout(2, 8, 8), 6)
    b.blocks = [*a.blocks[:2], b.blocks[2]]
    b.k[:8], b.v[:8] = a.k[:8], a.v[:8]
    b.done = 8
    work = [(b, 4), (a, 12)]
    for (sequence, _), out in zip(work, run_step(backend, work, OPTIONS["plain"]), strict=True):
        check(sequence, out, OPTIONS["plain"])


@each_kernel
def test_any_strides(dtype: torch.dtype) -> None:
    """Queries as models of transformers pass them, heads before tokens, and unusual ones."""
    backend, (a,) = make(dtype, [40], LayerLayout(2, 16, 16), 6)
    expected = run_step(backend, [(a, 40)], OPTIONS["plain"])[0]
    for turned in (
        [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (a.q, a.k, a.v)],
        [tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (a.q, a.k, a.v)],
    ):
        a.q, a.k, a.v = turned
        a.done = 0
        assert torch.equal(run_step(backend, [(a, 40)], OPTIONS["plain"])[0], expected)


@each_product
@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_of_rows_do_not_depend_on_block_ids_neighbors_or_threads(
    dtype: torch.dtype, options: AttentionOptions, gather: bool, width: int
) -> None:
    """Nor on old contents of the memory, nor on cuts of a prompt, except into rows in bf16."""
    layout = LayerLayout(2, width, width)
    backend, (a,) = make(dtype, [150], layout, 6)
    expected = torch.cat([run_step(backend, [(a, n)], options, gather)[0] for n in (149, 1)])
    pieces = ((8, 3), (80, 0), (61, 8), (1, 1))
    if dtype != BF16:
        pieces = ((1, 2), (7, 3), (80, 0), (1, 0), (60, 8), (1, 1))
    memory, (c, b) = make_sequences(dtype, [150, 30], layout, 6)
    backend = NativeAttention(memory, kernels(dtype))
    stale = torch.randn(2, memory.scratch_slot + 1, 2, width) * 100
    memory.write(0, torch.arange(memory.scratch_slot + 1), *stale.to(row_dtype(dtype)))
    c.q, c.k, c.v = a.q, a.k, a.v
    outs: list[Tensor] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for count, other in pieces:
            work = [(b, other), (c, count)] if other else [(c, count)]
            outs.append(run_step(backend, work, options, gather)[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(outs), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_rows_of_any_dtype_are_stored_in_8_bits(dtype: torch.dtype) -> None:
    """Attention runs in float32: only the output is rounded."""
    backend, (a, b) = make(INT8, [20, 20], LayerLayout(2, 16, 16), 6)
    b.q, b.k, b.v = (rows.to(dtype) for rows in (a.q, a.k, a.v))
    a.q, a.k, a.v = (rows.float() for rows in (b.q, b.k, b.v))
    [expected] = run_step(backend, [(a, 20)], OPTIONS["plain"])
    [out] = run_step(backend, [(b, 20)], OPTIONS["plain"])
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
def test_other_dtypes_go_through_torch_operations(dtype: torch.dtype) -> None:
    backend, (a,) = make(dtype, [20], LayerLayout(2, 16, 16), 6)
    q, k, v = a.q, a.k, a.v
    other = FLOAT32 if dtype == BF16 else BF16
    a.q, a.k, a.v = q.to(other), k.to(other), v.to(other)
    [out] = run_step(backend, [(a, 20)], OPTIONS["plain"])
    assert out.dtype == other
    check(a, out.bfloat16(), OPTIONS["plain"])


@each_kernel
def test_attend_outside_of_a_step_is_an_error(dtype: torch.dtype) -> None:
    backend, (a,) = make(dtype, [4], LayerLayout(2, 8, 8), 6)
    run_step(backend, [(a, 4)], OPTIONS["plain"])
    with pytest.raises(AssertionError, match="begin_step"):
        backend.attend(0, a.q, a.k, a.v, OPTIONS["plain"])


def test_the_backend_is_the_fastest_that_serves_the_memory(
    use_kernels: Callable[..., None],
) -> None:
    layouts = [LayerLayout(2, 7, 7), LayerLayout(2, 8, 8)]
    memories = {dtype: PagedKVMemory(layouts, 2, 4, dtype, "cpu") for dtype in LIBRARIES}
    odd, *others = (PagedKVMemory(layouts[:1], 2, 4, dtype, "cpu") for dtype in LIBRARIES)
    half = PagedKVMemory(layouts, 2, 4, torch.float16, "cpu")
    for memory in (*memories.values(), *others):
        expected = TorchAttention if LIBRARIES[memory.dtype] is None else NativeAttention
        assert type(make_backend(memory)) is expected
    assert isinstance(make_backend(odd), TorchAttention)
    assert isinstance(make_backend(half), TorchAttention)
    use_kernels(cpu="avx2")
    assert isinstance(make_backend(memories[BF16]), TorchAttention)
    use_kernels("0")
    assert isinstance(make_backend(memories[FLOAT32]), TorchAttention)
    assert isinstance(make_backend(memories[INT8]), TorchAttention)


@each_kernel
@pytest.mark.parametrize("option", [{"softcap": -1.5}, {"sliding_window": (1 << 32) + 5}], ids=str)
def test_any_window_and_cap_of_a_configuration(dtype: torch.dtype, option: dict[str, Any]) -> None:
    """Regression: a window was cut to 32 bits, here to 5 keys, and a negative cap had no effect."""
    options = replace(fitting(OPTIONS["plain"], 4), **option)
    backend, [a] = make(dtype, [40], LayerLayout(2, 16, 16), 4)
    for count in (39, 1):
        [out] = run_step(backend, [(a, count)], options)
        check(a, out, options)


@each_kernel
@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_decodes_are_split_for_threads_without_a_head(
    dtype: torch.dtype, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are reused from one step to the next."""
    monkeypatch.setattr(native, "SPLIT_KEYS", 16)
    backend, (a, b) = make(dtype, [100, 41], LayerLayout(1, 16, 16), 4)
    options = fitting(OPTIONS[name], 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for work in ([(a, 90), (b, 38)], *([[(a, 1)]] * 6), *([[(a, 1), (b, 1)]] * 3), [(a, 1)]):
            for (sequence, _), out in zip(work, run_step(backend, work, options), strict=True):
                check(sequence, out, options)
    finally:
        torch.set_num_threads(before)


@each_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_a_draft_and_the_last_row_of_a_prompt_have_the_bits_of_decoding(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the keys of decoding rows were split between threads."""
    monkeypatch.setattr(native, "SPLIT_KEYS", 16)
    options, outs = fitting(OPTIONS["plain"], 4), []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for counts in ([90] + [1] * 10, [90, 5, 5], [96, 4], [100]):
            torch.manual_seed(0)
            backend, [a] = make(dtype, [100], LayerLayout(1, 16, 16), 4)
            rows = torch.cat([run_step(backend, [(a, count)], options)[0] for count in counts])
            outs.append(rows[[-1]] if counts == [100] else rows[-4:])
    finally:
        torch.set_num_threads(before)
    for out in outs:
        assert torch.equal(out, outs[0][-len(out) :])


@each_kernel
def test_tables_are_reused_while_decoding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    class Counted(native.NativeStep):
        def __init__(self, *args: Any) -> None:
            steps.append(args)
            super().__init__(*args)

    monkeypatch.setattr("headstart.attention.native.NativeStep", Counted)
    backend, (a, b) = make(dtype, [40, 41], LayerLayout(1, 16, 16), 4)
    for work in ([(a, 20), (b, 20)], *([[(a, 1), (b, 1)]] * 10), [(b, 1)], [(b, 1)]):
        for (sequence, _), out in zip(work, run_step(backend, work, OPTIONS["plain"]), strict=True):
            check(sequence, out, OPTIONS["plain"])
    assert len(steps) == 3


def test_layers_that_share_and_layers_that_do_not_have_separate_buffers() -> None:
    """A compiled call takes both buffers: growing one must not free the other."""
    memory = PagedKVMemory([LayerLayout(2, 16, 16)] * 2, 140, 16, BF16, "cpu")
    backend = NativeAttention(memory, kernels(BF16))
    common = list(range(120))
    spans = tuple(Span(row, 1, 1930, [*common, 120 + row]) for row in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(12)
    addresses = []
    try:
        backend.begin_step(StepPlan(torch.tensor([1929, 1945]), spans))
        for layer, window in ((0, None), (1, 1000), (0, None)):
            call = backend.compiled(
                layer, (2, 2), AttentionOptions(1.0, sliding_window=window), BF16
            )
            assert call is not None
            addresses.append(AttentionStep.from_address(call[0]).partials)
    finally:
        torch.set_num_threads(before)
    assert addresses[0] != addresses[1]
    assert addresses[0] == addresses[2]
