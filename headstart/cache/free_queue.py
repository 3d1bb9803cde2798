"""The free queue, and the marks of blocks to retain.

A retained block is a free block with a mark. It is reused after all blocks without a mark:

    unmarked ──mark──▶ marked, held ──release──▶ retained ──claim──▶ marked, held
                             │                      │
                 the mark ended before     the mark ends, or too
                      the release         many blocks are retained
                             ▼                      ▼
                       unmarked, free         unmarked, free

A mark ends after some time, rounded up to a whole minute. It also ends when the block is reused, or
when too many blocks are retained. A mark only changes the order of free blocks: a request that
needs all free blocks gets the retained blocks too.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil

from headstart.cache.block import KVCacheBlock
from headstart.errors import CacheError


class FreeBlockQueue:
    """Free blocks in the order of their reuse; append, popleft and remove are O(1) per block.

    The queue is a doubly linked list of the blocks themselves, so removing a block from the middle
    needs no search. A block outside of the queue links to itself, so a double free is detected.

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
        """Put a block at the tail, to reuse it last."""
        self.extend((block,))

    def appendleft(self, block: KVCacheBlock) -> None:
        """Put a block at the head, to reuse it first."""
        if block.next_free_block is not block:
            raise CacheError(f"block {block.block_id} is already on the free queue")
        ends = self._ends
        first = ends.next_free_block
        block.prev_free_block, block.next_free_block = ends, first
        ends.next_free_block = first.prev_free_block = block
        self.length += 1

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append blocks; faster than `append` for each block."""
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
            raise CacheError(f"block {duplicate.block_id} is already on the free queue")
        self.length += len(blocks)

    def popleft(self, count: int) -> list[KVCacheBlock]:
        """Remove and return `count` blocks from the head. Raises CacheError if there are fewer."""
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
        """Remove a block. Raises CacheError if it is not on the queue."""
        self.remove_all((block,))

    def remove_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove blocks. Raises CacheError at the first block that is not on the queue."""
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
    """The minute at which the mark of each marked block ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minutes: dict[KVCacheBlock, int] = {}

    def __bool__(self) -> bool:
        return bool(self._minutes)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self._minutes

    def add(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """Mark held blocks for this many seconds from now, unless their mark ends later.

        The end is rounded up to a whole minute, so that `RetainedBlocks` has few queues.
        """
        minute = ceil((self._clock() + seconds) / MINUTE)
        minutes = self._minutes
        for block in blocks:
            minutes[block] = max(minute, minutes.get(block, minute))

    def minute(self, block: KVCacheBlock) -> int | None:
        """Return the minute at which a block's mark ends, if any."""
        return self._minutes.get(block)

    def is_over(self, minute: int) -> bool:
        """Return True if marks that end at this minute have ended."""
        return minute * MINUTE <= self._clock()

    def drop(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            self._minutes.pop(block, None)


class RetainedBlocks:
    """Free marked blocks, ordered by the end of their mark, and then by their release.

    There is a queue for each minute at which a mark ends. Adding or removing a block costs O(1).
    Creating or deleting a queue costs O(n) for n queues.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._by_minute: dict[int, FreeBlockQueue] = {}
        self._minutes: list[int] = []  # the keys of `_by_minute`, in order
        self.count = 0

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for minute in self._minutes:
            yield from self._by_minute[minute]

    def add(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Add the free blocks whose mark has not ended; return the other blocks."""
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
        """Remove the free blocks that are retained; return the other blocks. All marks stay."""
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
        """Remove the first `count` blocks and their marks; return the blocks."""
        blocks: list[KVCacheBlock] = []
        while len(blocks) < count:
            blocks += self._pop_minute(count - len(blocks))
        return blocks

    def _pop_minute(self, limit: int) -> list[KVCacheBlock]:
        minute = self._minutes[0]
        queue = self._by_minute[minute]
        blocks = queue.popleft(min(limit, len(queue)))
        self.count -= len(blocks)
        self._marks.drop(blocks)
        if not queue:
            del self._by_minute[minute], self._minutes[0]
        return blocks

    def expire(self, limit: int) -> list[KVCacheBlock]:
        """Remove and return blocks whose mark has ended. Their marks are removed too.

        If more than `limit` blocks are left, the first of them are removed as well.
        """
        due: list[KVCacheBlock] = []
        while self._minutes and self._marks.is_over(self._minutes[0]):
            due += self._pop_minute(self.count)
        if self.count > limit:
            due += self.popleft(self.count - limit)
        return due

    def check(self) -> None:
        assert self._minutes == sorted(self._by_minute), "minutes are not in order"
        assert self.count == sum(map(len, self._by_minute.values())), "blocks are miscounted"
        for minute, queue in self._by_minute.items():
            for block in queue:
                assert self._marks.minute(block) == minute, f"{block} is queued for another minute"
                assert block.node is not None, f"{block} is retained and has no content"
