"""Eviction policies: which free block is reused next, behind five verbs.

A policy holds the free blocks. `release` is called with blocks that no request holds any more,
`claim` with free blocks that a request hit, and `withdraw` with free blocks that leave the queue
without a hit. `retain` marks held blocks to retain for a time. `take` chooses the blocks to reuse,
which lose their content. A policy never reads the index and never changes a block's identity.

Retained blocks are free blocks that are reused after all others, for a time and in bounded number:

    unmarked ──mark──▶ marked, held ──release──▶ retained ──claim──▶ marked, held
                             │                      │
                             └──its minute is over──┴─or too many──▶ unmarked, released again

A mark stays on a block, held or free, until its minute is over, the block is reused, or too many
are retained. It is a preference between free blocks: a pool short of blocks gives them all.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from math import ceil
from typing import ClassVar, Protocol

from headstart.cache.block import KVCacheBlock, PrefixNode
from headstart.errors import CacheError
from headstart.mypyc_hints import mypyc_attr


class FreeBlockQueue:
    """Free blocks in the order they will be reused; append, popleft and remove are O(1).

    The list links the blocks themselves, so a hit in the middle needs no search and no wrapper
    object as a deque would. A block that is not on the list links to itself, so a double free is
    an error:

    >>> a, b, c = blocks = [KVCacheBlock(i) for i in range(3)]
    >>> queue = FreeBlockQueue(blocks)
    >>> queue.remove(b)
    >>> [block.block_id for block in queue]
    [0, 2]

    Hot paths read `length`, which is faster than `len`.
    """

    __slots__ = ("_ends", "length")

    def __init__(self, blocks: Sequence[KVCacheBlock] = ()) -> None:
        self._ends = KVCacheBlock(-1)
        self.length = 0
        self.extend(blocks)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._ends.next_free_block
        while block is not self._ends:
            yield block
            block = block.next_free_block

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail: it will be reused last."""
        self.extend((block,))

    def appendleft(self, block: KVCacheBlock) -> None:
        """Put a block at the head: it will be reused first."""
        if block.next_free_block is not block:
            raise CacheError(f"block {block.block_id} is on the free queue already")
        ends = self._ends
        first = ends.next_free_block
        block.prev_free_block, block.next_free_block = ends, first
        ends.next_free_block = first.prev_free_block = block
        self.length += 1

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append blocks in one loop without a call per block, since `free` is hot."""
        ends = self._ends
        last = ends.prev_free_block
        duplicate = None
        for block in blocks:
            if block.next_free_block is not block:
                duplicate = block
                break
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = ends
        ends.prev_free_block = last
        if duplicate is not None:
            self.length = sum(1 for _ in self)
            raise CacheError(f"block {duplicate.block_id} is on the free queue already")
        self.length += len(blocks)

    def popleft(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the head. Raises CacheError when there are fewer."""
        if count > self.length:
            raise CacheError(f"{count} free blocks are needed; the free queue has {self.length}")
        ends = self._ends
        block = ends.next_free_block
        blocks = []
        for _ in range(count):
            blocks.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = block
            block = following
        ends.next_free_block = block
        block.prev_free_block = ends
        self.length -= count
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle. Raises CacheError when it is not on the queue."""
        self.remove_all((block,))

    def remove_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks out of the middle. Raises CacheError when one is not on the queue."""
        count = 0
        for block in blocks:
            previous, following = block.prev_free_block, block.next_free_block
            if following is block:
                self.length -= count
                raise CacheError(f"block {block.block_id} is not on the free queue")
            previous.next_free_block = following
            following.prev_free_block = previous
            block.prev_free_block = block.next_free_block = block
            count += 1
        self.length -= count


Clock = Callable[[], float]
"""Monotonic seconds."""

MINUTE = 60.0


class Marks:
    """The minute up to which each marked block is retained."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minutes: dict[KVCacheBlock, int] = {}

    def __bool__(self) -> bool:
        return bool(self._minutes)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self._minutes

    def add(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """Retain held blocks for this many seconds from now; a longer earlier mark stays.

        Times are rounded up to a whole minute, so that there are few different ones.
        """
        minute = ceil((self._clock() + seconds) / MINUTE)
        minutes = self._minutes
        for block in blocks:
            minutes[block] = max(minute, minutes.get(block, minute))

    def minute(self, block: KVCacheBlock) -> int | None:
        """Return the last minute of a block's mark, if any."""
        return self._minutes.get(block)

    def is_over(self, minute: int) -> bool:
        """Return True if this minute has ended."""
        return minute * MINUTE <= self._clock()

    def drop(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove the marks of blocks."""
        for block in blocks:
            self._minutes.pop(block, None)


class RetainedBlocks:
    """Free marked blocks, by the end of their minute, then by their release.

    O(1) a block, and O(minutes) for a new minute. `count` is the number of blocks.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._by_minute: dict[int, FreeBlockQueue] = {}
        self._minutes: list[int] = []  # of `_by_minute`, in order
        self.count = 0

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for minute in self._minutes:
            yield from self._by_minute[minute]

    def add(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Add the free blocks whose mark holds; return the others."""
        unmarked = []
        for block in blocks:
            minute = self._marks.minute(block)
            if minute is None:
                unmarked.append(block)
            elif block.node is None or self._marks.is_over(minute):
                self._marks.drop((block,))
                unmarked.append(block)
            else:
                if minute not in self._by_minute:
                    self._by_minute[minute] = FreeBlockQueue()
                    insort(self._minutes, minute)
                self._by_minute[minute].append(block)
                self.count += 1
        return unmarked

    def remove(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Remove the retained ones of free blocks; return the others. Marks stay."""
        unmarked = []
        for block in blocks:
            minute = self._marks.minute(block)
            if minute is None:
                unmarked.append(block)
            else:
                self._by_minute[minute].remove(block)
                self.count -= 1
        return unmarked

    def popleft(self, count: int) -> list[KVCacheBlock]:
        """Remove and return the first `count` blocks, and remove their marks."""
        blocks: list[KVCacheBlock] = []
        while len(blocks) < count:
            blocks += self._pop_minute(count - len(blocks))
        return blocks

    def _pop_minute(self, most: int) -> list[KVCacheBlock]:
        minute = self._minutes[0]
        queue = self._by_minute[minute]
        blocks = queue.popleft(min(most, len(queue)))
        self.count -= len(blocks)
        self._marks.drop(blocks)
        if not queue:
            del self._by_minute[minute], self._minutes[0]
        return blocks

    def fall_due(self, most: int) -> list[KVCacheBlock]:
        """Remove blocks whose time is over, the first ones beyond `most`, and their marks."""
        due: list[KVCacheBlock] = []
        while self._minutes and self._marks.is_over(self._minutes[0]):
            due += self._pop_minute(self.count)
        if self.count > most:
            due += self.popleft(self.count - most)
        return due

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._minutes == sorted(self._by_minute), "minutes are not in order"
        assert self.count == sum(map(len, self._by_minute.values())), "retained are miscounted"
        for minute, queue in self._by_minute.items():
            for block in queue:
                assert self._marks.minute(block) == minute, f"{block} is in another minute"
                assert block.node is not None, f"{block} is retained and has no content"


class EvictionPolicy(Protocol):
    """The five verbs, and the free blocks in the order of their reuse."""

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks that became free, the last block of a request first."""

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks that a request hit: they are held again and keep their content."""

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks that no request hit."""

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """Retain held blocks of one namespace for this many seconds from now."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        """Remove and return the `count` blocks to reuse, for a request of this salt.

        Raises CacheError if short.
        """

    def count_kept(self, taker: str | None, to_come: Mapping[str, int]) -> int:
        """Return the number of blocks that other owners cached within their shares.

        0 if the policy has no owners.
        """

    def check(self) -> None:
        """Raise AssertionError if an invariant of the policy is broken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KVCacheBlock]: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru:
    """Least recently used first; of one request, the last block first. O(1) a block.

    This is vLLM's order: empty blocks are in line with the cached ones, and no block is retained.
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
    """Lru in which a block without reusable content is always taken before a cached one.

    The queue is empty blocks, then cached ones by recency; O(1) a block. A request's empty
    blocks are put at the head in prefix order, so that the next request's blocks are contiguous
    in memory if possible.
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
    """`EmptyFirstLru` with a limit on partial blocks, which they earn by hits.

    A partial block holds fewer rows than a full one. After a one-shot request it is never hit;
    after a turn of a chat the next turn hits it. So the policy learns: a partial block that is
    claimed raises the limit by `EARNED`, a partial block that is taken lowers it by 1, and a
    withdrawn one does not change it. Partial blocks within the limit are in line by recency. If
    there are more, the oldest are taken before any full block. O(1) a block.

    Retained blocks are taken after all others. When their time is over, or when they are more than
    `most_retained`, they join the queue like blocks that were just released.
    """

    EARNED: ClassVar[int] = 4

    def __init__(
        self, blocks: Sequence[KVCacheBlock], marks: Marks, most: int | None = None
    ) -> None:
        """Put `blocks` on the queue; `most` is the largest number to come, by default theirs."""
        super().__init__(blocks)
        self._num_blocks = len(blocks) if most is None else most
        # Oldest first. A dict iterates over all deleted entries before it finds its first.
        self._partial: OrderedDict[KVCacheBlock, None] = OrderedDict()
        self._limit = 0
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
            self._limit = min(
                self._num_blocks, self._limit + self.EARNED * self._remove_partial(blocks)
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
        """Remove the partial blocks among these; return their number."""
        partial = [block for block in blocks if block in self._partial]
        for block in partial:
            del self._partial[block]
        return len(partial)
