"""Eviction policies: which free block is reused next, behind five verbs.

A policy keeps the free blocks. `release` is told of blocks that nobody holds any more, `claim`
of free blocks that a request hit, and `withdraw` of free blocks that leave the queue without a
hit. `retain` is told of held blocks that are worth keeping for a time. `take` chooses what is
reused: by then the block's content is lost. A policy never looks into the index and never
changes a block's identity.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import ClassVar, Protocol

from headstart.cache.block import KVCacheBlock, PrefixNode
from headstart.cache.eviction.retention import Marks, RetainedBlocks
from headstart.cache.free_queue import FreeBlockQueue
from headstart.mypyc_hints import mypyc_attr


class EvictionPolicy(Protocol):
    """The five verbs, and the free blocks in the order of their reuse."""

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks became free; of one request, its last block comes first."""

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request hit these free blocks: they are held again and keep their content."""

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These free blocks leave the queue, and no request hit them."""

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """These held blocks, of one namespace, are worth keeping for so long from now."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        """Remove and return the `count` blocks to reuse, for a request of this salt.

        Raises CacheError if short.
        """

    def count_kept(self, taker: str | None, to_come: Mapping[str, int]) -> int:
        """Blocks that others than the taker cached within their shares: see the manager's.

        0 if the policy knows no owners.
        """

    def check(self) -> None:
        """Raise AssertionError if an invariant of the policy's own is broken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KVCacheBlock]: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru:
    """Least recently used first; of one request, the last block first. O(1) a block.

    The order of the reference: an empty block waits its turn among the cached ones, and no block
    is retained.
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

    def count_kept(self, taker: str | None, to_come: Mapping[str, int]) -> int:
        return 0

    def check(self) -> None:
        pass

    def __len__(self) -> int:
        return self._queue.length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._queue)


@mypyc_attr(allow_interpreted_subclasses=True)
class EmptyFirstLru(Lru):
    """As `Lru`, but a block without reusable content is always taken before a cached one.

    The queue is empty blocks, then cached ones by recency; O(1) a block. A request's empty
    blocks go to the head in prefix order, so that the next request's blocks lie side by side
    in memory whenever they can.
    """

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        cached = [block for block in blocks if block.node is not None]
        self._queue.extend(cached)
        if len(cached) == len(blocks):
            return
        for block in blocks:
            if block.node is None:
                self._queue.appendleft(block)


@mypyc_attr(allow_interpreted_subclasses=True)
class AdaptiveLru(EmptyFirstLru):
    """As `EmptyFirstLru`, but partial blocks have only as many places as their hits have earned.

    A partial block holds fewer rows than a full one. After a one-shot request nobody asks for it;
    after a turn of a chat the next turn does. So the policy learns: a partial block that is
    claimed earns room for `EARNED` of them, and one that is taken gives back the room of one. One
    that is withdrawn does neither. Partial blocks within the room wait their turn by recency. If
    there are more, the oldest are taken before any full block. O(1) a block.

    Retained blocks are taken after all others. When their time is over, or when they are more than
    `most_retained`, they stand in line like blocks that were released just now.
    """

    EARNED: ClassVar[int] = 4

    def __init__(
        self, blocks: Sequence[KVCacheBlock], marks: Marks, most: int | None = None
    ) -> None:
        """`most` is how many blocks there may ever be; None for those that there are."""
        super().__init__(blocks)
        self._num_blocks = len(blocks) if most is None else most
        # Oldest first. A dict walks over all that were deleted before it finds its first.
        self._partial: OrderedDict[KVCacheBlock, None] = OrderedDict()
        self._room = 0
        self._marks = marks
        self._retained = RetainedBlocks(marks)
        self.most_retained = self._num_blocks // 2

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self._marks:
            blocks = self._retained.add(blocks)
            self._queue.extend(self._retained.fall_due(self.most_retained))
        super().release(blocks)
        for block in blocks:
            if block.node.__class__ is PrefixNode:  # a request's partial block comes first
                break
            if block.node is not None:
                self._partial[block] = None

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        self._marks.add(blocks, seconds)

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().claim(self._retained.remove(blocks) if self._retained.count else blocks)
        if self._partial and not self._partial.keys().isdisjoint(blocks):
            self._room = min(self._num_blocks, self._room + self.EARNED * self._leave(blocks))

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().withdraw(self._retained.remove(blocks) if self._retained.count else blocks)
        self._leave(blocks)

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        late = count - self._queue.length
        if late <= 0 and not self._partial:
            return self._queue.popleft(count)
        if 0 < late <= self._retained.count:
            return [*self._take(count - late), *self._retained.popleft(late)]
        return self._take(count)

    def _take(self, count: int) -> list[KVCacheBlock]:
        excess = len(self._partial) - self._room
        if excess <= 0 or count > self._queue.length:
            taken = self._queue.popleft(count)
        else:
            empty = islice(takewhile(lambda block: block.node is None, self._queue), count)
            taken = list(empty)
            taken += islice(self._partial, min(excess, count - len(taken)))
            self._queue.remove_all(taken)
            taken += self._queue.popleft(count - len(taken))
        if self._partial and not self._partial.keys().isdisjoint(taken):
            self._room = max(0, self._room - self._leave(taken))
        return taken

    def check(self) -> None:
        self._retained.check()
        assert not any(block in self._marks for block in self._queue), "a block in line is marked"

    def __len__(self) -> int:
        return self._queue.length + self._retained.count

    def __iter__(self) -> Iterator[KVCacheBlock]:
        excess = dict.fromkeys(islice(self._partial, max(0, len(self._partial) - self._room)))
        blocks = iter(self._queue)
        for block in blocks:
            if block.node is not None:
                blocks = chain([block], blocks)
                break
            yield block
        yield from excess
        yield from (block for block in blocks if block not in excess)
        yield from self._retained

    def _leave(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Forget the partial blocks among these; how many there were."""
        partial = [block for block in blocks if block in self._partial]
        for block in partial:
            del self._partial[block]
        return len(partial)
