"""The options of a KV cache manager."""

from dataclasses import dataclass

from headstart.cache.eviction import POLICIES
from headstart.errors import ConfigError
from headstart.validation import Number, OneOf, check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How many blocks there are, and what is done with them.

    num_blocks: blocks in the pool, at least 1.
    block_size: tokens in a block, at least 1.
    enable_prefix_caching: off, nothing is named, found or kept.
    deduplicate: a block that fills with what is cached already is given back, and the sequence
        goes on with the cached one; off, block tables are append-only, as in the reference.
    partial_hits: reuse the head of a block that matches in part, by copying its rows.
    eviction: which free block is reused next, see `headstart.cache.eviction`.
    ghost_entries: evicted identities kept to tell "evicted" from "never seen"; by default one
        for every ten blocks.
    events: collect `BlockStored`, `BlockEvicted` and `AllBlocksCleared`.

    Raises ConfigError.
    """

    num_blocks: int = option(allowed=Number(int, 1))
    block_size: int = option(16, allowed=Number(int, 1))
    enable_prefix_caching: bool = True
    deduplicate: bool = True
    partial_hits: bool = True
    eviction: str = option("adaptive-lru", allowed=OneOf(tuple(POLICIES)))
    ghost_entries: int | None = option(None, allowed=Number(int, 0))
    events: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
