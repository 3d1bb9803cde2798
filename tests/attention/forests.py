"""Random steps whose sequences share the beginnings of their block tables."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from headstart.attention import Span, native, torch_ops
from headstart.attention.shared import SharingCost
from tests.attention.rows import BLOCK

NUM_BLOCKS = 400


def set_sharing_cost(patch: pytest.MonkeyPatch, cost: SharingCost) -> None:
    """Set the cost of sharing with every backend, so that short prefixes are shared too."""
    patch.setattr(native, "SHARING", dict.fromkeys(native.SHARING, cost))
    patch.setattr(torch_ops, "SHARING", cost)


@dataclass(frozen=True)
class Forest:
    """Spans whose block tables begin like one another's, some decoding and some with more rows."""

    spans: tuple[Span, ...]

    @property
    def slots(self) -> list[int]:
        return [
            span.block_ids[p // BLOCK] * BLOCK + p % BLOCK
            for span in self.spans
            for p in range(span.context - span.num_rows, span.context)
        ]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Each span shares some blocks with an earlier span's table, or none."""
    free = iter(range(NUM_BLOCKS))
    tables: list[list[int]] = []
    spans: list[Span] = []
    row = 0
    for _ in range(draw(st.integers(1, 9))):
        start: list[int] = []
        if tables:
            parent = draw(st.sampled_from(tables))
            start = parent[: draw(st.integers(0, len(parent)))]
        own = [next(free) for _ in range(draw(st.integers(0 if start else 1, 12)))]
        table = [*start, *own]
        tables.append(table)
        rows = 1 if draw(st.integers(0, 3)) else draw(st.integers(1, len(table) * BLOCK))
        context = draw(st.integers(max(rows, len(table) * BLOCK - BLOCK + 1), len(table) * BLOCK))
        spans.append(Span(row, rows, context, table))
        row += rows
    return Forest(tuple(spans))
