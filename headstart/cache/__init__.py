"""The KV cache manager, which finds, allocates and evicts blocks of K/V by prefix.

The package is a separate library: it imports neither torch nor a model.

Glossary:
    block           `block_size` consecutive tokens, and the memory that holds their K/V
    block table     the block ids of a sequence, in prefix order
    row             the K/V of one token
    slot            the index of a row in the pool: block_id * block_size + position % block_size
    head            the first tokens of a block, or their rows
    prefix identity the adapter, the salt, and every token, image and audio item from position 0
    hit             the longest run of cached blocks from position 0, followed by the longest head
                    that the next block shares with a cached block
    computed tokens tokens whose K/V are in the blocks already
    tier            a store of blocks outside of the pool, such as a disk
"""

from headstart.cache.block import Checkpoint, KVCacheBlock, PrefixNode, RowCopy
from headstart.cache.config import CacheConfig
from headstart.cache.events import AllBlocksCleared, BlockEvicted, BlockStored, CacheEvent
from headstart.cache.eviction import EvictionPolicy
from headstart.cache.free_queue import FreeBlockQueue
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import (
    BlockHash,
    BlockKey,
    MultiModalItem,
    Namespace,
    PublicBlocks,
    read_tokens,
)
from headstart.cache.index import PathSegment, PrefixTree
from headstart.cache.lookup import Allocation, ComputedBlocks, PartialHit
from headstart.cache.manager import KVCacheManager
from headstart.cache.pool import BlockPicture, BlockPool, BlockState
from headstart.cache.sequence import Mark, TokenSequence
from headstart.cache.shares import Shares
from headstart.cache.states import StatePool
from headstart.cache.stats import (
    AGE_BOUNDS,
    EvictionAges,
    MissExplanation,
    MissReason,
    PrefixCacheStats,
)
from headstart.cache.unsaved import UnsavedBlock, UnsavedBlocks
from headstart.cache.windows import WindowPool

__all__ = [
    "AGE_BOUNDS",
    "AllBlocksCleared",
    "Allocation",
    "BlockEvicted",
    "BlockHash",
    "BlockKey",
    "BlockHasher",
    "BlockPicture",
    "BlockPool",
    "BlockState",
    "BlockStored",
    "CacheConfig",
    "CacheEvent",
    "Checkpoint",
    "ComputedBlocks",
    "EvictionAges",
    "EvictionPolicy",
    "FreeBlockQueue",
    "KVCacheBlock",
    "KVCacheManager",
    "Mark",
    "MissExplanation",
    "MissReason",
    "MultiModalItem",
    "Namespace",
    "PartialHit",
    "PrefixCacheStats",
    "PrefixNode",
    "PrefixTree",
    "PublicBlocks",
    "RowCopy",
    "Shares",
    "StatePool",
    "PathSegment",
    "TokenSequence",
    "UnsavedBlock",
    "UnsavedBlocks",
    "WindowPool",
    "read_tokens",
]
