"""Offers blocks of the pool to a store: once they are written, and at the latest before they go.

A step's blocks are offered a few at a time when they are written, and all when no request is left.
If the saver has no room then, a block is offered again just before the pool reuses it. Its bytes
are copied in the engine's thread, and saved in the saver's.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from headstart.attention import PagedKVMemory
from headstart.cache import (
    AllBlocksCleared,
    BlockEvicted,
    BlockStored,
    KVCacheManager,
    PrefixNode,
)
from headstart.engine.tiering.rates import ComputeRate
from headstart.tiers import Saver, StoredBlock

__all__ = ["Offers", "wall_time"]

_TOGETHER = 32  # blocks that are copied at once


class Offers:
    """What of the pool the store does not have yet.

    manager: one that collects events, which nobody else takes.
    """

    def __init__(
        self, manager: KVCacheManager, memory: PagedKVMemory, saver: Saver, rate: ComputeRate
    ) -> None:
        self._manager = manager
        self._memory = memory
        self._saver = saver
        self._rate = rate
        self._pending: dict[PrefixNode, float] = {}  # written and not offered; when it was asked
        self._filling: dict[PrefixNode, float] = {}  # in the step under way
        self.num_dropped = 0  # blocks that went before the saver had room for them

    def note(self, asked: float, *, loaded: bool = False) -> None:
        """Read the manager's events, before anything is written over what it evicted.

        asked: when the oldest request of the step came, in seconds since 1970. loaded: what is
        stored comes from the store, which has it.
        """
        leaving: dict[PrefixNode, tuple[int, float]] = {}
        for event in self._manager.take_events():
            if isinstance(event, BlockStored):
                if not loaded:
                    self._filling[event.node] = asked
            elif isinstance(event, BlockEvicted):
                self._filling.pop(event.node, None)
                used = self._pending.pop(event.node, None)
                if used is not None:
                    leaving[event.node] = (event.block_id, used)
            elif isinstance(event, AllBlocksCleared):
                self._filling.clear()
                self._follow()
        if leaving and not self._offer([(n, at, used) for n, (at, used) in leaving.items()]):
            self.num_dropped += len(leaving)

    def commit(self) -> None:
        """What the step under way filled is written."""
        self._pending.update(
            (node, used) for node, used in self._filling.items() if node.block is not None
        )
        self._filling.clear()
        if len(self._pending) >= _TOGETHER:
            self.flush()

    def roll_back(self) -> None:
        """Nothing that the step was to fill is there, and what it evicted may be overwritten."""
        self._filling.clear()
        if any(isinstance(event, AllBlocksCleared) for event in self._manager.take_events()):
            self._follow()
        self._pending = {n: used for n, used in self._pending.items() if n.block is not None}

    def _follow(self) -> None:
        """The index was made anew, or forgot all: find the same blocks under their new nodes."""
        self._pending = {
            node.block.node: used
            for node, used in self._pending.items()
            if node.block is not None and node.block.node is not None
        }

    def flush(self) -> None:
        """Offer all that is written, as far as the saver has room."""
        found = [
            (node, node.block.block_id, used)
            for node, used in self._pending.items()
            if node.block is not None
        ]
        for at in range(0, len(found), _TOGETHER):
            some = found[at : at + _TOGETHER]
            if not self._offer(some):
                return
            for node, _, _ in some:
                del self._pending[node]

    def _offer(self, blocks: Sequence[tuple[PrefixNode, int, float]]) -> bool:
        """Copy blocks and offer them; False if the saver has no room."""
        if not self._saver.has_room(len(blocks) * self._memory.block_bytes):
            return False
        rows = self._memory.read_blocks([block_id for _, block_id, _ in blocks])
        seconds = self._rate.seconds(self._memory.block_size)
        depths: dict[PrefixNode, int] = {}
        return self._saver.offer(
            [
                self._describe(node, _depth(node, depths), seconds, used, row)
                for (node, _, used), row in zip(blocks, rows, strict=True)
            ]
        )

    def _describe(
        self, node: PrefixNode, depth: int, seconds: float, used: float, row: Tensor
    ) -> StoredBlock:
        assert node.parent is not None
        names = self._manager.names
        name, parent = names.of_node(node), names.of_node(node.parent)
        return StoredBlock(name, parent, depth, seconds, used, row.numpy().data)


def _depth(node: PrefixNode, known: dict[PrefixNode, int]) -> int:
    """How many blocks come before a node's; those of the nodes before are known, or counted."""
    above, at = 0, node.parent
    while at is not None and at not in known and at.parent is not None:
        above, at = above + 1, at.parent
    known[node] = above + (known[at] + 1 if at in known else 0)
    return known[node]


def wall_time(arrival: float) -> float:
    """A time of `time.perf_counter` in seconds since 1970."""
    return time.time() - (time.perf_counter() - arrival)
