"""Eviction policies, which hold the free blocks and choose the next ones to reuse.

A policy never reads the index and never changes the identity of a block.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile
from typing import ClassVar, Protocol

from headstart.cache.block import KVCacheBlock, PrefixNode
from headstart.cache.free_queue import FreeBlockQueue, Marks, RetainedBlocks
from headstart.cache.identity import PUBLIC, cut_salt
from headstart.cache.shares import Shares, owner_among
from headstart.errors import CacheError
from headstart.mypyc_hints import mypyc_attr

Owner = str | None


class EvictionPolicy(Protocol):
    """The free blocks. Iteration yields them in the order of their reuse."""

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks that no request holds any more, the last block of a request first."""

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks that a request hit and holds now."""

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks without counting a hit."""

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """Mark held blocks of one namespace. For this many seconds, they are evicted last."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        """Remove and return the next `count` blocks to reuse, for a request of this salt.

        Raises CacheError if fewer blocks are free.
        """

    def count_protected(self, taker: str | None, pending: Mapping[str, int]) -> int:
        """Return the number of free cached blocks that must not be evicted for `taker`.

        0 if the policy has no owners. See `KVCacheManager.count_protected`.
        """

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KVCacheBlock]: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru:
    """vLLM's policy: least recently used first, and the blocks of one request in reverse order.

    Empty and cached blocks share one queue, and no block is retained. O(1) per block.
    Source: "Automatic Prefix Caching" (vLLM v1 design), free and eviction.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue = FreeBlockQueue(blocks)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue.extend(blocks)

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue.remove_all(blocks)

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue.remove_all(blocks)

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        pass

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        return self._queue.popleft(count)

    def count_protected(self, taker: str | None, pending: Mapping[str, int]) -> int:
        return 0

    def check(self) -> None:
        pass

    def __len__(self) -> int:
        return self._queue.length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._queue)


@mypyc_attr(allow_interpreted_subclasses=True)
class EmptyFirstLru(Lru):
    """`Lru`, but takes all empty blocks before any cached block. O(1) per block.

    The queue has the empty blocks, then the cached blocks. Empty blocks of a request are put at the
    head in prefix order, so that the next request gets blocks that are adjacent in memory.
    """

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        cached = [block for block in blocks if block.node is not None]
        self._queue.extend(cached)
        if len(cached) < len(blocks):
            for block in blocks:
                if block.node is None:
                    self._queue.appendleft(block)


@mypyc_attr(allow_interpreted_subclasses=True)
class AdaptiveLru(EmptyFirstLru):
    """`EmptyFirstLru` with retained blocks, and with an adaptive limit on partial blocks.

    A partial block holds fewer rows than a full block. After a one-shot request it is never hit;
    after a turn of a chat, the next turn hits it. So the limit follows the hits: for each partial
    block, `claim` adds `LIMIT_PER_HIT` to the limit, and `take` subtracts 1. Up to the limit,
    partial blocks are taken by recency, like full blocks. Partial blocks beyond the limit are taken
    before any full block, oldest first. O(1) per block.

    Retained blocks are taken after all others. When the mark of a retained block ends, the block
    joins the queue, as if it had just been released. If more than `max_retained` blocks are
    retained, the blocks whose marks end first join the queue too.
    """

    LIMIT_PER_HIT: ClassVar[int] = 4

    def __init__(
        self, blocks: Sequence[KVCacheBlock], marks: Marks, max_length: int | None = None
    ) -> None:
        """Put `blocks` on the queue, which holds up to `max_length`; default: `len(blocks)`."""
        super().__init__(blocks)
        self._num_blocks = len(blocks) if max_length is None else max_length
        # Oldest first. To find the first entry, a dict would scan all deleted entries.
        self._partial: OrderedDict[KVCacheBlock, None] = OrderedDict()
        self._limit = 0
        self._marks = marks
        self._retained = RetainedBlocks(marks)
        self.max_retained = self._num_blocks // 2

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self._marks:
            blocks = self._retained.add(blocks)
            self._queue.extend(self._retained.expire(self.max_retained))
        super().release(blocks)
        for block in blocks:
            if block.node.__class__ is PrefixNode:  # only full blocks follow
                break
            if block.node is not None:
                self._partial[block] = None

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        self._marks.add(blocks, seconds)

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().claim(self._retained.remove(blocks) if self._retained.count else blocks)
        if self._partial and not self._partial.keys().isdisjoint(blocks):
            self._limit = min(
                self._num_blocks, self._limit + self.LIMIT_PER_HIT * self._remove_partial(blocks)
            )

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().withdraw(self._retained.remove(blocks) if self._retained.count else blocks)
        self._remove_partial(blocks)

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        missing = count - self._queue.length
        if missing <= 0 and not self._partial:
            return self._queue.popleft(count)
        if 0 < missing <= self._retained.count:
            return [*self._take(count - missing), *self._retained.popleft(missing)]
        return self._take(count)

    def _take(self, count: int) -> list[KVCacheBlock]:
        excess = len(self._partial) - self._limit
        if excess <= 0 or count > self._queue.length:
            blocks = self._queue.popleft(count)
        else:
            blocks = list(islice(takewhile(lambda b: b.node is None, self._queue), count))
            blocks += islice(self._partial, min(excess, count - len(blocks)))
            self._queue.remove_all(blocks)
            blocks += self._queue.popleft(count - len(blocks))
        if self._partial and not self._partial.keys().isdisjoint(blocks):
            self._limit = max(0, self._limit - self._remove_partial(blocks))
        return blocks

    def check(self) -> None:
        self._retained.check()
        assert not any(block in self._marks for block in self._queue), "a queued block is marked"

    def __len__(self) -> int:
        return self._queue.length + self._retained.count

    def __iter__(self) -> Iterator[KVCacheBlock]:
        excess = dict.fromkeys(islice(self._partial, max(0, len(self._partial) - self._limit)))
        blocks = iter(self._queue)
        for block in blocks:
            if block.node is not None:
                blocks = chain([block], blocks)
                break
            yield block
        yield from excess
        yield from (block for block in blocks if block not in excess)
        yield from self._retained

    def _remove_partial(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Remove blocks from `_partial`; return the number of partial blocks among them."""
        partial = [block for block in blocks if block in self._partial]
        for block in partial:
            del self._partial[block]
        return len(partial)


class FairLru:
    """A policy that is max-min fair between owners, with an `AdaptiveLru` for each owner.

    Empty blocks are taken first. Each further block is taken from the owner that has the most held
    and cached blocks relative to its weight. The block then counts for the owner of the request
    that takes it. So an owner below its share loses no block to an owner above its share, and an
    owner may use all blocks that no other owner uses. Taking a block costs O(log owners), and O(1)
    while only one owner has free cached blocks.

    An owner retains at most half of its share of the pool. Its retained blocks are taken after its
    other blocks. Retention does not change the owner from which a block is taken.

    Cached blocks that are released together belong to one prefix. Public blocks at its beginning
    have a separate owner. When an owner is added, the existing blocks of its salts move to its
    queue, in queue order. They move at the next call that adds or removes blocks.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], shares: Shares, marks: Marks) -> None:
        self._shares = shares
        self._owners = shares.names()  # the owners when `_follow_shares` last moved blocks
        self._marks = marks
        self._num_blocks = len(blocks)
        self._num_cached = 0
        self._empty = FreeBlockQueue(blocks)
        self._cached: dict[Owner, AdaptiveLru] = {}
        self._salts: dict[KVCacheBlock, str | None] = {}  # of held and cached blocks
        self._used: Counter[Owner] = Counter()  # numbers of held and cached blocks

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
        if self._marks:  # at most half of the owner's share
            share = self._shares.weight(owner) / sum(map(self._shares.weight, self._cached))
            self._cached[owner].max_retained = int(self._num_blocks * share / 2)
        return self._cached[owner]

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        self._marks.add(blocks, seconds)

    def _by_salt(self, cached: list[KVCacheBlock]) -> list[tuple[str | None, list[KVCacheBlock]]]:
        """Return the blocks of one prefix, last block first, grouped by salt."""
        if not cached:
            return []
        salt = _salt_of(cached[-1])  # the block nearest to the root
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
        """Return the cached blocks by owner; remove the empty blocks from their queue."""
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
        """Return the owner of each of the next `count` cached blocks to take."""
        remaining = {owner: len(cached) for owner, cached in self._cached.items() if len(cached)}
        if len(remaining) == 1:
            return [*remaining] * count
        weights = {owner: self._shares.weight(owner) for owner in remaining}
        used = {owner: self._used[owner] + num_taken * (owner == taker) for owner in remaining}
        heap = [(-used[owner] / weights[owner], i, owner) for i, owner in enumerate(remaining)]
        heapify(heap)
        picks = []
        for _ in range(count):
            _, i, owner = heappop(heap)
            picks.append(owner)
            remaining[owner] -= 1
            used[owner] -= 1
            if remaining[owner]:
                heappush(heap, (-used[owner] / weights[owner], i, owner))
        return picks

    def count_protected(self, taker: Owner, pending: Mapping[str, int]) -> int:
        total = sum(map(self._shares.weight, pending))
        count = 0
        for owner, blocks in pending.items():
            cached = len(self._cached.get(owner, ())) if owner != taker else 0
            if cached:
                share = int(self._num_blocks * self._shares.weight(owner) / total)
                num_held = self._used[owner] - cached
                count += max(0, min(cached, share - num_held - blocks))
        return count

    def __len__(self) -> int:
        return len(self._empty) + self._num_cached

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Yield the blocks in the order in which a request without an owner would take them."""
        yield from self._empty
        cached = {owner: iter(blocks) for owner, blocks in self._cached.items()}
        for owner in self._pick(self._num_cached, None, 0):
            yield next(cached[owner])

    def check(self) -> None:
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
        assert not any(block in self._salts for block in self._empty), "an empty block has a salt"


def _salt_of(block: KVCacheBlock) -> str | None:
    return block.node.salt() if block.node is not None else None


POLICIES: Mapping[str, Callable[[Sequence[KVCacheBlock], Shares, Marks], EvictionPolicy]] = {
    "lru": lambda blocks, shares, marks: Lru(blocks),
    "empty-first-lru": lambda blocks, shares, marks: EmptyFirstLru(blocks),
    "adaptive-lru": lambda blocks, shares, marks: AdaptiveLru(blocks, marks),
    "fair-lru": FairLru,
}
