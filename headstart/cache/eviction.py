"""Eviction by name, and between owners that share the pool.

With "fair-lru" the owner that has most of the pool for its weight gives the next block.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from headstart.cache.block import KVCacheBlock
from headstart.cache.identity import PUBLIC, cut_salt
from headstart.cache.policies import (
    AdaptiveLru,
    EmptyFirstLru,
    EvictionPolicy,
    FreeBlockQueue,
    Lru,
    Marks,
)
from headstart.cache.shares import Shares, owner_among
from headstart.errors import CacheError, ConfigError

Owner = str | None


class FairLru:
    """`AdaptiveLru` among the free blocks of each owner, and max-min fair between owners.

    Empty blocks are taken first. Then each block is taken from the owner that has most for its
    weight, held and cached blocks together, and the taken blocks count as the taker's. So an owner
    with less than its share loses nothing to an owner with more, and an owner may use all blocks
    that no other uses. A block costs O(log owners), and O(1) while a single owner has free cached
    blocks. An owner retains at most half of its share of the pool, and only against its own blocks.

    Blocks with an identity that are released together are of one prefix. Public blocks at its head
    have a separate owner. When a salt becomes an owner, its existing blocks move to it at the next
    change, in queue order.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], shares: Shares, marks: Marks) -> None:
        self._shares = shares
        self._owners = shares.names()  # to which the fields below refer
        self._marks = marks
        self._num_blocks = len(blocks)
        self._num_cached = 0
        self._empty = FreeBlockQueue(blocks)
        self._cached: dict[Owner, AdaptiveLru] = {}
        self._salts: dict[KVCacheBlock, str | None] = {}  # of each held or cached block
        self._used: Counter[Owner] = Counter()  # number of held and cached blocks

    def _owner(self, salt: str | None) -> Owner:
        return owner_among(self._owners, salt)

    def _follow_shares(self) -> None:
        """Move blocks without an owner to new owners."""
        if self._shares.count == len(self._owners):
            return
        self._owners = self._shares.names()
        self._used = Counter(map(self._owner, self._salts.values()))
        if None in self._cached:
            unowned = self._cached[None]
            moved = [block for block in unowned if self._owner(self._salts[block]) is not None]
            unowned.withdraw(moved)
            salts = [self._salts[block] for block in moved]
            queues = {salt: self._queue(self._owner(salt)) for salt in set(salts)}
            for block, salt in zip(moved, salts, strict=True):
                queues[salt].release([block])

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._follow_shares()
        self._forget(blocks)
        cached = [block for block in blocks if block.node is not None]
        for salt, owned in self._by_salt(cached):
            self._queue(self._owner(salt)).release(owned)
            self._num_cached += len(owned)
            self._note(owned, salt)
        if len(cached) < len(blocks):
            for block in blocks:
                if block.node is None:
                    self._empty.appendleft(block)
            self._marks.drop([block for block in blocks if block.node is None])

    def _queue(self, owner: Owner) -> AdaptiveLru:
        if owner not in self._cached:
            self._cached[owner] = AdaptiveLru([], self._marks, self._num_blocks)
        if self._marks:  # half of the owner's share while all other owners use theirs
            share = self._shares.weight(owner) / sum(map(self._shares.weight, self._cached))
            self._cached[owner].most_retained = int(self._num_blocks * share / 2)
        return self._cached[owner]

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        self._marks.add(blocks, seconds)

    def _by_salt(self, cached: list[KVCacheBlock]) -> list[tuple[str | None, list[KVCacheBlock]]]:
        """Return blocks of one prefix, last block first, by salt."""
        if not cached:
            return []
        salt = _salt_of(cached[-1])  # the nearest to the root
        if salt != PUBLIC:
            return [(salt, cached)]
        for i in range(len(cached) - 1, -1, -1):
            node = cached[i].node
            salt = cut_salt(node.key)[0] if node is not None else None
            if salt is not None:
                return [(salt, cached[: i + 1]), (PUBLIC, cached[i + 1 :])]
        return [(PUBLIC, cached)]

    def _note(self, blocks: Sequence[KVCacheBlock], salt: str | None) -> None:
        self._salts.update(dict.fromkeys(blocks, salt))
        self._used[self._owner(salt)] += len(blocks)

    def _forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        salts = [self._salts.pop(block) for block in blocks if block in self._salts]
        for salt, count in Counter(salts).items():
            self._used[self._owner(salt)] -= count

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._follow_shares()
        for owner, owned in self._split(blocks).items():
            self._cached[owner].claim(owned)

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._follow_shares()
        for owner, owned in self._split(blocks).items():
            self._cached[owner].withdraw(owned)
        self._forget(blocks)

    def _split(self, blocks: Sequence[KVCacheBlock]) -> dict[Owner, list[KVCacheBlock]]:
        """Return the cached ones of free blocks by owner; remove the empty ones from the queue."""
        by_salt: dict[str | None, list[KVCacheBlock]] = defaultdict(list)
        for block in blocks:
            if block in self._salts:
                by_salt[self._salts[block]].append(block)
                self._num_cached -= 1
            else:
                self._empty.remove(block)
        by_owner: dict[Owner, list[KVCacheBlock]] = defaultdict(list)
        for salt, cached in by_salt.items():
            by_owner[self._owner(salt)] += cached
        return by_owner

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        if count > len(self):
            raise CacheError(f"{count} free blocks are needed; the free queue has {len(self)}")
        self._follow_shares()
        taker = self._owner(salt)
        blocks = self._empty.popleft(min(count, len(self._empty)))
        picks = self._pick(count - len(blocks), taker, count)
        owned = {owner: iter(self._cached[owner].take(n)) for owner, n in Counter(picks).items()}
        evicted = [next(owned[owner]) for owner in picks]
        self._num_cached -= len(evicted)
        self._forget(evicted)
        blocks += evicted
        self._note(blocks, salt)
        return blocks

    def _pick(self, count: int, taker: Owner, num_taken: int) -> list[Owner]:
        """Return the owners of the next `count` cached blocks to take, one by one."""
        left = {owner: len(cached) for owner, cached in self._cached.items() if len(cached)}
        if len(left) == 1:
            return [*left] * count
        weights = {owner: self._shares.weight(owner) for owner in left}
        used = {owner: self._used[owner] + num_taken * (owner == taker) for owner in left}
        most = [(-used[owner] / weights[owner], i, owner) for i, owner in enumerate(left)]
        heapify(most)
        picks = []
        for _ in range(count):
            _, i, owner = heappop(most)
            picks.append(owner)
            left[owner] -= 1
            used[owner] -= 1
            if left[owner]:
                heappush(most, (-used[owner] / weights[owner], i, owner))
        return picks

    def count_kept(self, taker: Owner, to_come: Mapping[str, int]) -> int:
        total = sum(map(self._shares.weight, to_come))
        count = 0
        for owner, blocks in to_come.items():
            cached = len(self._cached.get(owner, ())) if owner != taker else 0
            if cached:
                share = int(self._num_blocks * self._shares.weight(owner) / total)
                num_held = self._used[owner] - cached
                count += max(0, min(cached, share - num_held - blocks))
        return count

    def __len__(self) -> int:
        return len(self._empty) + self._num_cached

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Yield the blocks in order for a taker that is no owner."""
        yield from self._empty
        cached = {owner: iter(blocks) for owner, blocks in self._cached.items()}
        for owner in self._pick(self._num_cached, None, 0):
            yield next(cached[owner])

    def check(self) -> None:
        """Raise AssertionError if a block counts for another owner than its identity's."""
        assert self._num_cached == sum(map(len, self._cached.values())), (
            "cached blocks are miscounted"
        )
        owners = Counter(map(self._owner, self._salts.values()))
        assert +self._used == owners, "an owner's blocks are miscounted"
        for owner, cached in self._cached.items():
            cached.check()
            for block in cached:
                assert self._owner(self._salts[block]) == owner, f"{block} counts for another owner"
                actual = self._owner(_salt_of(block))
                assert actual == owner, f"{block} is in another owner's queue"
        assert not any(block in self._salts for block in self._empty), "an empty block counts"


def _salt_of(block: KVCacheBlock) -> str | None:
    return block.node.salt() if block.node is not None else None


POLICIES: Mapping[str, Callable[[Sequence[KVCacheBlock], Shares, Marks], EvictionPolicy]] = (
    MappingProxyType(
        {
            "lru": lambda blocks, shares, marks: Lru(blocks),
            "empty-first-lru": lambda blocks, shares, marks: EmptyFirstLru(blocks),
            "adaptive-lru": lambda blocks, shares, marks: AdaptiveLru(blocks, marks),
            "fair-lru": FairLru,
        }
    )
)


def make_policy(
    name: str,
    blocks: Sequence[KVCacheBlock],
    shares: Shares | None = None,
    marks: Marks | None = None,
) -> EvictionPolicy:
    """Return the policy of this name over these blocks, all free. Raises ConfigError.

    marks: the blocks to retain; by default none.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction is {name!r}; allowed: {', '.join(POLICIES)}")
    return POLICIES[name](
        blocks, shares or Shares(), Marks(time.monotonic) if marks is None else marks
    )
