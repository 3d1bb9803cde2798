"""A cache manager whose events have a second reader."""

from headstart.cache import BlockNames, CacheConfig, CacheEvent, KVCacheManager

__all__ = ["ObservedManager"]


class ObservedManager(KVCacheManager):
    """Tells its events once more, to whoever calls `take_observed`.

    A router follows the cache this way without taking events from the tiers, which need them all.
    """

    def __init__(self, config: CacheConfig, names: BlockNames | None = None) -> None:
        super().__init__(config, names)
        self._observed: list[CacheEvent] = []

    def take_events(self) -> list[CacheEvent]:
        """As the manager's; they are kept for `take_observed`, too."""
        events = super().take_events()
        self._observed += events
        return events

    def take_observed(self) -> list[CacheEvent]:
        """Events that `take_events` handed out since the last call, oldest first."""
        observed, self._observed = self._observed, []
        return observed
