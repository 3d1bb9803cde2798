"""Removed replicas are in no answer, and leave the tables step by step."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headstart.cluster import Router, make_policy
from headstart.cluster import index as index_module
from headstart.cluster.events import DISK, POOL, EventBatch
from headstart.cluster.index import PrefixKey, ReplicaIndex, unpack_keys
from headstart.cluster.router import RouteRequest
from tests.cluster.tables import expectations, holders, wrap_pool

REPLICAS, CHAINS, LENGTH = 3, 3, 6
NAMES = [[random.Random(9 * c + at).randbytes(32) for at in range(LENGTH)] for c in range(CHAINS)]
KEYS = [unpack_keys(b"".join(chain)) for chain in NAMES]

WHICH, CHAIN = st.integers(0, REPLICAS - 1), st.integers(0, CHAINS - 1)
DEPTH, TIER = st.integers(0, LENGTH), st.sampled_from([POOL, DISK])


def sweep(index: ReplicaIndex) -> int:
    """Sweep until nothing is left, and return the number of steps."""
    steps = 1
    while index.sweep():
        steps += 1
    return steps


class Removals(RuleBasedStateMachine):
    """Replicas hold and expect starts of some chains of blocks, and come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.object(index_module, "SWEPT", 1),
            mock.patch.object(index_module, "_STRIDE", 2),
        ]
        for patch in self.patches:
            patch.start()
        self.index = ReplicaIndex(REPLICAS)
        self.numbers: dict[tuple[int, str], int] = {}
        self.depths: dict[tuple[int, str, int], int] = {}
        self.expected: list[tuple[int, int, int, Sequence[PrefixKey]]] = []

    @rule(which=WHICH, tier=TIER, chain=CHAIN, depth=DEPTH)
    def hold(self, which: int, tier: str, chain: int, depth: int) -> None:
        """Store blocks, or evict them from the end."""
        before = self.depths.get((which, tier, chain), 0)
        number = self.numbers.get((which, tier), 0)
        stored, removed = NAMES[chain][before:depth], NAMES[chain][depth:before]
        batch = EventBatch(which, 0, number, b"".join(stored), b"".join(removed), tier=tier)
        assert self.index.apply(batch)
        self.numbers[which, tier] = number + 1
        self.depths[which, tier, chain] = depth

    @rule(which=WHICH, tier=TIER)
    def clear(self, which: int, tier: str) -> None:
        number = self.numbers.get((which, tier), 0)
        assert self.index.apply(EventBatch(which, 0, number, cleared=True, tier=tier))
        self.numbers[which, tier] = number + 1
        for chain in range(CHAINS):
            self.depths.pop((which, tier, chain), None)

    @rule(which=WHICH, chain=CHAIN, depth=DEPTH)
    def expect(self, which: int, chain: int, depth: int) -> None:
        if not any(entry[:2] == (which, chain) for entry in self.expected):
            added = self.index.expect(which, KEYS[chain][:depth])
            self.expected.append((which, chain, depth, added))

    @rule(data=st.data())
    def unexpect(self, data: st.DataObject) -> None:
        if self.expected:
            i = data.draw(st.integers(0, len(self.expected) - 1))
            which, _, _, added = self.expected.pop(i)
            self.index.unexpect(which, added)

    @rule(which=WHICH)
    def remove(self, which: int) -> None:
        self.index.remove(which)
        self.expected = [entry for entry in self.expected if entry[0] != which]
        for tier in (POOL, DISK):
            self.numbers.pop((which, tier), None)
            for chain in range(CHAINS):
                self.depths.pop((which, tier, chain), None)

    @rule(times=st.sampled_from([1, 5, 20, 100]))
    def look_through(self, times: int) -> None:
        for _ in range(times):
            if not self.index.sweep():
                break

    @invariant()
    def answers_match_the_current_replicas(self) -> None:
        for chain, keys in enumerate(KEYS):
            match = self.index.match(keys)
            for which in range(REPLICAS):
                pool, disk = (self.depths.get((which, tier, chain), 0) for tier in (POOL, DISK))
                sent = [depth for r, c, depth, _ in self.expected if (r, c) == (which, chain)]
                expected = max(pool, *sent, 0)
                assert match.cached[which] == pool
                assert match.expected[which] == expected
                assert match.stored[which] == max(expected, disk)

    def teardown(self) -> None:
        """A sweep leaves nothing of a removed replica, and few bits are ever needed."""
        try:
            self.check_end()
        finally:
            for patch in self.patches:
                patch.stop()

    def check_end(self) -> None:
        sweep(self.index)
        for tier in (POOL, DISK):
            counts = Counter[PrefixKey]()
            for (_, other, chain), depth in self.depths.items():
                counts.update(KEYS[chain][:depth] if other == tier else ())
            table = holders(self.index, tier)
            assert counts == {key: bits.bit_count() for key, bits in table.items()}
        assert not self.index.sweep()
        for which in range(REPLICAS):
            self.remove(which)
        sweep(self.index)
        assert not holders(self.index, POOL) and not holders(self.index, DISK)
        assert not expectations(self.index)


TestRemovals = Removals.TestCase
TestRemovals.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_replica_is_removed_without_scanning_its_blocks() -> None:
    """Regression: every request waited a tenth of a second for one scan of a million blocks."""

    class Closed(dict[PrefixKey, int]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError

        items = keys = values = get = pop = __iter__  # type: ignore[assignment]

    index, packed = ReplicaIndex(2), random.Random(0).randbytes(32 * 1000)
    index.apply(EventBatch(0, 0, 0, stored=packed))
    parts = iter(wrap_pool(index, Closed))
    index.remove(0)
    wrap_pool(index, lambda _: next(parts))
    assert index.match(unpack_keys(packed)).stored == [0, 0]


def test_one_step_of_a_sweep_visits_few_blocks() -> None:
    index, count = ReplicaIndex(2), 100_000
    index.apply(EventBatch(0, 0, 0, stored=random.Random(0).randbytes(32 * count)))
    index.remove(0)
    while True:
        before = len(index)
        is_more = index.sweep()
        assert before - len(index) <= index_module.SWEPT + count / 32
        if not is_more:
            break
    assert len(index) == 0


def test_batches_sweep_removed_replicas_and_bits_are_reused() -> None:
    """Neither blocks nor bits accumulate when replicas come and go."""
    index, rng, most = ReplicaIndex(2), random.Random(0), 0
    index.apply(EventBatch(1, 0, 0, stored=rng.randbytes(32 * 5000)))
    for _ in range(30):
        index.apply(EventBatch(0, 0, 0, stored=rng.randbytes(32 * 5000)))
        most = max(most, len(index))
        index.remove(0)
    assert most <= 1.5 * 10_000
    index.apply(EventBatch(0, 0, 0, stored=rng.randbytes(32)))
    assert max(holders(index).values()).bit_length() <= 5


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_the_rest_of_a_batch_is_not_noted_for_a_reused_number(num_steps: int) -> None:
    index, rng = ReplicaIndex(1), random.Random(0)
    old, new, other = (rng.randbytes(32 * 4000) for _ in range(3))
    index.apply(EventBatch(0, 0, 0, stored=old))
    steps = index.steps(EventBatch(0, 1, 0, stored=new, cleared=True))
    for _ in range(num_steps):
        next(steps)
    index.remove(0)
    sweep(index)
    index.apply(EventBatch(0, 2, 0, stored=other))
    with pytest.raises(StopIteration):
        next(steps)
    assert len(index) == 4000
    assert index.match(unpack_keys(other)).cached == [4000]


def test_a_request_of_a_removed_replica_withdraws_nothing_from_the_next() -> None:
    router = Router(1, make_policy("expected"))
    for name in ("before", "after"):
        router.set_alive(0, True)
        router.route(RouteRequest(name, KEYS[0], LENGTH * 16 + 1, 16), 0.0)
        router.catch_up()
        if name == "before":
            router.set_alive(0, False)
    router.finish("before")
    assert router.index.match(KEYS[0]).expected == [LENGTH]


def test_replicas_without_events_need_no_new_bits() -> None:
    index = ReplicaIndex(64)
    for replica in range(64):
        index.remove(replica)
    for most in (64, 65, 65):
        index.apply(EventBatch(0, 0, 0, stored=NAMES[0][0]))
        assert max(holders(index).values()).bit_length() <= most
        index.remove(0)
        sweep(index)
        index.remove(0)
    assert not index.sweep()


@pytest.mark.parametrize("tier", [POOL, DISK])
def test_memory_of_removed_replicas_is_reused(tier: str) -> None:
    index, rng = ReplicaIndex(4), random.Random(0)
    packed, other = rng.randbytes(32 * 50_000), rng.randbytes(32 * 50_000)
    tracemalloc.start()
    try:
        for replica in range(4):
            index.apply(EventBatch(replica, 0, 0, stored=packed, tier=tier))
        full = tracemalloc.get_traced_memory()[0]
        for replica in range(4):
            index.remove(replica)
        sweep(index)
        index.apply(EventBatch(0, 0, 0, stored=other, tier=tier))
        assert tracemalloc.get_traced_memory()[0] <= 1.05 * full
    finally:
        tracemalloc.stop()
