"""Cache events from an engine to a router: numbered batches of block hashes, and snapshots.

A receiver compares the epoch and number of a batch with those of the previous batch:

    same epoch, next number      apply it
    same epoch, later number     batches were lost: request a snapshot
    another epoch                the engine was restarted: forget its blocks first
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.cache import AllBlocksCleared, BlockHash, BlockStored, CacheEvent

POOL, DISK = "pool", "disk"
TIERS = (POOL, DISK)
"""The tiers in which a replica may hold a block, fastest first."""

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The net change of one replica's cache since the previous batch, or the whole cache.

    epoch: differs for each start of the engine. number: counts the batches of an epoch from 0.
    stored, removed: concatenated block hashes of 32 bytes; no hash is in both. cleared: forget the
    replica's blocks in this tier first. snapshot: `stored` has all cached blocks as of batch
    `number`; `cleared` is then True.
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
    """Builder of event batches and snapshots for one tier of a replica."""

    def __init__(self, replica: int, epoch: int = 0, tier: str = POOL) -> None:
        self.replica = replica
        self.epoch = epoch
        self.tier = tier
        self._held: set[BlockHash] = set()
        self._number = -1

    def publish(self, events: Sequence[CacheEvent]) -> EventBatch | None:
        """Return the batch of the events; None if they change nothing."""
        stored: dict[BlockHash, None] = {}
        removed: dict[BlockHash, None] = {}
        cleared = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                stored.clear()
                removed.clear()
                self._held, cleared = set(), True
            elif isinstance(event, BlockStored):
                removed.pop(event.block_hash, None)
                stored[event.block_hash] = None
            else:
                stored.pop(event.block_hash, None)
                removed[event.block_hash] = None
        return self.publish_hashes(stored, removed, cleared=cleared)

    def publish_hashes(
        self, stored: Iterable[BlockHash], removed: Iterable[BlockHash], *, cleared: bool = False
    ) -> EventBatch | None:
        """Return the batch of stored and removed hashes, which must be disjoint."""
        new = dict.fromkeys(block for block in stored if block not in self._held)
        evicted = dict.fromkeys(block for block in removed if block in self._held)
        if not new and not evicted and not cleared:
            return None
        self._held.update(new)
        self._held.difference_update(evicted)
        self._number += 1
        hashes = b"".join(new), b"".join(evicted)
        return EventBatch(
            self.replica, self.epoch, self._number, *hashes, cleared=cleared, tier=self.tier
        )

    def snapshot(self) -> EventBatch:
        """Return all cached blocks as of the last batch."""
        held = b"".join(self._held)
        return EventBatch(self.replica, self.epoch, self._number, held, b"", True, True, self.tier)
