"""Retention: free blocks that are reused after all others, for a time and in bounded number.

    unmarked ──mark──▶ marked, held ──release──▶ retained ──claim──▶ marked, held
                             │                      │
                             └──its minute is over──┴─or too many──▶ unmarked, released anew

A mark stays on a block, held or free, until its minute is over, the block is reused, or it stands
among too many. It is a preference between free blocks: what is short of blocks gets them all.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from headstart.cache.block import KVCacheBlock
from headstart.cache.free_queue import FreeBlockQueue

__all__ = ["Clock", "Marks", "RetainedBlocks"]

Clock = Callable[[], float]
"""Seconds that never go back."""

MINUTE = 60.0


class Marks:
    """The minute up to which each marked block is worth keeping."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minutes: dict[KVCacheBlock, int] = {}

    def __bool__(self) -> bool:
        return bool(self._minutes)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self._minutes

    def add(self, blocks: Sequence[KVCacheBlock], seconds: float) -> None:
        """These held blocks are worth keeping for so long from now; an earlier mark may be longer.

        Times end with a whole minute, so that few different ones are kept.
        """
        minute = ceil((self._clock() + seconds) / MINUTE)
        minutes = self._minutes
        for block in blocks:
            minutes[block] = max(minute, minutes.get(block, minute))

    def minute(self, block: KVCacheBlock) -> int | None:
        """The last minute of a block's mark."""
        return self._minutes.get(block)

    def is_over(self, minute: int) -> bool:
        """Whether this minute has ended."""
        return minute * MINUTE <= self._clock()

    def drop(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These blocks have no mark any more."""
        for block in blocks:
            self._minutes.pop(block, None)


class RetainedBlocks:
    """Free marked blocks: those whose minute is over first come first, then by their release.

    O(1) a block, and O(minutes) for a minute that is new. Nothing is done for a block that has
    no mark but to look for one, while there are any. `count` is how many there are.
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
        """Take in those of these free blocks whose mark holds; returns the others."""
        others = []
        for block in blocks:
            minute = self._marks.minute(block)
            if minute is None:
                others.append(block)
            elif block.node is None or self._marks.is_over(minute):
                self._marks.drop((block,))
                others.append(block)
            else:
                self._queue(minute).append(block)
                self.count += 1
        return others

    def _queue(self, minute: int) -> FreeBlockQueue:
        if minute not in self._by_minute:
            self._by_minute[minute] = FreeBlockQueue()
            insort(self._minutes, minute)
        return self._by_minute[minute]

    def remove(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Let go of those of these free blocks that are here; returns the others. Marks stay."""
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
        """Remove the first `count` blocks, of which there are as many, and their marks."""
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
        """Remove blocks whose time is over, and the first of more than `most`; and their marks."""
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
