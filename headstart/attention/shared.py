"""Shared-prefix groups: decoding rows that read the same blocks, found in their block tables.

Requests that hit the same cached prefix hold the same blocks, so their tables begin with the same
ids. For example, all requests share a system prompt, some a document, a few a conversation. The
tables form a trie. Tables that share a path of the trie form a group, whose rows attend to the
path's tokens together: K and V are read once instead of once per row, and vector products become
matrix products. A row's outputs from its groups and from the rest of its context are merged:

    part i has m_i = max score, l_i = sum of exp(score - m_i), o_i = sum of exp(score - m_i) value
    m = max m_i,   out = sum of o_i exp(m_i - m) / sum of l_i exp(m_i - m)

Only decoding rows, one per sequence, are grouped. A prefill has enough rows without grouping.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.attention.backend import Span


class SharingCost(NamedTuple):
    """A backend's cost of sharing. The unit is the time in which a decoding row reads one token.

    A group of n members that share t tokens saves (n - 1) * t reads. It costs `group` once, for
    computing the group separately. It costs `member` per member, for storing and merging a partial
    result.
    """

    group: int
    member: int

    def is_profitable(self, tokens: int, members: int) -> bool:
        """Return True if a group of this size saves more than it costs."""
        return tokens * (members - 1) >= self.group + self.member * members


@dataclass(frozen=True)
class PrefixGroup:
    """Tokens `first` to `last - 1`, shared by `members`: indices of decoding spans."""

    members: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class SharedPlan:
    """The shared-prefix groups of a step, outer groups before the groups inside them.

    Decoding span i reads its first `own_first[i]` tokens in groups. It attends to its other tokens,
    which include the last one, without a group.
    """

    groups: tuple[PrefixGroup, ...]
    own_first: tuple[int, ...]


def find_groups(spans: Sequence[Span], block_size: int, cost: SharingCost) -> SharedPlan:
    """Return the shared-prefix groups of decoding spans that save more than they cost.

    Spans are sorted by block table, so spans with a common prefix are neighbors. A prefix that the
    first and the last of several neighbors share is common to all of them. So the trie need not be
    built. The cost is O(spans log spans) comparisons of tables.

    >>> tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    >>> spans = [Span(row, 1, len(table) * 64, table) for row, table in enumerate(tables)]
    >>> plan = find_groups(spans, 64, SharingCost(group=0, member=32))
    >>> [(group.members, group.first, group.last) for group in plan.groups]
    [((0, 1, 2), 0, 128), ((0, 1), 128, 192)]
    >>> plan.own_first
    (192, 192, 128)
    """
    # The block of a span's last token is not shared, so no row has only shared keys.
    full = [span.block_ids[: (span.context - 1) // block_size] for span in spans]
    tables = [ids if isinstance(ids, list) else list(ids) for ids in full]
    order = sorted(range(len(spans)), key=tables.__getitem__)
    groups: list[PrefixGroup] = []
    own_first = [0] * len(spans)
    pending = [(order, 0, 0)]  # (neighbors, number of common blocks, number of grouped blocks)
    while pending:
        members, num_common, num_grouped = pending.pop()
        runs: dict[int, list[int]] = {}  # neighbors with the same next block
        for member in members:
            if len(tables[member]) > num_common:
                runs.setdefault(tables[member][num_common], []).append(member)
        for sharing in runs.values():
            if len(sharing) < 2:
                continue
            depth = _common_blocks(tables[sharing[0]], tables[sharing[-1]], num_common)
            first, last = num_grouped * block_size, depth * block_size
            grouped = num_grouped
            if last > first and cost.is_profitable(last - first, len(sharing)):
                groups.append(PrefixGroup(tuple(sorted(sharing)), first, last))
                grouped = depth
                for member in sharing:
                    own_first[member] = last
            pending.append((sharing, depth, grouped))
    return SharedPlan(tuple(groups), tuple(own_first))


def _common_blocks(first: list[int], second: list[int], least: int) -> int:
    """Return the length of two tables' common prefix in blocks, by bisection; at least `least`."""
    stops = range(least + 1, min(len(first), len(second)) + 1)
    return least + bisect_left(
        stops, True, key=lambda stop: first[least:stop] != second[least:stop]
    )


class SharedPlanner:
    """Planner of a step's shared groups; reuses the last plan while its block tables only grow.

    To check this, it compares each span's block table with that of the last plan. If sequences
    begin to share blocks while they decode, the plan includes these blocks only after the next
    change of the batch.
    """

    def __init__(self, block_size: int, cost: SharingCost) -> None:
        self._block_size = block_size
        self._cost = cost
        self._tables: list[list[int]] = []
        self._contexts: list[int] = []
        self._plan: SharedPlan | None = None

    def plan(self, spans: Sequence[Span]) -> SharedPlan | None:
        """Return the plan for these decoding spans; None if sharing does not pay."""
        if len(spans) < 2:
            return None
        still_holds = len(spans) == len(self._tables) and all(
            span.context >= context and span.block_ids[: len(table)] == table
            for span, table, context in zip(spans, self._tables, self._contexts, strict=True)
        )
        if not still_holds:
            self._tables = [list(span.block_ids) for span in spans]
            self._contexts = [span.context for span in spans]
            plan = find_groups(spans, self._block_size, self._cost)
            self._plan = plan if plan.groups else None
        return self._plan
