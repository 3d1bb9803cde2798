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
    """As `AdaptiveLru` among the free blocks of one owner, and max-min fair between owners.

    Empty blocks are taken first. Then each block is taken from the owner that has most for its
    weight, held and cached blocks together, and the blocks that are taken count as the taker's. So
    an owner with less than its share loses nothing to one with more, however much that one asks
    for, and what nobody else wants anybody may have. A block costs O(log owners), and O(1) while
    one owner alone has free cached blocks. An owner retains half of its share of the pool at the
    most, and against its own blocks alone.

    Blocks with an identity that are released together are of one prefix. Public blocks at its head
    have an owner of their own. Who is made an owner while his blocks are here, as nobody's, has
    them from the next change on, in the order in which they stand.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], shares: Shares, marks: Marks) -> None:
        self._shares = shares
        self._owners = shares.names()  # as the fields below know them
        self._marks = marks
        self._num_blocks = len(blocks)
        self._num_cached = 0
        self._empty = FreeBlockQueue(blocks)
        self._cached: dict[Owner, AdaptiveLru] = {}
        self._salts: dict[KVCacheBlock, str | None] = {}  # of each block that is held or cached
        self._used: Counter[Owner] = Counter()  # how many of those

    def _owner(self, salt: str | None) -> Owner:
        return owner_among(self._owners, salt)

    def _follow_shares(self) -> None:
        """Give owners that are new the blocks that were nobody's."""
        if self._shares.count == len(self._owners):
            return
        self._owners = self._shares.names()
        self._used = Counter(map(self._owner, self._salts.values()))
        if None in self._cached:
            nobodys = self._cached[None]
            moved = [block for block in nobodys if self._owner(self._salts[block]) is not None]
            nobodys.withdraw(moved)
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
        if self._marks:
            self._cached[owner].most_retained = self._count_retainable(owner)
        return self._cached[owner]

    def _count_retainable(self, owner: Owner) -> int:
        """Half of what the owner may have while every other one wants all that it can get."""
        weight = self._shares.weight(owner)
        return int(self._num_blocks * weight / sum(map(self._shares.weight, self._cached)) / 2)

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        self._marks.add(blocks, seconds)

    def _by_salt(self, cached: list[KVCacheBlock]) -> list[tuple[str | None, list[KVCacheBlock]]]:
        """Blocks of one prefix, last block first, by whose they are."""
        if not cached:
            return []
        salt = _salt_of(cached[-1])  # the nearest to the root
        if salt != PUBLIC:
            return [(salt, cached)]
        for at in range(len(cached) - 1, -1, -1):
            node = cached[at].node
            salt = cut_salt(node.key)[0] if node is not None else None
            if salt is not None:
                return [(salt, cached[: at + 1]), (PUBLIC, cached[at + 1 :])]
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
        """The cached ones of these free blocks by owner; the empty ones have left the queue."""
        of_salt: dict[str | None, list[KVCacheBlock]] = defaultdict(list)
        for block in blocks:
            if block in self._salts:
                of_salt[self._salts[block]].append(block)
                self._num_cached -= 1
            else:
                self._empty.remove(block)
        owned: dict[Owner, list[KVCacheBlock]] = defaultdict(list)
        for salt, own in of_salt.items():
            owned[self._owner(salt)] += own
        return owned

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        if count > len(self):
            raise CacheError(f"{count} blocks asked of a free queue of {len(self)}")
        self._follow_shares()
        taker = self._owner(salt)
        taken = self._empty.popleft(min(count, len(self._empty)))
        picks = self._pick(count - len(taken), taker, count)
        owned = {owner: iter(self._cached[owner].take(n)) for owner, n in Counter(picks).items()}
        evicted = [next(owned[owner]) for owner in picks]
        self._num_cached -= len(evicted)
        self._forget(evicted)
        taken += evicted
        self._note(taken, salt)
        return taken

    def _pick(self, count: int, taker: Owner, num_taken: int) -> list[Owner]:
        """Of whom the next `count` cached blocks are taken, one by one."""
        left = {owner: len(cached) for owner, cached in self._cached.items() if len(cached)}
        if len(left) == 1:
            return [*left] * count
        weights = {owner: self._shares.weight(owner) for owner in left}
        used = {owner: self._used[owner] + num_taken * (owner == taker) for owner in left}
        most = [(-used[owner] / weights[owner], at, owner) for at, owner in enumerate(left)]
        heapify(most)
        picks = []
        for _ in range(count):
            _, at, owner = heappop(most)
            picks.append(owner)
            left[owner] -= 1
            used[owner] -= 1
            if left[owner]:
                heappush(most, (-used[owner] / weights[owner], at, owner))
        return picks

    def count_kept(self, taker: Owner, to_come: Mapping[str, int]) -> int:
        total = sum(map(self._shares.weight, to_come))
        kept = 0
        for owner, blocks in to_come.items():
            cached = len(self._cached.get(owner, ())) if owner != taker else 0
            if cached:
                share = int(self._num_blocks * self._shares.weight(owner) / total)
                held = self._used[owner] - cached
                kept += max(0, min(cached, share - held - blocks))
        return kept

    def __len__(self) -> int:
        return len(self._empty) + self._num_cached

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The order for a taker that is no owner."""
        yield from self._empty
        cached = {owner: iter(blocks) for owner, blocks in self._cached.items()}
        for owner in self._pick(self._num_cached, None, 0):
            yield next(cached[owner])

    def check(self) -> None:
        """Raise AssertionError if a block counts for another owner than its identity says."""
        assert self._num_cached == sum(map(len, self._cached.values())), (
            "cached blocks are miscounted"
        )
        owners = Counter(map(self._owner, self._salts.values()))
        assert +self._used == owners, "an owner's blocks are miscounted"
        for owner, cached in self._cached.items():
            cached.check()
            for block in cached:
                assert self._owner(self._salts[block]) == owner, f"{block} counts for another owner"
                found = self._owner(_salt_of(block))
                assert found == owner, f"{block} is in another owner's queue"
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
    """The policy of this name over these blocks, all free. Raises ConfigError.

    marks: of blocks that are worth keeping for a time; without any there are none at first.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](
        blocks, shares or Shares(), Marks(time.monotonic) if marks is None else marks
    )
