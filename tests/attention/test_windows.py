"""Layers with a sliding window in a separate pool have the bits of one pool."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.attention import (
    AttentionBackend,
    AttentionOptions,
    LayerLayout,
    NativeAttention,
    PagedKVMemory,
    Span,
    StepPlan,
    native,
)
from headstart.errors import EngineError
from tests.attention.rows import (
    BLOCK,
    OPTIONS,
    PATHS,
    Sequence,
    each_kernel,
    each_path,
    kernels,
    make_backend,
    row_dtype,
    spoil,
)

FULL, WIDE, NARROW = (LayerLayout(2, 16, 16, window) for window in (None, 9, 5))
LAYOUTS = (WIDE, LayerLayout(1, 16, 16), NARROW, WIDE)  # fewer heads in full layers, as in Gemma 4
HEADS = 6


class Twin:
    """Sequences in one pool and again in two, with blocks in different orders.

    In the second, the entries of blocks behind the widest window are arbitrary.
    """

    def __init__(self, path: str, lengths: list[int], seed: int, spare: int = 5) -> None:
        torch.manual_seed(seed)
        self.dtype = PATHS[path]
        needed = sum(-(-length // BLOCK) for length in lengths) + spare
        one = PagedKVMemory(LAYOUTS, needed, BLOCK, self.dtype, "cpu")
        two = PagedKVMemory(LAYOUTS, needed, BLOCK, self.dtype, "cpu", needed)
        assert two.window == 9
        self.backends: list[AttentionBackend] = []
        for memory in (one, two):
            spoil(memory)
            self.backends.append(make_backend(path, memory))
        orders = [torch.randperm(needed).tolist() for _ in range(3)]
        self.unused = orders[2][:spare]
        self.sequences: list[tuple[Sequence, list[int], list[int]]] = []
        start = spare
        for length in lengths:
            stop = start + -(-length // BLOCK)
            sequence = Sequence(length, WIDE, HEADS, orders[0][start:stop]).to(self.dtype)
            self.sequences.append((sequence, orders[1][start:stop], orders[2][start:stop]))
            start = stop

    def step(self, counts: list[int], options: AttentionOptions, gather: bool) -> None:
        """Compute the next rows of each sequence over both memories, and compare all bits."""
        work = [
            (entry, count) for entry, count in zip(self.sequences, counts, strict=True) if count
        ]
        spans: list[list[Span]] = [[], [], []]
        slots: list[list[int]] = [[], [], []]
        for (sequence, *tables), count in work:
            start, stop = sequence.done, sequence.done + count
            first = max(0, start // BLOCK * BLOCK - 9 + 1) // BLOCK
            anything = self.unused * len(sequence.blocks)
            window = [*anything[:first], *tables[1][first:]]
            for pool, table in enumerate((sequence.blocks, tables[0], window)):
                spans[pool].append(Span(len(slots[pool]), count, stop, table))
                places = range(start, stop)
                slots[pool] += [table[p // BLOCK] * BLOCK + p % BLOCK for p in places]
        plans = [
            StepPlan(torch.tensor(s), tuple(own), gather)
            for s, own in zip(slots, spans, strict=True)
        ]
        one, two = self.backends
        one.begin_step(plans[0])
        two.begin_step(StepPlan(plans[1].slots, plans[1].spans, gather, plans[2]))
        parts = [slice(s.done, s.done + count) for (s, *_), count in work]
        rows = [
            torch.cat(
                [getattr(s, name)[part] for ((s, *_), _), part in zip(work, parts, strict=True)]
            )
            for name in "qkv"
        ]
        for layer, layout in enumerate(LAYOUTS):
            seen = replace(options, sliding_window=layout.window)
            parts_of = rows[0], *(row[:, : layout.kv_heads] for row in rows[1:])
            expected, out = (backend.attend(layer, *parts_of, seen) for backend in (one, two))
            assert_equal(out, expected)
        assert one.nonfinite_rows() == two.nonfinite_rows() == []
        for backend in self.backends:
            backend.end_step()
        for (sequence, *_), count in work:
            sequence.done += count


def assert_equal(out: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(expected).all()
    assert torch.equal(out, expected)


@each_path
@given(data=st.data(), seed=st.integers(0, 5), gather=st.booleans())
def test_two_pools_have_the_bits_of_one(
    path: str, data: st.DataObject, seed: int, gather: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    twin = Twin(path, lengths, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "SPLIT_KEYS", data.draw(st.sampled_from([16, 512])))
        while any(left := [len(s.q) - s.done for s, *_ in twin.sequences]):
            counts = [data.draw(st.sampled_from([0, 1, min(n, 40), n])) if n else 0 for n in left]
            if not any(counts):
                counts = [min(n, 1) for n in left]
            twin.step(counts, data.draw(st.sampled_from(list(OPTIONS.values()))), gather)


SHARED = (*range(40), 100), (*range(40), 101), (*range(40), 102)


@each_path
@pytest.mark.parametrize("context", [161, 162, 164])
def test_prefixes_are_shared_while_the_window_covers_them(path: str, context: int) -> None:
    torch.manual_seed(0)
    layouts = [LayerLayout(2, 16, 16, 162), LayerLayout(2, 16, 16)]
    one = PagedKVMemory(layouts, 103, BLOCK, PATHS[path], "cpu")
    two = PagedKVMemory(layouts, 103, BLOCK, PATHS[path], "cpu", 103)
    key, value = torch.randn(2, one.scratch_slot, 2, 16).to(row_dtype(one.dtype))
    for layer in (0, 1):
        for memory in (one, two):
            memory.write(layer, torch.arange(one.scratch_slot), key, value)
    slots = torch.tensor([table[-1] * BLOCK + (context - 1) % BLOCK for table in SHARED])
    plans = []
    for hidden in (0, 0 if context <= 162 else 1):
        tables = [[0] * hidden + list(table[hidden:]) for table in SHARED]
        spans = [Span(row, 1, context, table) for row, table in enumerate(tables)]
        plans.append(StepPlan(slots, tuple(spans)))
    expected, out = make_backend(path, one), make_backend(path, two)
    expected.begin_step(plans[0])
    out.begin_step(StepPlan(slots, plans[0].spans, window=plans[1]))
    rows = [torch.randn(3, heads, 16).to(row_dtype(one.dtype)) for heads in (HEADS, 2, 2)]
    for layer, layout in enumerate(layouts):
        options = AttentionOptions(0.3, layout.window)
        assert_equal(out.attend(layer, *rows, options), expected.attend(layer, *rows, options))


@each_path
def test_steps_that_do_not_fit_window_blocks_are_refused(path: str) -> None:
    dtype = PATHS[path]
    memory = PagedKVMemory([FULL, WIDE], 3, BLOCK, dtype, "cpu", 2)
    backend = make_backend(path, memory)
    slots = torch.tensor([0])
    plan = StepPlan(slots, (Span(0, 1, 1, [2]),))
    with pytest.raises(EngineError, match="2 window blocks, but the plan has no slots in them"):
        backend.begin_step(plan)
    window = StepPlan(slots, (Span(0, 1, 1, [1]),))
    backend.begin_step(StepPlan(slots, plan.spans, window=window))
    rows = [torch.randn(1, heads, 16).to(row_dtype(dtype)) for heads in (HEADS, 2, 2)]
    for seen in (None, 10):
        with pytest.raises(EngineError, match=r"layer 1 .* allowed: 1 to 9, since earlier K and V"):
            backend.attend(1, *rows, AttentionOptions(0.3, seen))
    for layer, seen in ((1, 9), (1, 5), (0, None), (0, 10)):
        assert torch.isfinite(backend.attend(layer, *rows, AttentionOptions(0.3, seen))).all()


@each_kernel
def test_kernels_refuse_window_blocks_that_do_not_exist(dtype: torch.dtype) -> None:
    backend = NativeAttention(
        PagedKVMemory([FULL, WIDE], 3, BLOCK, dtype, "cpu", 2), kernels(dtype)
    )
    span = Span(0, 1, 1, [0])
    for slot, block, message in ((9, 0, "slots are 9"), (0, 2, "a block table holds ids")):
        window = StepPlan(torch.tensor([slot]), (span._replace(block_ids=[block]),))
        with pytest.raises(EngineError, match=message):
            backend.begin_step(StepPlan(torch.tensor([0]), (span,), window=window))
