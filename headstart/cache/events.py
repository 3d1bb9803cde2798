"""Events of cached blocks, for routers and tiers that mirror the index.

A prefix is stored once, when a first block holds it, and evicted once, when no block holds it any
more. Further copies of a block in the same pool raise no events. Hashes are computed when read.
"""

from dataclasses import dataclass, field

from headstart.cache.block import PrefixNode
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """A change of the full block that ends a prefix."""

    block_id: int
    node: PrefixNode = field(repr=False)
    hasher: BlockHasher = field(repr=False, compare=False)

    @property
    def block_hash(self) -> BlockHash:
        """Portable hash of the prefix that the block ends."""
        return self.hasher.of_node(self.node)

    @property
    def parent_hash(self) -> BlockHash:
        """Portable hash of the prefix before the block."""
        assert self.node.parent is not None
        return self.hasher.of_node(self.node.parent)


class BlockStored(PrefixEvent):
    """The first block of this prefix is in the cache; it is written by the end of the step."""

    __slots__ = ()


class BlockEvicted(PrefixEvent):
    """The last block of this prefix was evicted."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


CacheEvent = BlockStored | BlockEvicted | AllBlocksCleared
