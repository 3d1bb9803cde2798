"""K and V that are not finite are reported, and do not affect rows that do not see them.

In a softmax a hidden position has the weight 0, and 0 times NaN is NaN. Regression: a row that
overflowed made every row before it in the same product NaN, and the cache then stored K and V of
these rows for the next request with that prefix.
"""

import pytest
import torch
from hypothesis import given
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
from headstart.attention.shared import SharingCost
from tests.attention.forests import NUM_BLOCKS, Forest, forests, set_sharing_cost
from tests.attention.rows import BLOCK, OPTIONS, PATHS, each_path, make_backend, row_dtype
from tests.examples import at_least

LAYOUT = LayerLayout(2, 16, 12)
HEADS = 6
NAN, INF = float("nan"), float("inf")


class Step:
    """One step of a forest over a memory in which some slots hold `fill`, in one dim."""

    def __init__(self, path: str, forest: Forest, layout: LayerLayout = LAYOUT) -> None:
        dtype = row_dtype(PATHS[path])
        generator = torch.Generator().manual_seed(1)
        self.path, self.forest, self.layout = path, forest, layout
        rows = NUM_BLOCKS * BLOCK + 1
        self.keys = torch.randn(rows, 2, layout.key_dim, generator=generator).to(dtype)
        self.values = torch.randn(rows, 2, layout.value_dim, generator=generator).to(dtype)
        self.query = torch.randn(len(forest.slots), HEADS, layout.key_dim, generator=generator)
        self.query = self.query.to(dtype)

    def attend(
        self,
        poison: dict[int, tuple[bool, bool]],
        fill: float,
        options: AttentionOptions,
        plan: StepPlan,
    ) -> Tensor:
        """Return the output; `poison` maps slots to such a number in K and V, all others are 0."""
        keys, values = self.keys.clone(), self.values.clone()
        for slot, (key, value) in poison.items():
            keys[slot], values[slot] = 0, 0
            keys[slot, :, 3] = fill if key else 0
            values[slot, :, 5] = fill if value else 0
        memory = PagedKVMemory([self.layout], NUM_BLOCKS, BLOCK, PATHS[self.path], "cpu")
        memory.write(0, torch.arange(len(keys)), keys, values)
        own = plan.slots  # slots that the step writes
        memory.write(0, own, torch.zeros_like(keys[own]), torch.zeros_like(values[own]))
        backend = make_backend(self.path, memory)
        backend.begin_step(plan)
        out = backend.attend(0, self.query, keys[plan.slots], values[plan.slots], options)
        backend.end_step()
        bad = [row for row, slot in enumerate(plan.slots.tolist()) if any(poison.get(slot, ()))]
        assert backend.nonfinite_rows() == (bad if fill != 0 else [])
        return out

    def reached(
        self, poison: dict[int, tuple[bool, bool]], window: int | None
    ) -> list[list[tuple[bool, bool]]]:
        """Return the poison that each row sees."""
        poisons = []
        for span in self.forest.spans:
            first = {block: at * BLOCK for at, block in enumerate(span.block_ids)}
            places = [
                (first[slot // BLOCK] + slot % BLOCK, one)
                for slot, one in poison.items()
                if slot // BLOCK in first
            ]
            for last in range(span.context - span.num_rows, span.context):
                before = -1 if window is None else last - window
                poisons.append([one for place, one in places if before < place <= last])
        return poisons


def check(
    step: Step, poison: dict[int, tuple[bool, bool]], fill: float, name: str, gather: bool
) -> None:
    """Check that rows that see no poison have the bits of a run with zeros; others are lost."""
    options = OPTIONS[name]
    plan = StepPlan(torch.tensor(step.forest.slots), step.forest.spans, gather)
    out = step.attend(poison, fill, options, plan)
    expected = step.attend(poison, 0.0, options, plan)
    assert bool(expected.isfinite().all())
    is_same = (out == expected).flatten(1).all(1).tolist()
    has_finite_head = out.isfinite().all(-1).any(-1).tolist()
    for row, reached in enumerate(step.reached(poison, options.sliding_window)):
        if not any(any(one) for one in reached):
            assert is_same[row], row
        elif fill != fill or any(value for _, value in reached):
            assert not has_finite_head[row], row


@each_path
@at_least(50)
@given(
    forest=forests(),
    name=st.sampled_from(list(OPTIONS)),
    fill=st.sampled_from([NAN, INF, -INF]),
    gather=st.booleans(),
    data=st.data(),
)
def test_a_position_that_is_not_seen_has_no_influence(
    path: str, forest: Forest, name: str, fill: float, gather: bool, data: st.DataObject
) -> None:
    """Poison is in later rows, before a window, in slots of other requests and in stale slots."""
    blocks = sorted({block for span in forest.spans for block in span.block_ids})
    slots = st.sampled_from([block * BLOCK + at for block in blocks for at in range(BLOCK)])
    poison = data.draw(st.dictionaries(slots, st.tuples(st.booleans(), st.booleans()), max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "CHUNK_ROWS", data.draw(st.sampled_from([3, 128])))
        set_sharing_cost(patch, SharingCost(0, data.draw(st.sampled_from([0, 5]))))
        check(Step(path, forest), poison, fill, name, gather)


# Other widths change how rows are loaded; options do not depend on them.
WIDTHS = [(name, LAYOUT) for name in OPTIONS]
WIDTHS += [
    (name, layout)
    for layout in (LayerLayout(2, 128, 64), LayerLayout(2, 34, 37))
    for name in ("plain", "all")
]


@each_path
@pytest.mark.parametrize(("name", "layout"), WIDTHS, ids=str)
def test_a_long_prompt_with_one_bad_row(path: str, name: str, layout: LayerLayout) -> None:
    """The row is at the borders of tiles of 64 keys, and of chunks of rows."""
    table = list(reversed(range(50)))
    forest = Forest((Span(0, 190, 197, table), Span(190, 3, 70, list(range(50, 68)))))
    step = Step(path, forest, layout)
    for position in (0, 6, 63, 64, 100, 134, 135, 196, 199):
        slot = table[position // BLOCK] * BLOCK + position % BLOCK
        check(step, {slot: (True, True)}, NAN, name, False)


@each_path
def test_slots_behind_a_sequence_are_not_read(path: str) -> None:
    """The unused rows of the last block may have any bits."""
    forest = Forest((Span(0, 1, 9, [4, 2, 7]), Span(1, 5, 5, [9, 3]), Span(6, 1, 2, [5])))
    used = {
        span.block_ids[at // BLOCK] * BLOCK + at % BLOCK
        for span in forest.spans
        for at in range(span.context)
    }
    stale = {slot: (True, True) for slot in range(NUM_BLOCKS * BLOCK + 1) if slot not in used}
    for name in OPTIONS:
        check(Step(path, forest), stale, NAN, name, False)


@each_path
def test_bad_rows_of_all_layers_are_reported_until_the_next_step(path: str) -> None:
    # The compiled kernel in bf16 leaves keys of odd widths to torch operations.
    layouts = [LayerLayout(2, 8, 8), LayerLayout(1, 7, 8), LayerLayout(2, 8, 40)]
    memory = PagedKVMemory(layouts, 4, BLOCK, PATHS[path], "cpu")
    backend = make_backend(path, memory)
    assert backend.nonfinite_rows() == []
    slots = [0, 1, 2, memory.scratch_slot, memory.scratch_slot, 8]
    plan = StepPlan(torch.tensor(slots), (Span(0, 5, 5, [0, 1]), Span(5, 1, 1, [2])))
    for bad in ({0: (3, 0), 1: (1, 5), 2: (0, 39)}, {2: (4, 1)}, {}):
        backend.begin_step(plan)
        assert backend.nonfinite_rows() == []
        rows: set[int] = set()
        for layer, layout in enumerate(layouts):
            dtype = row_dtype(PATHS[path])
            key = torch.full((6, layout.kv_heads, layout.key_dim), 3e4, dtype=dtype)
            value = torch.full((6, layout.kv_heads, layout.value_dim), -3e4, dtype=dtype)
            if layer in bad:
                row, at = bad[layer]
                target = key if at < layout.key_dim and layer == 0 else value
                target[row, -1, at] = (NAN, INF, -INF)[layer]
                rows.add(row)
            query = torch.zeros(6, 2, layout.key_dim, dtype=dtype)
            backend.attend(layer, query, key, value, AttentionOptions(1.0))
            assert backend.nonfinite_rows() == sorted(rows)
        backend.end_step()
        assert backend.nonfinite_rows() == sorted(rows)


def test_a_row_that_overflows_when_written_is_reported() -> None:
    memory = PagedKVMemory([LayerLayout(1, 4, 4)], 2, BLOCK, torch.float16, "cpu")
    backend = TorchAttention(memory)
    backend.begin_step(StepPlan(torch.arange(2), (Span(0, 2, 2, [0]),)))
    key = torch.zeros(2, 1, 4)
    key[1, 0, 2] = 1e5  # finite in float32 only
    backend.attend(0, torch.zeros(2, 1, 4), key, torch.zeros(2, 1, 4), AttentionOptions(1.0))
    assert backend.nonfinite_rows() == [1]
