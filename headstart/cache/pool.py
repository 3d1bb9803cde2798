"""The block pool: all blocks, and their transitions between three states.

A block is held by sequences (`ref_cnt` > 0), cached (free, with content that a lookup may find), or
empty (free, without content). The pool knows no tensor, request or model.
"""

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from headstart.cache.block import KVCacheBlock, PartialNode, PrefixNode
from headstart.cache.events import AllBlocksCleared, BlockEvicted, BlockStored, CacheEvent
from headstart.cache.eviction import POLICIES
from headstart.cache.free_queue import Clock, Marks
from headstart.cache.groups import LayerGroup
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockKey
from headstart.cache.index import PrefixIndex
from headstart.cache.shares import Shares
from headstart.cache.stats import EvictionAges
from headstart.mypyc_hints import mypyc_attr

AGE_SAMPLE = 64
"""Only every 64th block is measured for the ages at eviction, to save memory."""


class BlockState(Enum):
    """The state of a block: held by a sequence, free with content, or free and empty."""

    HELD = "held"
    CACHED = "cached"
    EMPTY = "empty"


class BlockPicture(NamedTuple):
    """The state and the content of a block, for drawing the pool.

    `content` is the same object until the block's content changes. None if the block has no
    identity.
    """

    state: BlockState
    content: Hashable


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPool:
    """All blocks, the prefix index, and the eviction policy, which orders the free blocks.

    `version` changes whenever a block loses its identity, so that a stale lookup is recognized.
    Without deduplication, several blocks may have the same identity. `copies` has all of them
    except the node's block, oldest first.
    """

    def __init__(self, num_blocks: int, eviction: str, index: PrefixIndex, clock: Clock) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.eviction = eviction
        self.shares = Shares()
        self.clock = clock
        self.marks = Marks(clock)
        self.free = POLICIES[eviction](self.blocks, self.shares, self.marks)
        self.index = index
        self.copies: dict[PrefixNode, dict[KVCacheBlock, None]] = {}
        self.version = 0
        self.num_evicted = 0
        self.ages = EvictionAges()
        self._sample = frozenset(self.blocks[::AGE_SAMPLE])
        self._freed = dict.fromkeys(self._sample, 0.0)  # the times at which blocks were freed
        self.hasher: BlockHasher | None = None
        self.group: LayerGroup | None = None
        self.events: list[CacheEvent] = []

    def picture(self) -> list[BlockPicture]:
        """Return the current state of every block, by block id."""
        free = {True: BlockState.EMPTY, False: BlockState.CACHED}
        return [
            BlockPicture(BlockState.HELD if b.ref_cnt else free[b.node is None], b.node)
            for b in self.blocks
        ]

    def take(self, count: int, salt: str | None) -> list[KVCacheBlock]:
        """Take `count` free blocks for a request of this salt, and evict their content.

        At least `count` blocks must be free.
        """
        blocks = self.free.take(count, salt)
        evicted = [block for block in blocks if block.node is not None]
        if evicted:
            self.num_evicted += len(evicted)
            sample = self._sample.intersection(evicted)
            if sample:
                now = self.clock()
                for block in sample:
                    self.ages.note(now - self._freed[block])
            self.forget(evicted)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to blocks that a sequence hit; remove them from the free queue."""
        self.free.claim([block for block in blocks if not block.ref_cnt])
        for block in blocks:
            block.ref_cnt += 1

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove a reference from blocks, which must be in reverse prefix order.

        A block that becomes free is emptied if another block has the same identity.
        """
        for block in blocks:
            block.ref_cnt -= 1
        freed = [block for block in blocks if not block.ref_cnt]
        sample = self._sample.intersection(freed)
        if sample:
            self._freed.update(dict.fromkeys(sample, self.clock()))
        if self.copies:
            freed = self._drop_copies(freed)
        self.free.release(freed)

    def _drop_copies(self, freed: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Empty the copies among freed blocks; return the blocks to release, in order.

        The end of a request that held a copy counts as a use of the original block. So if the
        original block is free, it is withdrawn from the queue, to be released with these blocks.
        """
        to_release = []
        for block in freed:
            node = block.node
            if node is not None and node in self.copies:
                self.forget([block])
                original = node.block
                if original is not None and not original.ref_cnt:
                    self.free.withdraw([original])
                    to_release.append(original)
            to_release.append(block)
        return to_release

    def drop(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove the content of free cached blocks."""
        self.free.withdraw(blocks)
        self.forget(blocks)
        self.free.release(blocks)

    def store(self, node: PrefixNode, block: KVCacheBlock) -> None:
        """Give the node's identity to a block that this step writes.

        The block becomes a copy if another block has this identity already.
        """
        self.index.unwritten.add(block)
        if node.block is not None:
            block.node = node
            self.copies.setdefault(node, {})[block] = None
            return
        self.index.attach(node, block)
        if self.hasher is not None:
            self.events.append(BlockStored(block.block_id, node, self.hasher))

    def store_child(self, parent: PrefixNode, key: BlockKey, block: KVCacheBlock) -> PrefixNode:
        """Store one block below a node without children; faster than `store_chain`."""
        self.index.unwritten.add(block)
        node = PrefixNode()
        node.parent = parent
        node.key = key
        node.block = block
        node.child = node.block_hash = None
        parent.child = block.node = node
        if self.hasher is not None:
            self.events.append(BlockStored(block.block_id, node, self.hasher))
        return node

    def store_chain(
        self, parent: PrefixNode, keys: Sequence[BlockKey], blocks: Sequence[KVCacheBlock]
    ) -> PrefixNode:
        """Store consecutive blocks below a node without children; return the last new node."""
        self.index.unwritten.update(blocks)
        node = parent
        for key, block in zip(keys, blocks, strict=True):
            child = PrefixNode()
            child.parent = node
            child.key = key
            child.block = block
            child.child = child.block_hash = None
            node.child = child
            block.node = node = child
        if self.hasher is not None:
            for block in blocks:
                assert block.node is not None
                self.events.append(BlockStored(block.block_id, block.node, self.hasher))
        return node

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove the identity of blocks. If a block has copies, the first copy takes its place."""
        if not blocks:
            return
        self.version += 1
        lost = blocks
        if self.copies:
            lost = [block for block in blocks if not self._forget_copy(block)]
        if self.hasher is not None:
            for block in lost:
                if block.node is not None and not isinstance(block.node, PartialNode):
                    self.events.append(BlockEvicted(block.block_id, block.node, self.hasher))
        if self.group is not None:
            self.group.forget(blocks)
        self.index.detach(lost)

    def _forget_copy(self, block: KVCacheBlock) -> bool:
        """Remove the identity of a copy or its original; return False for any other block."""
        node = block.node
        copies = self.copies.get(node) if node is not None else None
        if node is None or copies is None:
            return False
        copy = block
        if node.block is block:
            copy = next(iter(copies))
            self.index.replace(node, copy)
        del copies[copy]
        block.node = None
        if not copies:
            del self.copies[node]
        return True

    def clear(self) -> None:
        """Free and empty every block, and create the eviction policy again."""
        self.copies.clear()
        for block in self.blocks:
            block.ref_cnt = 0
            block.node = None
            block.prev_free_block = block.next_free_block = block
        self.marks = Marks(self.clock)
        self.free = POLICIES[self.eviction](self.blocks, self.shares, self.marks)
        self.index.clear()
        if self.group is not None:
            self.group.clear()
        self.version += 1
        if self.hasher is not None:
            self.events.append(AllBlocksCleared())
