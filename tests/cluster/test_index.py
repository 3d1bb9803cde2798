"""The prefix index: its answers, its memory and its errors."""

import gc
import random
import tracemalloc

import pytest

from headstart.cache import BlockHash
from headstart.cluster.events import DISK, EventBatch
from headstart.cluster.index import PrefixKey, ReplicaIndex, prefix_keys
from headstart.errors import ConfigError
from tests.cluster.feeds import Engine, cut
from tests.cluster.tables import holders, wrap_pool


def names(*numbers: int) -> list[bytes]:
    """Return 32-byte stand-ins for block hashes."""
    return [random.Random(number).randbytes(32) for number in numbers]


def stored(replica: int, number: int, *blocks: int, tier: str = "pool") -> EventBatch:
    return EventBatch(replica, 0, number, stored=b"".join(names(*blocks)), tier=tier)


def test_depths_follow_each_replicas_events() -> None:
    engines = [Engine(0), Engine(1), Engine(2)]
    index = ReplicaIndex(3)
    long, short = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9]
    for engine, tokens in ((engines[0], long), (engines[2], short)):
        batch = engine.serve(tokens)
        assert batch is not None and index.apply(batch)
    assert index.match(engines[0].keys(long)).cached == [3, 0, 1]
    assert index.match(engines[0].keys([1, 2])).cached == [1, 0, 1]
    assert index.match([]).cached == [0, 0, 0]


def test_blocks_on_disk_are_counted_apart_from_the_pool() -> None:
    index = ReplicaIndex(2)
    index.apply(stored(0, 0, 1))
    index.apply(stored(0, 0, 2, 3, tier=DISK))
    index.apply(stored(1, 0, 1, 2))
    match = index.match(prefix_keys(names(1, 2, 3)))
    assert (match.cached, match.stored) == ([1, 2], [3, 2])


def test_all_replicas_can_load_blocks_of_a_shared_store() -> None:
    index = ReplicaIndex(3, shares_store=True)
    index.apply(stored(0, 0, 1, tier="pool"))
    index.apply(stored(2, 0, 1, 2, 3, tier=DISK))
    index.apply(stored(1, 0, 1, 2, 3, 4))
    match = index.match(prefix_keys(names(1, 2, 3, 4, 5)))
    assert (match.cached, match.stored) == ([1, 4, 0], [3, 4, 3])


def test_running_blocks_are_expected_until_withdrawn() -> None:
    index = ReplicaIndex(2)
    keys = prefix_keys(names(1, 2, 3))
    index.apply(stored(1, 0, 1))
    added = index.expect(1, keys[1:])
    assert list(added) == list(keys[1:])
    assert list(index.expect(1, keys[1:])) == []
    assert index.match(keys).cached == [0, 1]
    assert index.match(keys).expected == [0, 3]
    index.unexpect(1, added)
    assert index.match(keys).expected == [0, 1]


def test_a_gap_is_reported_until_a_snapshot_arrives() -> None:
    index = ReplicaIndex(1)
    assert index.apply(stored(0, 0, 1))
    assert not index.apply(stored(0, 2, 3))
    assert not index.is_current(0)
    assert not index.apply(stored(0, 3, 4))
    whole = b"".join(names(1, 2, 3, 4))
    assert index.apply(EventBatch(0, 0, 3, stored=whole, cleared=True, snapshot=True))
    assert index.match(prefix_keys(names(1, 2, 3, 4))).cached == [4]


def test_a_snapshot_older_than_the_gap_does_not_close_it() -> None:
    index = ReplicaIndex(1)
    index.apply(stored(0, 0, 1))
    index.apply(stored(0, 5, 3))
    assert not index.apply(EventBatch(0, 0, 2, cleared=True, snapshot=True))
    assert not index.is_current(0)


def test_a_batch_has_only_net_changes() -> None:
    """A block that is stored and evicted between two batches is in neither list."""
    engine = Engine(0, num_blocks=2)
    first = engine.serve([1, 1, 1, 1])
    assert first is not None and (len(first.stored), len(first.removed)) == (64, 0)
    for tokens in ([2, 2, 2, 2], [3, 3, 3, 3]):
        engine.compute(tokens)
    batch = engine.publish()
    assert batch is not None and set(cut(batch.removed)) == set(cut(first.stored))
    assert prefix_keys(cut(batch.stored)) == engine.keys([3, 3, 3, 3])
    engine.compute([4, 4])
    engine.compute([3, 3, 3, 3])
    for tokens in ([5, 5, 5, 5], [3, 3, 3, 3]):
        engine.compute(tokens)
    assert engine.publish() is None
    assert engine.publisher.snapshot().number == batch.number == 1


class _Counting(dict[PrefixKey, int]):
    """A dictionary that counts the lookups of all its instances."""

    count = 0

    def get(self, key: PrefixKey, default: int = 0) -> int:  # type: ignore[override]
        _Counting.count += 1
        return super().get(key, default)


@pytest.mark.parametrize(("depths", "limit"), [([512] * 64, 10), ([256, 0] * 32, 20)])
def test_a_query_looks_up_few_of_a_prompts_blocks(depths: list[int], limit: int) -> None:
    """Each lookup waits for memory: 512 of them took a quarter of a millisecond."""
    index, held = ReplicaIndex(64), names(*range(512))
    for replica, depth in enumerate(depths):
        index.apply(EventBatch(replica, 0, 0, stored=b"".join(held[:depth])))
    wrap_pool(index, _Counting)
    _Counting.count = 0
    assert index.match(prefix_keys(held)).cached == depths
    assert 0 < _Counting.count <= 2 * limit  # what is cached, and what is expected


def test_every_replica_may_have_another_depth() -> None:
    index, held, rng = ReplicaIndex(64), names(*range(100)), random.Random(1)
    depths = [rng.choice([0, 1, 50, 99, 100, rng.randrange(101)]) for _ in range(64)]
    for replica, depth in enumerate(depths):
        index.apply(EventBatch(replica, 0, 0, stored=b"".join(held[:depth])))
    for count in (0, 1, 2, 63, 99, 100):
        depths_ = index.match(prefix_keys(held[:count])).cached
        assert depths_ == [min(depth, count) for depth in depths]


@pytest.mark.parametrize("holders", [1, 8, 64])
def test_memory_is_at_most_100_bytes_a_block_and_replica(holders: int) -> None:
    """The peak is just after the dictionary has grown."""
    blocks = 2**15 * 2 // 3 + 10
    packed = random.Random(0).randbytes(32 * blocks)
    gc.collect()
    tracemalloc.start()
    try:
        index = ReplicaIndex(64)
        for replica in range(holders):
            index.apply(EventBatch(replica, 0, 0, stored=packed))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == blocks
    assert used / blocks / holders <= 100


def test_no_replicas_and_unknown_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_replicas is 0; allowed: at least 1"):
        ReplicaIndex(0)
    with pytest.raises(ConfigError, match="replica 3, tier 'pool'"):
        ReplicaIndex(2).apply(stored(3, 0, 1))
    with pytest.raises(ConfigError, match="tier 'tape'"):
        ReplicaIndex(2).apply(stored(1, 0, 1, tier="tape"))


def test_requests_are_routed_while_a_large_snapshot_is_noted() -> None:
    """Regression: every request waited a tenth of a second for a replica's million tokens."""
    index, rng = ReplicaIndex(2), random.Random(0)
    old, new = rng.randbytes(32 * 10_000), rng.randbytes(32 * 10_000)
    index.apply(EventBatch(0, 0, 0, stored=old))
    assert index.apply(stored(1, 0, 1, 2))
    count, keys = 0, prefix_keys(names(1, 2))
    for _ in index.steps(EventBatch(0, 0, 4, stored=new, cleared=True, snapshot=True)):
        count += 1
        assert index.match(keys).cached == [0, 2]
        index.apply(stored(1, count, 3))
    assert index.is_current(0)
    assert count >= 4
    fresh = ReplicaIndex(2)
    fresh.apply(EventBatch(0, 0, 0, stored=new))
    fresh.apply(stored(1, 0, 1, 2, 3))
    assert holders(index) == holders(fresh)


def test_a_prefix_may_end_in_blocks_of_a_lower_tier_only() -> None:
    """An engine caches the start of a prefix longest; a store may have the remaining blocks."""
    names = [BlockHash(bytes([i]) * 32) for i in range(200)]
    index = ReplicaIndex(2)
    index.apply(EventBatch(0, 0, 0, stored=b"".join(names[:100])))
    index.apply(EventBatch(0, 0, 0, stored=b"".join(names[100:]), tier=DISK))
    assert index.match(prefix_keys(names)).stored == [200, 0]
