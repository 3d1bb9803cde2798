"""The KV cache manager: which prefix is in which blocks. No torch, no model; a separate library.

Glossary:
    block           `block_size` consecutive tokens and the KV memory that holds them
    block table     one sequence's block ids in prefix order
    slot            block_id * block_size + position % block_size
    prefix identity adapter, salt, and every token and item from position 0
    hit             the longest run of cached blocks from position 0, and the matching head of
                    the next block
    computed tokens tokens whose K/V need no computing
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
    ExtraKey,
    MultiModalItem,
    Namespace,
    PublicBlocks,
    extra_keys,
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
    "ExtraKey",
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
    "extra_keys",
    "read_tokens",
]
