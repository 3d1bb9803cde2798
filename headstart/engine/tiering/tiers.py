"""The tiers of an engine: what it offers to a store, what it loads from it, and what came of it."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.cache import BlockHash, KVCacheManager
from headstart.engine.batch import Batch
from headstart.engine.request import Request
from headstart.engine.tiering.image_loads import ImageLoads
from headstart.engine.tiering.image_rows import KeptRows
from headstart.engine.tiering.loads import Loads
from headstart.engine.tiering.offers import Offers
from headstart.engine.tiering.payload import BlockPayload
from headstart.engine.tiering.rates import ComputeRate, is_worth_loading
from headstart.engine.tiering.words import Spell
from headstart.errors import TierError
from headstart.machine import return_freed_memory
from headstart.tiers import (
    BlockStore,
    DeadlineStore,
    Faults,
    LoadedBlock,
    Loader,
    ObjectStore,
    Pause,
    Saver,
    chain,
)
from headstart.tiers.faults import SILENT, SLOW

__all__ = ["Stores", "TierStats", "Tiers", "make_tiers"]

_QUEUED_BYTES = 256 << 20  # at most, that wait to be saved, and as many that wait to be taken in
_LEAST_QUEUED_BYTES = 16 << 20
_QUEUE_SHARE = 4  # a queue has this part of the pool's bytes, between those two
_PATIENCE = 0.05  # seconds that a step waits for a load when nothing else can run
_LAST_SAVES = 10.0  # seconds that closing takes at the most, and for what is being saved
_TRY_AGAIN = 16  # loads that were not worth it, after which one is tried
_LATE = {SILENT, SLOW}  # faults that count as late answers
_SLOWEST = 16.0  # tokens a second: a prompt is computed, before that was measured


class Stores(NamedTuple):
    """Where K/V of one model, and objects such as image embeddings, outlive the process.

    kv and objects: one store for each tier, nearest first. payload: what is kept of a block.
    on_cpu: blocks lie where steps are computed. spell: the text that is kept with K/V; None for
    none.
    """

    kv: Sequence[BlockStore]
    objects: Sequence[BlockStore]
    payload: BlockPayload
    on_cpu: bool
    spell: Spell | None


@dataclass(slots=True)
class TierStats:
    """Counts since the start. loaded_tokens: put into the pool, by the tier that had them, whether
    or not the request that they were for came to use them: it may have been aborted meanwhile.

    declined_tokens: they were in the store, and computing them was faster. late_answers: times that
    a store was silent for too long, or turned out slower than computing. unsaved_blocks: by the
    tier, blocks (of K/V and of objects) that it was not given, since it failed or was left alone.
    faults: by tier and kind; those of no single tier under "all".
    """

    loaded_tokens: Counter[str] = field(default_factory=Counter)
    declined_tokens: int = 0
    saved_blocks: int = 0
    dropped_blocks: int = 0
    late_answers: int = 0
    unsaved_blocks: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tiers:
    """The tiers of one engine, which calls these methods in the order of a step, in its thread.

    queue_bytes: bound of each queue: blocks to save, objects to save, blocks to take in.
    """

    def __init__(self, stores: Stores, manager: KVCacheManager) -> None:
        self._faults = Faults("kept prefixes")
        self._tiers = self._guard(stores.kv)
        self._object_tiers = self._guard(stores.objects)
        self._store = chain(self._tiers)
        self._manager = manager
        self._payload, self._on_cpu = stores.payload, stores.on_cpu
        self._stats = TierStats()
        self._rate = ComputeRate()
        self.queue_bytes = self.bound_queue(manager.config.num_blocks * stores.payload.nbytes)
        self._saver = self._make_saver(self._store)
        self._loader = self._make_loader(stores.kv)
        self._object_saver = self._make_saver(chain(self._object_tiers))
        self.image_rows = KeptRows(ObjectStore(self._object_tiers, self._object_saver))
        self.image_loads = ImageLoads(self.image_rows)
        self._offers = Offers(manager, stores.payload, self._saver, self._rate, stores.spell)
        self.loads = Loads(manager, stores.payload, self._loader, self._choose, self._take_slots)
        self._began = 0.0  # when the step under way had its blocks
        self._times_declined = 0
        self._until: float | None = None  # when closing it is over, by `time.monotonic`

    @staticmethod
    def _guard(stores: Sequence[BlockStore]) -> list[DeadlineStore]:
        """Have each tier left alone for itself."""
        return [DeadlineStore(store, Pause(store.faults)) for store in stores]

    @staticmethod
    def bound_queue(pool_bytes: int) -> int:
        """Return how many bytes a queue may hold beside a pool of this size."""
        return min(max(pool_bytes // _QUEUE_SHARE, _LEAST_QUEUED_BYTES), _QUEUED_BYTES)

    def _make_saver(self, store: BlockStore) -> Saver:
        return Saver(store, self.queue_bytes, self._faults, return_freed_memory)

    def _make_loader(self, stores: Sequence[BlockStore]) -> Loader:
        """The loader. It asks a single tier itself, which spares a change of threads a block."""
        if len(stores) == 1:
            pause = self._tiers[0].pause
            return Loader(stores[0], self.queue_bytes, self._compute_seconds, pause)
        pause = Pause(self._faults)
        return Loader(self._store, self.queue_bytes, self._compute_seconds, pause, is_guarded=True)

    @property
    def stats(self) -> TierStats:
        """The counts as they are now."""
        self._stats.saved_blocks = self._saver.num_saved
        self._stats.dropped_blocks = self._offers.num_dropped
        every = [(store.tier, store.faults) for store in (*self._tiers, *self._object_tiers)]
        unsaved, faults = Counter[str](), Counter[tuple[str, str]]()
        for tier, found in every:
            unsaved[tier] += found.num_unsaved
        for tier, found in (*every, ("all", self._faults)):
            for kind, count in found.counts.copy().items():  # of whichever thread's
                faults[tier, kind] += count
        self._stats.unsaved_blocks, self._stats.faults = unsaved, faults
        self._stats.late_answers = sum(n for (_, kind), n in faults.items() if kind in _LATE)
        return self._stats

    @property
    def is_loading(self) -> bool:
        """True if a request waits for blocks or images from the store."""
        return self.loads.are_under_way or self.image_loads.are_under_way

    def _choose(self, found: int) -> int:
        """Number of the blocks found to load: all, or none if computing them is faster."""
        tokens = found * self._manager.block_size
        nbytes = found * self._payload.nbytes
        if is_worth_loading(tokens, nbytes, self._compute_rate, self._loader.rate):
            return found
        self._times_declined += 1
        if self._times_declined % _TRY_AGAIN == 0:
            return found
        self._stats.declined_tokens += tokens
        return 0

    @property
    def _compute_rate(self) -> float | None:
        """Tokens a second that are computed: as measured here, or by those who saved blocks."""
        if self._rate.value is None and (seconds := self._store.block_seconds):
            return self._manager.block_size / seconds
        return self._rate.value

    def _compute_seconds(self, blocks: int) -> float:
        """Seconds that computing so many blocks takes."""
        return blocks * self._manager.block_size / (self._compute_rate or _SLOWEST)

    def count_stored(self, names: Sequence[BlockHash]) -> dict[str, int]:
        """Tokens of a prompt that each tier would give, from the first of these blocks on.

        A tier goes on where the one before it ends. For any thread.
        """
        counts: dict[str, int] = {}
        for store in self._tiers:
            found = store.find(names)
            counts[store.tier] = found * self._manager.block_size
            names = names[found:]
        return counts

    @property
    def is_saving(self) -> bool:
        """True while blocks wait to be saved, or are being saved."""
        return self._saver.is_saving

    def take_kept(self) -> list[BlockHash]:
        """Blocks that the stores were seen to have since the last call."""
        return self._saver.take_kept()

    def take_in(self) -> None:
        """Put what was loaded into the pool, before a step is scheduled."""
        if not self.loads.are_under_way:
            return
        self._loader.end_late()
        if written := self.loads.take_in():
            self._manager.commit_step()
            self._offers.commit()
            for tier, count in written.items():
                self._stats.loaded_tokens[tier] += count * self._manager.block_size
        self._end_loads()

    def _end_loads(self) -> None:
        """Let go of loads that have all, or that nobody wants any more."""
        for load in self.loads.end_those_done():
            names = load.job.names[: load.next - load.first]
            self._saver.touch(names)
            loaded = load.stretches(self._manager.block_size)
            for request in load.requests:
                if not request.num_preemptions:  # what counts is the first admission
                    request.group.loaded = loaded

    def _take_slots(self, request: Request, blocks: list[LoadedBlock]) -> None:
        """A load took blocks. What comes from a tier farther off is offered to the nearest."""
        is_saved = all(block.tier == self._store.tier for block in blocks)
        self._offers.note(_wall_time(request.group.arrival_time), is_saved=is_saved)

    def wait(self) -> bool:
        """Wait a moment for a load, if there is one; nothing else can run."""
        if not self.is_loading:
            return False
        if self.loads.are_under_way:
            self._loader.wait(_PATIENCE)
        else:
            self.image_loads.wait(_PATIENCE)
        return True

    def scheduled(self, batch: Batch) -> None:
        """The step has its blocks, and writes nothing yet."""
        arrivals = [part.request.group.arrival_time for part in batch.scheduled]
        self._began = time.perf_counter()
        self._rest(self._on_cpu)
        self._offers.note(_wall_time(min(arrivals)))

    def committed(self, batch: Batch, *, is_last: bool) -> None:
        """The step is written; is_last: no request is left."""
        self._rate.add(batch.num_tokens, time.perf_counter() - self._began)
        self._offers.commit()
        if is_last:
            self.idle()

    def idle(self) -> None:
        """No request is left: nothing is loaded, and all that is written is saved now."""
        self._end_loads()
        with suppress(MemoryError, RuntimeError):  # torch's: what has no room is offered again
            self._offers.flush()
        self._rest(False)

    def _rest(self, on: bool) -> None:
        """Have saving leave the cores to the steps, or no longer."""
        self._saver.rest(on)
        self._object_saver.rest(on)

    def roll_back(self) -> None:
        """The step did not come about."""
        self.loads.end_all()
        self._offers.roll_back()
        self._rest(False)

    def clear(self) -> None:
        """Forget what the stores have. Raises TierError if some may be left; all are asked."""
        self.loads.end_all()
        self._offers.roll_back()
        done = [self.image_loads.forget_all(_LAST_SAVES)]
        done += [saver.drop(_LAST_SAVES) for saver in (self._saver, self._object_saver)]
        done += [store.clear() for store in (*self._tiers, *self._object_tiers)]
        if not all(done):
            raise TierError(
                "K/V in memory are forgotten, and what is kept elsewhere may not be: it does not "
                "answer, or is left alone after a failure, which the log headstart.tiers tells"
            )

    def flush(self, timeout: float) -> bool:
        """Save all that is written; False if that takes longer than so many seconds."""
        self._offers.flush()
        return self._saver.flush(timeout) and self._object_saver.flush(timeout)

    def close(self) -> None:
        """Save what is not saved yet, and let go of the store. Idempotent.

        A call that comes again, or after an interruption, has what the first one left of its time.
        """
        if self._until is None:
            self._until = time.monotonic() + _LAST_SAVES
        self.loads.end_all()
        self._offers.flush()
        for part in (self._saver, self._object_saver, self._loader, self.image_loads):
            part.close(max(0.0, self._until - time.monotonic()))
        for tier in (*self._tiers, *self._object_tiers):
            tier.close(max(0.0, self._until - time.monotonic()))


def make_tiers(stores: Stores | None, manager: KVCacheManager) -> Tiers | None:
    """The tiers of an engine; None for one without stores."""
    return None if stores is None else Tiers(stores, manager)


def _wall_time(arrival: float) -> float:
    """A time of `time.perf_counter` in seconds since 1970."""
    return time.time() - (time.perf_counter() - arrival)
