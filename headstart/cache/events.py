"""Events of cached blocks, for routers and tiers that mirror the index.

Several blocks may hold the same prefix. `BlockStored` is reported when the first of these blocks is
cached, and `BlockEvicted` when the last of them is evicted. Hashes are computed when they are read.
"""

from dataclasses import dataclass, field

from headstart.cache.block import PrefixNode
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """An event about a full block and the prefix that ends with it."""

    block_id: int
    node: PrefixNode = field(repr=False)
    hasher: BlockHasher = field(repr=False, compare=False)

    @property
    def block_hash(self) -> BlockHash:
        """Portable hash of the prefix that ends with the block."""
        return self.hasher.of_node(self.node)

    @property
    def parent_hash(self) -> BlockHash:
        """Portable hash of the prefix before the block."""
        assert self.node.parent is not None
        return self.hasher.of_node(self.node.parent)


class BlockStored(PrefixEvent):
    """A prefix is now cached, in a block that the step under way writes."""

    __slots__ = ()


class BlockEvicted(PrefixEvent):
    """A prefix is no longer cached, because the last block that held it was evicted."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


CacheEvent = BlockStored | BlockEvicted | AllBlocksCleared
