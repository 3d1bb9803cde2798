"""Marked blocks are reused last for a limited time, up to a share of the pool."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import (
    CacheConfig,
    KVCacheBlock,
    KVCacheManager,
    Mark,
    Shares,
    TokenSequence,
)
from headstart.cache.block import RootNode, make_node
from headstart.cache.eviction import POLICIES
from headstart.cache.free_queue import Marks
from headstart.cache.identity import BlockKey, Namespace
from headstart.cache.stats import AGE_BOUNDS

BLOCK = 4
MINUTES = 60.0


class Pool:
    """A manager with a manual clock; each request ends at once."""

    def __init__(self, num_blocks: int, eviction: str = "adaptive-lru") -> None:
        self.now = 0.0
        config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK, eviction=eviction)
        self.manager = KVCacheManager(config, clock=lambda: self.now)
        self._drawn = random.Random(1)

    def text(self, blocks: int) -> list[int]:
        """Tokens that no request has had."""
        return [self._drawn.randrange(10**6) for _ in range(blocks * BLOCK)]

    def run(self, tokens: list[int], *marks: Mark, salt: str | None = None) -> None:
        sequence = TokenSequence("one", tokens, salt=salt)
        sequence.marks = marks
        match = self.manager.get_computed_blocks(sequence)
        assert self.manager.allocate_slots(sequence, len(tokens) - match.num_tokens, match)
        self.manager.commit_step()
        self.manager.free(sequence)
        self.manager.check()

    def flood(self, blocks: int, salt: str | None = None) -> None:
        for _ in range(blocks // 2):
            self.run(self.text(2), salt=salt)

    def count_cached(self, text: list[int], salt: str | None = None) -> int:
        """Count the cached blocks of a prompt."""
        look = TokenSequence("look", [*text, 0], salt=salt)
        return self.manager.get_computed_blocks(look).num_tokens // BLOCK


@pytest.mark.parametrize("eviction", ["adaptive-lru", "fair-lru"])
def test_marked_blocks_outlive_a_flood_until_their_time_is_over(eviction: str) -> None:
    pool = Pool(40, eviction)
    marked, plain = pool.text(8), pool.text(8)
    pool.run(marked, Mark(5 * BLOCK + 3, 5 * MINUTES))
    pool.run(plain)
    pool.flood(100)
    assert (pool.count_cached(marked), pool.count_cached(plain)) == (5, 0)
    pool.now = 4 * MINUTES
    pool.flood(100)
    assert pool.count_cached(marked) == 5
    pool.now = 5 * MINUTES
    pool.flood(100)
    assert pool.count_cached(marked) == 0


@pytest.mark.parametrize("eviction", ["lru", "empty-first-lru"])
def test_other_policies_ignore_marks(eviction: str) -> None:
    pool = Pool(40, eviction)
    marked = pool.text(8)
    pool.run(marked, Mark(8 * BLOCK, 5 * MINUTES))
    pool.flood(100)
    assert pool.count_cached(marked) == 0


def test_a_hit_restarts_the_time_only_if_it_is_marked() -> None:
    for again, expected in ((), 0), ((Mark(99, 5 * MINUTES),), 4):
        pool = Pool(40)
        text = pool.text(4)
        pool.run(text, Mark(99, 5 * MINUTES))
        pool.now = 4 * MINUTES
        pool.run([*text, 0], *again)
        pool.now = 6 * MINUTES
        pool.flood(100)
        assert pool.count_cached(text) == expected


def test_a_shorter_mark_does_not_end_a_longer_one() -> None:
    pool = Pool(40)
    text = pool.text(4)
    pool.run(text, Mark(99, 60 * MINUTES))
    pool.run([*text, 0], Mark(99, 5 * MINUTES))
    pool.now = 30 * MINUTES
    pool.flood(100)
    assert pool.count_cached(text) == 4


def test_marks_retain_half_of_the_pool_and_the_first_to_expire_go_first() -> None:
    pool = Pool(40)
    long, texts = pool.text(8), [pool.text(4) for _ in range(20)]
    pool.run(long, Mark(99, 60 * MINUTES))
    for text in texts:
        pool.run(text, Mark(99, 5 * MINUTES))
    pool.flood(100)
    assert pool.count_cached(long) == 8
    assert [pool.count_cached(text) for text in texts] == [0] * 17 + [4] * 3
    plain = pool.text(8)
    pool.run(plain)
    assert pool.count_cached(plain) == 8, "others have space"


def test_a_request_that_needs_the_whole_pool_gets_it() -> None:
    pool = Pool(40)
    text = pool.text(8)
    pool.run(text, Mark(99, 60 * MINUTES))
    pool.run(pool.text(40))
    assert pool.count_cached(text) == 0


def test_an_owner_s_marks_take_nothing_from_others() -> None:
    """Each of two owners has half of the pool; one marks all of its requests."""
    pool = Pool(40, "fair-lru")
    for owner in "ab":
        pool.manager.shares.set(owner, 1.0)
    document = pool.text(16)
    pool.run(document, salt="a")
    texts = [pool.text(4) for _ in range(20)]
    for text in texts:
        pool.run(text, Mark(99, 60 * MINUTES), salt="b")
    assert pool.count_cached(document, "a") == 16
    pool.flood(60, "b")
    assert pool.count_cached(document, "a") == 16
    assert sum(pool.count_cached(text, "b") for text in texts) == 10, "half of its half"


def test_discarded_and_reset_blocks_are_not_retained() -> None:
    pool = Pool(10)
    sequence = TokenSequence("one", pool.text(4))
    sequence.marks = [Mark(99, 5 * MINUTES)]
    assert pool.manager.allocate_slots(sequence, 16)
    pool.manager.discard([sequence])
    pool.manager.commit_step()
    pool.manager.check()
    assert not pool.manager.pool.marks
    pool.run(pool.text(4), Mark(99, 5 * MINUTES))
    assert pool.manager.reset_prefix_cache()
    pool.manager.check()
    assert [block.block_id for block in pool.manager.pool.free] == list(range(10))


def test_ages_of_evicted_blocks_are_counted() -> None:
    """Blocks are released at 0 s, used again at 10 s and evicted at 37 s."""
    pool = Pool(256)
    text, other = pool.text(128), pool.text(128)
    pool.run(text)
    pool.run(other)
    pool.now = 10.0
    pool.run([*text, 0])
    ages = pool.manager.stats.eviction_ages
    before = list(ages.counts)
    pool.now = 37.0
    pool.flood(256)
    counts = [now - then for now, then in zip(ages.counts, before, strict=True)]
    by_age = {bound: n for bound, n in zip([*AGE_BOUNDS, None], counts, strict=True) if n}
    assert by_age == {30: 2, 60: 2}, "of every 64th block"
    assert ages.seconds == sum((27, 27, 37, 37))


class Model:
    """A policy for full blocks as two lists: one in eviction order, one of retained blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.line: list[int] = []
        self.retained: list[tuple[int, int]] = []  # (minute, block), in order
        self.until: dict[int, int] = {}
        self.most = num_blocks // 2

    def release(self, block: int, now: float) -> None:
        minute = self.until.get(block)
        if minute is not None and minute * 60 > now:
            at = sum(1 for other, _ in self.retained if other <= minute)
            self.retained.insert(at, (minute, block))
        while self.retained and (self.retained[0][0] * 60 <= now or len(self.retained) > self.most):
            _, due = self.retained.pop(0)
            del self.until[due]
            self.line.append(due)
        if (minute, block) not in self.retained and block not in self.line:
            self.until.pop(block, None)
            self.line.append(block)

    def leave(self, block: int) -> None:
        self.line = [other for other in self.line if other != block]
        self.retained = [entry for entry in self.retained if entry[1] != block]

    def order(self) -> list[int]:
        return [*self.line, *(block for _, block in self.retained)]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "withdraw", "take", "release", "mark", "wait"]),
        st.integers(0, 9),
        st.sampled_from([20, 60, 300, 3600]),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, name=st.sampled_from(["adaptive-lru", "fair-lru"]))
def test_the_order_is_that_of_the_model(operations: list[tuple[str, int, int]], name: str) -> None:
    now = [0.0]
    blocks = [KVCacheBlock(at) for at in range(10)]
    policy = POLICIES[name](blocks, Shares(), Marks(lambda: now[0]))
    model, held = Model(10), policy.take(10)
    for block in blocks:
        block.node = make_node(RootNode(Namespace(None, None)), BlockKey(b"x"))
    for what, which, seconds in operations:
        block = blocks[which]
        if what == "wait":
            now[0] += seconds
        elif what == "mark" and block in held:
            policy.retain([block], seconds)
            minute = -int(-(now[0] + seconds) // 60)
            model.until[which] = max(minute, model.until.get(which, minute))
        elif what == "release" and block in held:
            held.remove(block)
            policy.release([block])
            model.release(which, now[0])
        elif what in ("claim", "withdraw") and block not in held:
            getattr(policy, what)([block])
            model.leave(which)
            held.append(block)
        elif what == "take" and which < len(policy):
            taken = policy.take(which)
            assert [block.block_id for block in taken] == model.order()[:which]
            for one in taken:
                model.leave(one.block_id)
                model.until.pop(one.block_id, None)
            held += taken
        policy.check()
        assert [block.block_id for block in policy] == model.order()
        assert len(policy) == len(model.order())
