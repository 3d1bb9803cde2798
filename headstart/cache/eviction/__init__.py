"""Which free block is reused next: policies by name, and whose blocks go first."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from headstart.cache.block import KVCacheBlock
from headstart.cache.eviction.fair import FairLru
from headstart.cache.eviction.policies import AdaptiveLru, EmptyFirstLru, EvictionPolicy, Lru
from headstart.cache.eviction.retention import Clock, Marks
from headstart.cache.eviction.shares import Shares
from headstart.errors import ConfigError

__all__ = ["POLICIES", "AdaptiveLru", "Clock", "EvictionPolicy", "Marks", "Shares", "make_policy"]

POLICIES: Mapping[str, Callable[[Sequence[KVCacheBlock], Shares, Marks], EvictionPolicy]] = (
    MappingProxyType(
        {
            "lru": lambda blocks, shares, marks: Lru(blocks),
            "empty-first-lru": lambda blocks, shares, marks: EmptyFirstLru(blocks),
            "adaptive-lru": lambda blocks, shares, marks: AdaptiveLru(blocks, marks),
            "fair-lru": FairLru,
        }
    )
)


def make_policy(
    name: str,
    blocks: Sequence[KVCacheBlock],
    shares: Shares | None = None,
    marks: Marks | None = None,
) -> EvictionPolicy:
    """The policy of this name over these blocks, all free. Raises ConfigError.

    marks: of blocks that are worth keeping for a time; without any there are none at first.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](
        blocks, shares or Shares(), Marks(time.monotonic) if marks is None else marks
    )
