"""Blocks that no tier has stored yet, found from the events of a pool.

filling   indexed by the step under way, which may fail
pending   written, but not passed to a tier yet
leaving   pending, and evicted: the step under way overwrites its rows
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from headstart.cache.block import PrefixNode
from headstart.cache.events import AllBlocksCleared, BlockEvicted, BlockStored, CacheEvent
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash, BlockKey, Namespace, cut_salt, read_tokens


class UnsavedBlock(NamedTuple):
    """A written block that no tier has.

    name: the hash of the prefix that ends with the block. parent: the hash of the prefix before
    it. depth: the number of blocks before it in its prompt. requested_at: see `UnsavedBlocks.note`.
    token_ids: its tokens; empty if `UnsavedBlocks` does not report them. node: its identity.
    """

    block_id: int
    name: BlockHash
    parent: BlockHash
    depth: int
    requested_at: float
    token_ids: list[int]
    node: PrefixNode

    def path(self) -> tuple[Namespace, list[BlockKey]]:
        """Return the namespace of its prefix, and the keys of all blocks of the prefix."""
        return self.node.path()


class UnsavedBlocks:
    """Blocks of a pool that no tier has stored yet. Must receive every event of the pool.

    with_tokens: report the tokens of blocks without a salt and of public blocks.
    """

    def __init__(self, hasher: BlockHasher, *, with_tokens: bool = False) -> None:
        self._hasher = hasher
        self._with_tokens = with_tokens
        self._filling: dict[PrefixNode, float] = {}
        # Oldest first. To find the first entry, a dict would scan all deleted entries.
        self._pending: OrderedDict[PrefixNode, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of pending blocks. Some of them may be evicted already."""
        return len(self._pending)

    def note(
        self, events: Iterable[CacheEvent], requested_at: float, *, is_saved: bool = False
    ) -> list[UnsavedBlock]:
        """Process events of the pool; return the pending blocks that were evicted.

        The rows of these blocks exist until the step under way overwrites them. requested_at: the
        time at which the newly stored blocks were requested. is_saved: True if a tier has the newly
        stored blocks already.
        """
        leaving: dict[PrefixNode, tuple[int, float]] = {}
        for event in events:
            if isinstance(event, BlockStored):
                if not is_saved:
                    self._filling[event.node] = requested_at
            elif isinstance(event, BlockEvicted):
                self._filling.pop(event.node, None)
                if event.node in self._pending:
                    leaving[event.node] = (event.block_id, self._pending.pop(event.node))
            else:
                self._filling.clear()
                self._pending.clear()
        return self._describe((node, block_id, time) for node, (block_id, time) in leaving.items())

    def commit(self) -> None:
        """Note that the step under way has written the blocks that it fills."""
        self._pending.update((n, time) for n, time in self._filling.items() if n.block)
        self._filling.clear()

    def roll_back(self, events: Iterable[CacheEvent]) -> None:
        """Drop the blocks that a failed step would have filled, and the blocks that it evicted.

        events: the events of this step.
        """
        self._filling.clear()
        if any(isinstance(event, AllBlocksCleared) for event in events):
            self._pending.clear()
        pending = self._pending.items()
        self._pending = OrderedDict((node, time) for node, time in pending if node.block)

    def pending(self, limit: int) -> list[UnsavedBlock]:
        """Return up to `limit` pending blocks, the oldest first. `remove` removes them."""
        evicted: list[PrefixNode] = []
        blocks: list[tuple[PrefixNode, int, float]] = []
        for node, time in self._pending.items():
            if len(blocks) == limit:
                break
            if node.block is None:
                evicted.append(node)
            else:
                blocks.append((node, node.block.block_id, time))
        for node in evicted:
            del self._pending[node]
        return self._describe(blocks)

    def remove(self, count: int) -> None:
        """Remove the first `count` pending blocks after they were passed to a tier."""
        for node in list(islice(self._pending, count)):
            del self._pending[node]

    def _describe(self, blocks: Iterable[tuple[PrefixNode, int, float]]) -> list[UnsavedBlock]:
        """Describe blocks by their node, block id, and the time at which they were requested.

        If the previous node is the parent of a node, the node's depth is computed from it. Walking
        to the root for each block of a prompt would take quadratic time.
        """
        described: list[UnsavedBlock] = []
        previous: PrefixNode | None = None
        depth, salt = 0, None
        for node, block_id, time in blocks:
            assert node.parent is not None
            if node.parent is previous:
                depth += 1
                key_salt = cut_salt(node.key)[0] if self._with_tokens else None
                salt = salt if key_salt is None else key_salt
            else:
                depth = len(node.path()[1]) - 1
                salt = node.salt() if self._with_tokens else None
            previous = node
            is_shared = self._with_tokens and not salt  # no salt, or the salt of public blocks
            described.append(
                UnsavedBlock(
                    block_id,
                    self._hasher.of_node(node),
                    self._hasher.of_node(node.parent),
                    depth,
                    time,
                    read_tokens(cut_salt(node.key)[1]) if is_shared else [],
                    node,
                )
            )
        return described
