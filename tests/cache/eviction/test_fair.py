"""Eviction between several owners that share the pool."""

import random
from collections import Counter

import pytest

from headstart.cache import (
    CacheConfig,
    KVCacheManager,
    Mark,
    PublicBlocks,
    Shares,
    TokenSequence,
)
from headstart.errors import CacheError
from tests.cache.workloads import Workload

BLOCK = 4


class Owners:
    """A pool of blocks of four tokens, and owners who send requests to it."""

    def __init__(self, blocks: int, eviction: str = "fair-lru", **weights: float) -> None:
        config = CacheConfig(num_blocks=blocks, block_size=BLOCK, eviction=eviction)
        self.manager = KVCacheManager(config)
        for owner, weight in weights.items():
            self.manager.shares.set(owner, weight)
        self.hit: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self._random = random.Random(3)

    def run(self, salt: str, tokens: list[int]) -> int:
        """Run a request; return the number of its tokens that were hits."""
        sequence = TokenSequence("one", tokens, salt=salt)
        match = self.manager.get_computed_blocks(sequence)
        assert self.manager.allocate_slots(sequence, len(tokens) - match.num_tokens, match)
        self.manager.commit_step()
        self.manager.free(sequence)
        self.manager.check()
        self.hit[salt] += match.num_tokens
        self.prompt_tokens[salt] += len(tokens)
        return match.num_tokens

    def flood(self, salt: str, blocks: int) -> None:
        """Send a prompt that no later request repeats."""
        self.run(salt, [self._random.randrange(10**6) for _ in range(blocks * BLOCK)])

    def count_cached(self, salt: str, texts: list[list[int]]) -> int:
        """Count the cached blocks of these texts."""
        looked = [TokenSequence("look", [*text, 0], salt=salt) for text in texts]
        return sum(self.manager.get_computed_blocks(one).num_tokens // BLOCK for one in looked)


def texts(count: int, blocks: int) -> list[list[int]]:
    drawn = random.Random(4)
    return [[drawn.randrange(10**6) for _ in range(blocks * BLOCK)] for _ in range(count)]


def test_free_blocks_within_a_share_are_counted_as_protected() -> None:
    """Blocks that the owner holds or may still take for itself are subtracted.

    Policies without owners count none.
    """
    owners = Owners(80, a=1.0, b=3.0)
    [held, free] = texts(2, 10)
    owners.run("b", free)
    owners.run("a", free)
    count = owners.manager.count_protected
    assert count("b", {"a": 0, "b": 0}) == count("a", {"a": 0, "b": 0}) == 10
    assert count("b", {"a": 15, "b": 0}) == 5
    assert count("b", {"a": 30, "b": 0}) == 0
    assert count("b", {"b": 0}) == 0
    running = TokenSequence("held", held, salt="a")
    assert owners.manager.allocate_slots(running, len(held))
    assert count("b", {"a": 6, "b": 0}) == 4
    assert count("b", {"a": 0, "b": 0}) == 10
    others = Owners(80, "lru", a=1.0, b=1.0)
    others.run("a", free)
    assert others.manager.count_protected("b", {"a": 0, "b": 0}) == 0


def hit_rate(eviction: str, flooded: int) -> float:
    """Return the hit rate of an owner of 36 of 80 blocks, with a flood between its requests."""
    owners = Owners(80, eviction, a=1.0, b=1.0)
    documents = texts(9, 4)
    for at in range(90):
        owners.run("a", documents[at % 9])
        if flooded:
            owners.flood("b", flooded)
    return owners.hit["a"] / owners.prompt_tokens["a"]


@pytest.mark.parametrize("flooded", [8, 20, 40])
def test_a_flood_takes_nothing_from_an_owner_within_its_share(flooded: int) -> None:
    alone = hit_rate("fair-lru", 0)
    assert hit_rate("fair-lru", flooded) == alone > 0.8
    assert hit_rate("adaptive-lru", flooded) < alone - 0.05, "the flood is none"


def test_shares_follow_weights_and_unused_space_is_free() -> None:
    owners = Owners(80, a=1.0, b=3.0)
    mine = {"a": texts(40, 2), "b": texts(40, 2)[::-1]}
    for text in mine["a"]:
        owners.run("a", text)
    assert owners.count_cached("a", mine["a"]) == 80, "alone it may have everything"
    for text in mine["b"]:
        owners.run("b", text)
    assert owners.count_cached("a", mine["a"]) == pytest.approx(20, abs=1)
    for text in [*mine["a"], *mine["a"]]:
        owners.run("a", text)
    assert owners.count_cached("a", mine["a"]) == pytest.approx(20, abs=1)
    assert owners.count_cached("b", mine["b"]) == pytest.approx(60, abs=1)


def test_an_owner_does_not_grow_by_narrowing_its_salt() -> None:
    owners = Owners(80, a=1.0, b=1.0)
    documents = texts(9, 4)
    for at in range(90):
        owners.run("a", documents[at % 9])
        owners.flood(f"b/{at}", 20)
    assert owners.hit["a"] / owners.prompt_tokens["a"] == hit_rate("fair-lru", 0)


def test_undeclared_salts_share_one_owner() -> None:
    """Without declared owners, many salts give no larger part of the pool."""
    owners = Owners(80)
    for at in range(9):
        owners.flood(f"salt {at}", 8)
    assert owners.manager.shares.owner("salt 1") is None
    own = texts(1, 20)[0]
    owners.run("mine", own)
    owners.flood("other", 20)
    owners.flood("another", 20)
    assert owners.count_cached("mine", [own]) == 20


@pytest.mark.parametrize("seed", range(3))
def test_with_one_owner_it_is_adaptive_lru(seed: int) -> None:
    """Both policies have the same order through hits, evictions and partial blocks."""
    works = [Workload(30, eviction=name) for name in ("adaptive-lru", "fair-lru")]
    drawn = random.Random(seed)
    prompts = [[drawn.randrange(3) for _ in range(drawn.randrange(1, 40))] for _ in range(200)]
    for prompt in prompts:
        for work in works:
            work.run(prompt, 2)
        left, right = ([block.block_id for block in work.manager.pool.free] for work in works)
        assert left == right
    assert works[0].hit == works[1].hit > 0


def standing(manager: KVCacheManager) -> dict[str | None, list[int]]:
    """Return each owner's blocks in eviction order."""
    lines = manager.pool.free._cached.items()
    return {owner: [block.block_id for block in line] for owner, line in lines if len(line)}


def test_a_new_owner_gets_the_blocks_of_its_salt() -> None:
    """Regression: blocks lost their owner, so `check` failed."""
    lines, used = [], []
    for early in (True, False):
        manager = Owners(80, **({"a": 1.0, "b": 2.5} if early else {})).manager
        public = PublicBlocks()
        public.publish(range(8), BLOCK)
        running = []
        for at, salt in enumerate(["a", "b/x", None, "a/y", "nobody", "b"]):
            tokens = [*range((5 - at) % 3 * 4), *[100 + at] * (7 + at)]
            one = TokenSequence(f"{at}", tokens, salt=salt, public=public)
            one.marks = [Mark(12, 600.0)] if at == 3 else ()
            assert manager.allocate_slots(one, len(tokens))
            manager.commit_step()
            running.append(one)
        for one in running[:5]:
            manager.free(one)  # public blocks, partial and retained ones
        if not early:
            assert standing(manager).keys() == {None}
            for owner, weight in (("a", 1.0), ("b", 2.5)):
                manager.shares.set(owner, weight)
            manager.check()
        match = manager.get_computed_blocks(other := TokenSequence("other", [1] * 9, salt="a"))
        assert manager.allocate_slots(other, 9, match)
        manager.check()
        lines.append(standing(manager))
        used.append(+manager.pool.free._used)
    assert lines[0] == lines[1] and len(lines[0]) == 4
    assert used[0] == used[1]


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan"), "2", None])
def test_a_weight_outside_its_range_is_refused(weight: object) -> None:
    shares = Shares()
    with pytest.raises(CacheError, match=r"weight of owner 'a' is .*; allowed: a number above 0"):
        shares.set("a", weight)
    assert not shares.count
