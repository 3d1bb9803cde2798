"""Events of cached blocks, for routers and tiers that mirror the index.

Several blocks may hold the same prefix. `BlockStored` reports that the first of them is cached, and
`BlockEvicted` that the last of them was evicted. Hashes are computed when they are read.
"""

from dataclasses import dataclass, field

from headstart.cache.block import PrefixNode
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """An event of a full block and of the prefix that ends with it."""

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
    """The first block of a prefix is cached. The step under way writes it."""

    __slots__ = ()


class BlockEvicted(PrefixEvent):
    """The last block of a prefix was evicted."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


CacheEvent = BlockStored | BlockEvicted | AllBlocksCleared
