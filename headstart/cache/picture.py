"""What a block of the pool looks like from outside: its state, and whether its content changed."""

from enum import Enum
from typing import NamedTuple

from headstart.cache.block import KVCacheBlock


class BlockState(Enum):
    """Held by a request; free but found by lookups; or free and without content."""

    HELD = "held"
    CACHED = "cached"
    EMPTY = "empty"


class BlockPicture(NamedTuple):
    """A block's state, and its content: the same object for as long as the block keeps it.

    `content` is None while the block has no identity.
    """

    state: BlockState
    content: object


def draw_block(block: KVCacheBlock) -> BlockPicture:
    """The block as it is now."""
    if block.ref_cnt:
        return BlockPicture(BlockState.HELD, block.node)
    state = BlockState.EMPTY if block.node is None else BlockState.CACHED
    return BlockPicture(state, block.node)
