"""Decoding rows that attend together to shared blocks have the results of separate rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.attention import AttentionOptions, LayerLayout, PagedKVMemory, Span, StepPlan
from headstart.attention.shared import SharedPlan, SharedPlanner, SharingCost, find_groups
from tests.attention.forests import NUM_BLOCKS, Forest, forests, set_sharing_cost
from tests.attention.rows import (
    BLOCK,
    NONFINITE,
    OPTIONS,
    PATHS,
    TOLERANCE,
    as_stored,
    each_path,
    make_backend,
    reference,
    row_dtype,
)
from tests.examples import at_least

LAYOUT = LayerLayout(2, 16, 12)
HEADS = 6
FREE, USUAL = SharingCost(0, 0), SharingCost(0, 32)


def attend(
    path: str,
    forest: Forest,
    options: AttentionOptions,
    layout: LayerLayout = LAYOUT,
    share: bool = True,
    lost: Span | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of all spans, and the expected ones; K/V are in memory from the start.

    K/V that no span sees, or only `lost`, are NaN or infinite.
    """
    dtype = PATHS[path]
    torch.manual_seed(1)
    memory = PagedKVMemory([layout], NUM_BLOCKS, BLOCK, dtype, "cpu")
    rows = torch.arange(memory.scratch_slot + 1)
    seen = [
        [span.block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in range(span.context)]
        for span in forest.spans
    ]
    foreign = torch.ones(len(rows), dtype=torch.bool)
    for span, own in zip(forest.spans, seen, strict=True):
        foreign[own] &= span is lost
    keys, values = (
        as_stored(torch.randn(len(rows), layout.kv_heads, width), dtype)
        for width in (layout.key_dim, layout.value_dim)
    )
    for memory_rows in (keys, values):
        memory_rows[foreign] = NONFINITE.to(memory_rows.dtype)[rows[foreign] % 3].view(-1, 1, 1)
    memory.write(0, rows, keys, values)
    slots = torch.tensor(forest.slots)
    # Scores of one size at every width: float32 rounds large ones too coarsely.
    query = torch.randn(len(slots), HEADS, layout.key_dim) * (16 / layout.key_dim) ** 0.5
    query = query.to(row_dtype(dtype))
    backend = make_backend(path, memory, share)
    backend.begin_step(StepPlan(slots, forest.spans))
    out = backend.attend(0, query, keys[slots], values[slots], options)
    backend.end_step()
    outputs, expected = [], []
    for span, own in zip(forest.spans, seen, strict=True):
        at = slice(span.first_row, span.first_row + span.num_rows)
        if span is not lost:
            outputs.append(out[at])
            expected.append(reference(query[at], keys[own], values[own], options))
    return outputs, expected


@each_path
@at_least(60)
@given(data=st.data(), forest=forests(), name=st.sampled_from(list(OPTIONS)))
def test_any_forest_of_sharing(path: str, data: st.DataObject, forest: Forest, name: str) -> None:
    """Results do not depend on other contents of the memory or of a span's blocks."""
    layout = data.draw(st.sampled_from([LAYOUT, LayerLayout(3, 64, 64), LayerLayout(1, 34, 21)]))
    lost = data.draw(st.none() | st.sampled_from(forest.spans))
    with pytest.MonkeyPatch.context() as patch:
        set_sharing_cost(patch, SharingCost(0, data.draw(st.sampled_from([0, 0, 5]))))
        outputs, expected = attend(path, forest, OPTIONS[name], layout, lost=lost)
    for out, wanted in zip(outputs, expected, strict=True):
        rtol, atol = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


@each_path
def test_groups_on_three_levels(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits differ from those without sharing; otherwise nothing was shared."""
    set_sharing_cost(monkeypatch, USUAL)
    tables = [[*range(60), *(range(100, 150) if row < 6 else range(150, 190))] for row in range(9)]
    for row, table in enumerate(tables):
        if row < 4:
            table.extend(range(220 + row // 2 * 40, 250 + row // 2 * 40))
        table.extend(range(300 + row * 3, 303 + row * 3))
    spans = tuple(Span(row, 1, len(table) * BLOCK - 1, table) for row, table in enumerate(tables))
    forest = Forest(spans)
    plan = find_groups(spans, BLOCK, USUAL)
    assert sorted(len(group.members) for group in plan.groups) == [2, 2, 3, 6, 9]
    outputs, expected = attend(path, forest, OPTIONS["sinks"])
    alone, _ = attend(path, forest, OPTIONS["sinks"], share=False)
    for out, wanted in zip(outputs, expected, strict=True):
        rtol, atol = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)
    if path not in (
        "torch bf16",
        "torch fp16",
    ):  # computed in float32, whose differences its rounding hides
        assert not torch.equal(torch.cat(outputs), torch.cat(alone))


def check_plan(plan: SharedPlan, spans: list[Span]) -> None:
    """Check that a span's groups cover its tokens up to `own_first` once, with equal blocks."""
    covered = [0] * len(spans)
    for group in plan.groups:
        blocks = {
            tuple(spans[member].block_ids[group.first // BLOCK : group.last // BLOCK])
            for member in group.members
        }
        assert len(blocks) == 1 and len(group.members) > 1
        for member in group.members:
            assert covered[member] == group.first
            covered[member] = group.last
    assert tuple(covered) == plan.own_first
    assert all(first < span.context for first, span in zip(covered, spans, strict=True))


@at_least(150)
@given(data=st.data(), forest=forests())
def test_a_reused_plan_stays_right(data: st.DataObject, forest: Forest) -> None:
    """Tables grow, change in place, are added and removed."""
    planner = SharedPlanner(BLOCK, FREE)
    spans = [span._replace(num_rows=1) for span in forest.spans]
    fresh = iter(range(1000, 3000))
    for _ in range(5):
        plan = planner.plan(spans)
        if plan is not None:
            check_plan(plan, spans)
        best = find_groups(spans, BLOCK, FREE)
        check_plan(best, spans)
        event = data.draw(st.sampled_from(["grow", "change", "leave", "shrink"]))
        at = data.draw(st.integers(0, len(spans) - 1))
        table, context = list(spans[at].block_ids), spans[at].context
        if event == "grow":
            table, context = [*table, next(fresh)], context + BLOCK
        elif event == "change":
            table[data.draw(st.integers(0, len(table) - 1))] = next(fresh)
        elif event == "shrink":
            context = data.draw(st.integers(1, context))
        elif len(spans) > 1:
            del spans[at]
            continue
        spans[at] = spans[at]._replace(block_ids=table, context=context)


def test_a_plan_is_reused_while_tables_grow_and_rebuilt_when_they_change() -> None:
    planner = SharedPlanner(BLOCK, USUAL)
    tables = [[*range(100), 200 + row] for row in range(3)]
    plan = planner.plan([Span(row, 1, 401, table) for row, table in enumerate(tables)])
    assert plan is not None and plan.own_first == (400,) * 3
    tables[1].append(300)
    spans = [Span(row, 1, 404, table) for row, table in enumerate(tables)]
    assert planner.plan(spans) is plan
    tables[2][99] = 301
    changed = planner.plan(spans)
    assert changed is not None and changed.own_first == (396,) * 3
    assert planner.plan(spans[:1]) is None


def test_short_groups_are_not_shared() -> None:
    short = [Span(row, 1, 30, [0, 1, 2, 3, 4, 5, 10 + row, 20 + row]) for row in range(3)]
    assert find_groups(short, BLOCK, USUAL).groups == ()
    assert SharedPlanner(BLOCK, USUAL).plan(short) is None
