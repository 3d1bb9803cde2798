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

    `length` is for reading, where a call of `len` would take longer than the rest.
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
        after = ends.next_free_block
        block.prev_free_block, block.next_free_block = ends, after
        ends.next_free_block = after.prev_free_block = block
        self.length += 1

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append blocks; one loop without a call per block, since `free` is hot."""
        ends = self._ends
        last = ends.prev_free_block
        twice = None
        for block in blocks:
            if block.next_free_block is not block:
                twice = block
                break
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = ends
        ends.prev_free_block = last
        if twice is not None:
            self.length = sum(1 for _ in self)
            raise CacheError(f"block {twice.block_id} is on the free queue already")
        self.length += len(blocks)

    def popleft(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the head. Raises CacheError when there are fewer."""
        if count > self.length:
            raise CacheError(f"{count} blocks asked of a free queue of {self.length}")
        ends = self._ends
        block = ends.next_free_block
        taken = []
        for _ in range(count):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = block
            block = following
        ends.next_free_block = block
        block.prev_free_block = ends
        self.length -= count
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle. Raises CacheError when it is not on the queue."""
        self.remove_all((block,))

    def remove_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks out of the middle. Raises CacheError when one is not on the queue."""
        count = 0
        for block in blocks:
            before, after = block.prev_free_block, block.next_free_block
            if after is block:
                self.length -= count
                raise CacheError(f"block {block.block_id} is not on the free queue")
            before.next_free_block = after
            after.prev_free_block = before
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
        """Retain held blocks for so many seconds from now; an earlier mark may be longer.

        Times end with a whole minute, so that few are different.
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
        others = []
        for block in blocks:
            minute = self._marks.minute(block)
            if minute is None:
                others.append(block)
            elif block.node is None or self._marks.is_over(minute):
                self._marks.drop((block,))
                others.append(block)
            else:
                if minute not in self._by_minute:
                    self._by_minute[minute] = FreeBlockQueue()
                    insort(self._minutes, minute)
                self._by_minute[minute].append(block)
                self.count += 1
        return others

    def remove(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Remove the retained ones of free blocks; return the others. Marks stay."""
        others = []
        for block in blocks:
            minute = self._marks.minute(block)
            if minute is None:
                others.append(block)
            else:
                self._by_minute[minute].remove(block)
                self.count -= 1
        return others

    def popleft(self, count: int) -> list[KVCacheBlock]:
        """Remove and return the first `count` blocks, and remove their marks."""
        taken: list[KVCacheBlock] = []
        while len(taken) < count:
            taken += self._pop_minute(count - len(taken))
        return taken

    def _pop_minute(self, most: int) -> list[KVCacheBlock]:
        minute = self._minutes[0]
        queue = self._by_minute[minute]
        taken = queue.popleft(min(most, len(queue)))
        self.count -= len(taken)
        self._marks.drop(taken)
        if not queue:
            del self._by_minute[minute], self._minutes[0]
        return taken

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
                assert self._marks.minute(block) == minute, f"{block} stands in another minute"
                assert block.node is not None, f"{block} is retained and holds nothing"


class EvictionPolicy(Protocol):
    """The five verbs, and the free blocks in the order of their reuse."""

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks that became free; of one request, its last block comes first."""

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks that a request hit: they are held again and keep their content."""

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove free blocks that no request hit."""

    def retain(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """Retain held blocks, of one namespace, for so many seconds from now."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        """Remove and return the `count` blocks to reuse, for a request of this salt.

        Raises CacheError if short.
        """

    def count_kept(self, taker: str | None, to_come: Mapping[str, int]) -> int:
        """Return the blocks that owners other than the taker cached within their shares.

        0 if the policy has no owners.
        """

    def check(self) -> None:
        """Raise AssertionError if an invariant of the policy's own is broken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KVCacheBlock]: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru:
    """Least recently used first; of one request, the last block first. O(1) a block.

    The order of the reference: empty blocks are in line with the cached ones, and no block is
    retained.
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
    claimed raises the limit by `EARNED`, and one that is taken lowers it by one. One that is
    withdrawn does neither. Partial blocks within the limit are in line by recency. If there are
    more, the oldest are taken before any full block. O(1) a block.

    Retained blocks are taken after all others. When their time is over, or when they are more than
    `most_retained`, they are put in line like blocks that were released just now.
    """

    EARNED: ClassVar[int] = 4

    def __init__(
        self, blocks: Sequence[KVCacheBlock], marks: Marks, most: int | None = None
    ) -> None:
        """`most` is the number of blocks that there may ever be; None for those that there are."""
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
            self._limit = min(self._num_blocks, self._limit + self.EARNED * self._leave(blocks))

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().withdraw(self._retained.remove(blocks) if self._retained.count else blocks)
        self._leave(blocks)

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        rest = count - self._queue.length
        if rest <= 0 and not self._partial:
            return self._queue.popleft(count)
        if 0 < rest <= self._retained.count:
            return [*self._take(count - rest), *self._retained.popleft(rest)]
        return self._take(count)

    def _take(self, count: int) -> list[KVCacheBlock]:
        excess = len(self._partial) - self._limit
        if excess <= 0 or count > self._queue.length:
            taken = self._queue.popleft(count)
        else:
            taken = list(islice(takewhile(lambda b: b.node is None, self._queue), count))
            taken += islice(self._partial, min(excess, count - len(taken)))
            self._queue.remove_all(taken)
            taken += self._queue.popleft(count - len(taken))
        if self._partial and not self._partial.keys().isdisjoint(taken):
            self._limit = max(0, self._limit - self._leave(taken))
        return taken

    def check(self) -> None:
        self._retained.check()
        assert not any(block in self._marks for block in self._queue), "a block in line is marked"

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

    def _leave(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Remove the partial blocks among these; return their number."""
        partial = [block for block in blocks if block in self._partial]
        for block in partial:
            del self._partial[block]
        return len(partial)
