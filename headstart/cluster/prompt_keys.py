"""What the index knows a prompt's blocks by, computed as far as somebody asks.

A digest takes most of a request's time in a router, and where a prompt's first blocks are held by
nobody, the names of those behind them can wait until the request is sent.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import cast, overload

from headstart.cache import BlockHasher, TokenSequence
from headstart.cluster.holders import PrefixKey
from headstart.cluster.index import unpack_keys


class PromptKeys(Sequence[PrefixKey]):
    """The keys of a prompt's full blocks."""

    def __init__(self, hasher: BlockHasher, prompt: TokenSequence) -> None:
        blocks = prompt.cut(hasher.block_size)
        self._count = len(blocks)
        self._rest: Iterator[bytes] = hasher.packed(prompt.root, blocks)
        self._known = array("Q")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> PrefixKey: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[PrefixKey]: ...

    def __getitem__(self, at: int | slice) -> PrefixKey | Sequence[PrefixKey]:
        if isinstance(at, slice):
            places = range(self._count)[at]
            if not places:
                return cast("Sequence[PrefixKey]", array("Q"))
            self._reach(max(places[0], places[-1]) + 1)
            stop = places.stop if places.stop >= 0 else None
            return cast("Sequence[PrefixKey]", self._known[places.start : stop : places.step])
        self._reach(range(self._count)[at] + 1)
        return cast("PrefixKey", self._known[at % self._count])

    def __iter__(self) -> Iterator[PrefixKey]:
        return iter(self[:])

    def _reach(self, count: int) -> None:
        while len(self._known) < count:
            self._known += cast("array[int]", unpack_keys(next(self._rest)))
        if len(self._known) == self._count:  # what a router keeps has the keys alone
            self._rest = iter(())
