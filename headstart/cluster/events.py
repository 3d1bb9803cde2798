"""What an engine tells a router of its cache: numbered batches of names, and snapshots.

    epoch     number   what is meant
    the same  next     the batch follows the last one: apply it
    the same  later    batches were lost: ask for a snapshot
    another   any      the engine was started anew: nothing of the old one is left

A batch has names alone, 32 bytes each, so that it can be sent as it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headstart.cache import AllBlocksCleared, BlockHash, BlockStored, CacheEvent

POOL, DISK = "pool", "disk"
TIERS = (POOL, DISK)
"""Where a replica may hold a block, fastest first."""

NAME_BYTES = 32


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The net change of one replica's cache since the batch before; or all of it.

    epoch: differs for each start of the engine. number: 0 for the first batch of an epoch, then
    one more each. cleared: forget everything that was held before, in this tier. snapshot: the
    state after batch `number`, not a change; it begins with `cleared`. stored, removed: names
    of prefixes, 32 bytes each, one behind the other; no name is in both.
    """

    replica: int
    epoch: int
    number: int
    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False
    snapshot: bool = False
    tier: str = POOL


class EventPublisher:
    """Turns one manager's events into batches, and keeps what a snapshot needs.

    Costs a set entry for each cached block: the names themselves are the cache's own.
    """

    def __init__(self, replica: int, epoch: int = 0, tier: str = POOL) -> None:
        self.replica = replica
        self.epoch = epoch
        self.tier = tier
        self._held: set[BlockHash] = set()
        self._number = -1

    def publish(self, events: Sequence[CacheEvent]) -> EventBatch | None:
        """The batch of these events, None if they change nothing."""
        before = self._held
        stored: dict[BlockHash, None] = {}
        removed: dict[BlockHash, None] = {}
        cleared = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                stored.clear()
                removed.clear()
                before, cleared = set(), True
                continue
            name = event.block_hash
            if isinstance(event, BlockStored):
                removed.pop(name, None)
                if name not in before:
                    stored[name] = None
            else:
                stored.pop(name, None)
                if name in before:
                    removed[name] = None
        self._held = before
        return self._change(stored, removed, cleared=cleared)

    def publish_names(
        self, stored: Iterable[BlockHash], removed: Iterable[BlockHash]
    ) -> EventBatch | None:
        """The same of a tier that has names alone; none is in both."""
        new = dict.fromkeys(name for name in stored if name not in self._held)
        gone = dict.fromkeys(name for name in removed if name in self._held)
        return self._change(new, gone)

    def _change(
        self,
        stored: Mapping[BlockHash, None],
        removed: Mapping[BlockHash, None],
        *,
        cleared: bool = False,
    ) -> EventBatch | None:
        if not stored and not removed and not cleared:
            return None
        self._held.update(stored)
        self._held.difference_update(removed)
        self._number += 1
        return self._batch(_join(stored), _join(removed), cleared=cleared)

    def snapshot(self) -> EventBatch:
        """Everything that is cached, as of the last batch."""
        return self._batch(_join(self._held), b"", cleared=True, snapshot=True)

    def _batch(
        self, stored: bytes, removed: bytes, *, cleared: bool, snapshot: bool = False
    ) -> EventBatch:
        return EventBatch(
            replica=self.replica,
            epoch=self.epoch,
            number=self._number,
            stored=stored,
            removed=removed,
            cleared=cleared,
            snapshot=snapshot,
            tier=self.tier,
        )


def _join(names: Iterable[BlockHash]) -> bytes:
    return b"".join(names)
