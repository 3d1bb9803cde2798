"""An eviction policy that wraps another policy and records the blocks taken from it."""

from collections.abc import Iterator
from typing import Any, cast

from headstart.cache import EvictionPolicy, KVCacheBlock, KVCacheManager


class WatchedPolicy:
    """A policy that records the blocks taken from it last."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.taken: list[int] = []

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        taken = self._policy.take(count, salt)
        self.taken = [block.block_id for block in taken]
        return taken

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def watch_policy(
    manager: KVCacheManager, kind: type[WatchedPolicy] = WatchedPolicy
) -> WatchedPolicy:
    """Wrap the manager's policy in a watched policy, until the manager replaces it."""
    watched = kind(manager.pool.free)
    manager.pool.free = cast(EvictionPolicy, watched)
    return watched
