"""The queue of free blocks: a doubly linked list that runs through the blocks themselves."""

from collections.abc import Iterable, Iterator, Sequence

from headstart.cache.block import KVCacheBlock
from headstart.errors import CacheError


class FreeBlockQueue:
    """Free blocks in the order they will be reused; append, popleft and remove are O(1).

    The list runs through the blocks themselves, so a hit in the middle needs no search and no
    wrapper object as a deque would. A block that is not on the list links to itself, so a
    double free is loud:

    >>> a, b, c = blocks = [KVCacheBlock(i) for i in range(3)]
    >>> queue = FreeBlockQueue(blocks)
    >>> queue.remove(b)
    >>> [block.block_id for block in queue]
    [0, 2]

    `length` is for reading, where a call of `len` would take longer than all else.
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
        self._insert(block, self._ends)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Put a block at the head: it will be reused first."""
        self._insert(block, self._ends.next_free_block)

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append blocks one by one; one loop without a call a block, since free is hot."""
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
        """Take blocks out of the middle, wherever they are."""
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

    def _insert(self, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next_free_block is not block:
            raise CacheError(f"block {block.block_id} is on the free queue already")
        before = after.prev_free_block
        block.prev_free_block, block.next_free_block = before, after
        before.next_free_block = after.prev_free_block = block
        self.length += 1
