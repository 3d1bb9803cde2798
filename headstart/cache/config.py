"""Options of a KV cache manager."""

from dataclasses import dataclass, fields
from typing import Any

from headstart.cache.eviction import POLICIES
from headstart.errors import ConfigError
from headstart.validation import Number, OneOf, check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options that an engine passes to its cache.

    block_size: tokens in a block, at least 1.
    enable_prefix_caching: if False, nothing is indexed, hit or cached.
    deduplicate: if a sequence fills a block with content that is already cached, it switches to the
        cached block and releases its own. If False, block tables are append-only, as in vLLM.
    partial_hits: reuse the head of a block that matches in part, by copying its rows.
    eviction: the policy that chooses the next block to reuse; see `headstart.cache.eviction`.
    """

    block_size: int = option(16, "tokens in a KV block", Number(int, 1))
    enable_prefix_caching: bool = option(True, "cache and reuse the K/V of common prefixes")
    deduplicate: bool = option(True, "free a full block whose content is cached already")
    partial_hits: bool = option(True, "reuse the head of a block that matches in part")
    eviction: str = option(
        "adaptive-lru", "policy that chooses the next block to reuse", OneOf(tuple(POLICIES))
    )

    def shared(self) -> dict[str, Any]:
        """Return these options by name."""
        return {field.name: getattr(self, field.name) for field in fields(CacheOptions)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(CacheOptions):
    """The sizes of a manager's pools, and its options.

    num_blocks: blocks in the pool, at least 1.
    ghost_entries: nodes of evicted blocks that stay in the index, so that a miss can be explained
        as an eviction. Default: a tenth of `num_blocks`. See `headstart.cache.index`.
    events: collect `BlockStored`, `BlockEvicted` and `AllBlocksCleared`.
    num_states: slots for the states of recurrent layers, for running sequences and checkpoints; 0
        for a model without recurrent layers. See `headstart.cache.states`.
    state_interval: tokens between two regular checkpoints of a long prompt.
    states_at_borders: store states only at block borders, for an engine that computes whole blocks.
    window: tokens that a token attends to in sliding-window layers, itself included; 0 for a model
        without these layers.
    num_window_blocks: blocks in the pool of the sliding-window layers; 0 if their K/V are in the
        same blocks as the K/V of the other layers. See `headstart.cache.windows`.

    Raises ConfigError.
    """

    num_blocks: int = option(allowed=Number(int, 1))
    ghost_entries: int | None = option(None, allowed=Number(int, 0))
    events: bool = False
    num_states: int = option(0, allowed=Number(int, 0))
    state_interval: int = option(1024, allowed=Number(int, 1))
    states_at_borders: bool = False
    window: int = option(0, allowed=Number(int, 0))
    num_window_blocks: int = option(0, allowed=Number(int, 0))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.num_window_blocks and (self.num_states or not self.window):
            raise ConfigError(
                f"num_window_blocks is {self.num_window_blocks}, with a window of {self.window} "
                f"and {self.num_states} states; allowed: a window of at least 1, and no states"
            )
