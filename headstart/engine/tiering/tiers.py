"""The tiers of an engine: offers to stores, loads from stores, and counts."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter

from headstart.cache import BlockHash, ComputedBlocks, KVCacheManager
from headstart.engine.image_cache import ImageLoads
from headstart.engine.request import Request
from headstart.engine.step import Batch
from headstart.engine.tiering.loads import BlockPayload, BlockText, ComputeRate, Loads, Offers
from headstart.engine.tiering.replies import Replies
from headstart.engine.tiering.states import StateOffers, StateStores, search_states
from headstart.errors import TierError
from headstart.machine import return_freed_memory
from headstart.tiers.store import SILENT, SLOW, BlockStore, Faults, LoadedBlock
from headstart.tiers.transfers import STATES_AT_ONCE, Loader, ObjectStore, Saver
from headstart.tiers.worker import GuardedStore, StoreChain, Worker

_MAX_QUEUED_BYTES = 256 << 20  # limit of each queue: blocks to save, blocks to take in
_MIN_QUEUED_BYTES = 16 << 20
_QUEUE_SHARE = 4  # a queue's limit is the pool's bytes divided by this, within the bounds above
_PATIENCE = 0.05  # seconds that a step waits for a load when nothing else can run
_LAST_SAVES = 10.0  # seconds that `close` may take, and that `clear` waits for a save
_TRY_AGAIN = 16  # one of 16 loads that seem too slow is made, to measure the rate
_ASSUMED_RATE = 16.0  # tokens computed per second, until this is measured
_OVERHEAD = 0.002  # seconds of a load, besides the time for its bytes


@dataclass(slots=True)
class TierStats:
    """Counts since the start.

    loaded_tokens: tokens written to the pool, by tier, even if their request was aborted.
    declined_tokens: stored tokens that were computed, because loading would have been slower.
    late_answers: number of times that a store did not answer in time, or was slower than computing.
    unsaved_blocks: blocks of K/V and objects that were not saved in a tier, since it failed or was
    paused. faults: by tier and kind; faults that concern no single tier have the tier "all".
    """

    loaded_tokens: Counter[str] = field(default_factory=Counter)
    declined_tokens: int = 0
    saved_blocks: int = 0
    saved_states: int = 0
    dropped_blocks: int = 0
    late_answers: int = 0
    unsaved_blocks: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tiers:
    """The tiers of one engine. Only its thread calls methods that are not marked thread-safe.

    kv, objects: the stores of K/V and of objects such as image embeddings, one for each tier,
    nearest first. text: returns the text stored with K/V; None to store no text. states: the stores
    of recurrent states; None for a model without recurrent layers. queue_bytes: limit of each queue
    of blocks, objects or states. saver: saves blocks of K/V.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        kv: Sequence[BlockStore],
        objects: Sequence[BlockStore],
        text: BlockText | None,
        vocab_size: int,
        states: StateStores | None = None,
    ) -> None:
        self._faults = Faults("stored prefixes")
        self._tiers = [GuardedStore(store) for store in kv]
        self._object_tiers = [GuardedStore(store) for store in objects]
        self._state_tiers = [GuardedStore(store) for store in states.stores] if states else []
        self._stores = [*self._tiers, *self._object_tiers, *self._state_tiers]
        self._chain = StoreChain(self._tiers)
        self._manager = manager
        self._payload = payload
        self._states = states
        self._stats = TierStats()
        self._rate = ComputeRate()
        self.queue_bytes = self.bound_queue(manager.config.num_blocks * payload.nbytes)
        chains = [self._chain, StoreChain(self._object_tiers)]
        chains += [StoreChain(self._state_tiers)] if states is not None else []
        self._savers = [
            Saver(chain, self.queue_bytes, self._faults, return_freed_memory) for chain in chains
        ]
        self.saver, self._object_saver, *_ = self._savers
        self._loader = Loader(
            *(self._chain, self.queue_bytes, self._compute_seconds, self._faults),
            states=chains[2] if states is not None else None,
        )
        self._calls = Worker("headstart-calls", self._faults, "a call failed")
        object_store = ObjectStore(self._object_tiers, self._object_saver)
        lookups = Worker("headstart-objects", self._faults, "an object could not be loaded")
        self.image_loads = ImageLoads(object_store, lookups)
        self.replies = Replies(
            object_store, lookups, manager.hasher.model, manager.block_size, vocab_size
        )
        self._offers = Offers(manager, payload, self.saver, self._rate, text)
        self._state_offers: StateOffers | None = None
        if states is not None:
            self._state_offers = StateOffers(manager, states, self._savers[2], self._token_seconds)
        self.loads = Loads(manager, payload, self._loader, self._choose, self._note_load, states)
        self._step_start = 0.0
        self._requested_at = 0.0  # arrival of the step's oldest request, in seconds since 1970
        self._times_declined = 0
        self._deadline: float | None = None  # of `close`, on the clock of `time.monotonic`

    @staticmethod
    def bound_queue(pool_bytes: int) -> int:
        """Return the limit of a queue, in bytes, for a pool of this size."""
        return min(max(pool_bytes // _QUEUE_SHARE, _MIN_QUEUED_BYTES), _MAX_QUEUED_BYTES)

    @property
    def stats(self) -> TierStats:
        """The current counts."""
        stats = self._stats
        stats.saved_blocks = self.saver.num_saved
        stats.saved_states = self._state_offers.saver.num_saved if self._state_offers else 0
        stats.dropped_blocks = self._offers.num_dropped
        stats.unsaved_blocks, stats.faults = Counter(), Counter()
        for store in self._stores:
            stats.unsaved_blocks[store.tier] += store.faults.num_unsaved
        for tier, faults in [*((s.tier, s.faults) for s in self._stores), ("all", self._faults)]:
            for kind, count in faults.counts.copy().items():  # other threads add to them
                stats.faults[tier, kind] += count
        late = {SILENT, SLOW}
        stats.late_answers = sum(n for (_, kind), n in stats.faults.items() if kind in late)
        return stats

    @property
    def is_loading(self) -> bool:
        """True if a request waits for blocks or images from the store."""
        return self.loads.are_under_way or self.image_loads.are_under_way

    def _choose(self, num_stored: int, nbytes: int) -> int:
        """Return the number of stored blocks to load: all, or 0 if computing is faster."""
        tokens = num_stored * self._manager.block_size
        if is_worth_loading(tokens, nbytes, self._compute_rate, self._loader.rate):
            return num_stored
        self._times_declined += 1
        if self._times_declined % _TRY_AGAIN == 0:
            return num_stored
        self._stats.declined_tokens += tokens
        return 0

    @property
    def _compute_rate(self) -> float | None:
        """Computed tokens per second, measured here or by the engines that saved blocks."""
        if self._rate.value is None and (seconds := self._chain.block_seconds):
            return self._manager.block_size / seconds
        return self._rate.value

    def _token_seconds(self, tokens: int) -> float:
        return tokens / self._rate.value if self._rate.value else 0.0

    def _compute_seconds(self, blocks: int) -> float:
        return blocks * self._manager.block_size / (self._compute_rate or _ASSUMED_RATE)

    def count_stored(
        self, names: Sequence[BlockHash], computed: ComputedBlocks | None = None
    ) -> dict[str, int]:
        """Return the number of a prompt's tokens that each tier would load. Thread-safe.

        Each tier is searched from the first block that the nearer tiers lack. computed: the lookup
        in the pool, needed only for a model with recurrent layers.
        """
        counts: dict[str, int] = {}
        for store in self._tiers:
            num_stored = self._calls.call(partial(store.find, names), 0)
            counts[store.tier] = num_stored * self._manager.block_size
            names = names[num_stored:]
        if self._states is None or computed is None:
            return counts
        return self._count_to_state(computed, sum(counts.values()) // self._manager.block_size)

    def _count_to_state(self, computed: ComputedBlocks, num_stored: int) -> dict[str, int]:
        """Return the number of tokens up to the deepest state within the stored blocks, by tier."""
        assert self._states is not None
        counts = {store.tier: 0 for store in self._state_tiers}
        size, has_tail = self._manager.block_size, self._states.payload.has_tail
        hashes = self._manager.block_hashes(computed.sequence)
        num_tokens = len(computed.sequence.token_ids) - 1
        search = search_states(computed, num_tokens, hashes, size, has_tail=has_tail)
        candidates = search.candidates(num_stored)
        while states := list(islice(candidates, STATES_AT_ONCE)):
            names = [state.name for state in states]
            firsts = [
                (self._calls.call(partial(store.first, names), len(names)), store.tier)
                for store in self._state_tiers
            ]
            index, tier = min(firsts, key=itemgetter(0))
            if index < len(states):
                counts[tier] = states[index].position - computed.num_tokens
                break
        return counts

    def poll(self) -> None:
        """Write loaded blocks to the pool, before a step is scheduled."""
        if not self.loads.are_under_way:
            return
        if written := self.loads.poll():
            self._manager.commit_step()
            self._offers.commit()
            for tier, tokens in written.items():
                self._stats.loaded_tokens[tier] += tokens
        self._end_loads()

    def _end_loads(self) -> None:
        """End the loads that are complete, or that no request waits for."""
        for load in self.loads.end_done():
            self.saver.touch(load.job.names[: load.next - load.first])
            if self._state_offers is not None and load.state_name is not None:
                self._state_offers.saver.touch([load.state_name])
            segments = load.segments(self._manager.block_size)
            for request in load.requests:
                if not request.num_preemptions:  # the first admission counts
                    request.group.loaded = segments

    def _note_load(self, request: Request, blocks: list[LoadedBlock]) -> None:
        """Note the blocks of a load; save them in the nearest tier unless it has them all."""
        is_saved = all(block.tier == self._tiers[0].tier for block in blocks)
        self._note(_wall_time(request.group.arrival_time), is_saved=is_saved)

    def _note(self, requested_at: float, *, is_saved: bool = False) -> None:
        """Offer the blocks that will be overwritten, and note new blocks; see `Offers.note`."""
        self._offer_states(requested_at)
        self._offers.note(requested_at, is_saved=is_saved)

    def _offer_states(self, requested_at: float | None = None) -> None:
        if self._state_offers is not None:
            with suppress(MemoryError, RuntimeError):  # no memory: they are offered again
                self._state_offers.offer(requested_at)

    def wait(self) -> bool:
        """Wait a moment for a load when nothing can run; return False if there is no load."""
        if self.loads.are_under_way:
            self._loader.wait(_PATIENCE)
        elif self.image_loads.are_under_way:
            self.image_loads.wait(_PATIENCE)
        else:
            return False
        return True

    def scheduled(self, batch: Batch) -> None:
        """Note that a step is scheduled. Call before it writes."""
        self._step_start = time.perf_counter()
        self._pause_savers(self._payload.on_cpu)
        oldest = min(part.request.group.arrival_time for part in batch.scheduled)
        self._requested_at = _wall_time(oldest)
        self._note(self._requested_at)

    def committed(self, batch: Batch, *, is_last: bool) -> None:
        """Note that a step is committed. is_last: no request is left."""
        self._rate.add(batch.num_tokens, time.perf_counter() - self._step_start)
        for part in batch.scheduled:
            if part.request.finish_reason is not None:
                num_tokens = len(part.request.sampling.output_token_ids)
                self.replies.save(part.request, self._token_seconds(num_tokens))
        with suppress(MemoryError, RuntimeError):  # no memory: the blocks are offered again later
            self._offers.note(self._requested_at)  # blocks that accepted drafts have filled
            self._offers.commit()
            self._offer_states()
        if is_last:
            self.idle()

    def idle(self) -> None:
        """Save all written blocks, since no request is left."""
        self._end_loads()
        with suppress(MemoryError, RuntimeError):  # no memory: the blocks are offered again later
            self._offers.flush()
            self._offer_states()
        self._pause_savers(False)

    def _pause_savers(self, on: bool) -> None:
        """Pause the savers while a step needs the cores, or let them continue."""
        for saver in self._savers:
            saver.rest(on)

    def roll_back(self) -> None:
        """Roll the current step back."""
        self._offers.roll_back()
        self._pause_savers(False)

    def reset(self) -> None:
        """Roll the current step back, and end all loads."""
        self.loads.end_all()
        self.roll_back()

    def clear(self) -> None:
        """Clear all stores. Raises TierError at the end if blocks may remain in a store."""
        self.loads.end_all()
        self._offers.roll_back()
        done = [self.image_loads.forget_all(_LAST_SAVES)]
        done += [saver.drop(_LAST_SAVES) for saver in self._savers]
        done += [self._calls.call(store.clear, False) for store in self._stores]
        if not all(done):
            raise TierError(
                "K/V in memory were cleared. Blocks may remain in a store that does not answer or "
                "is paused after a failure; see the log headstart.tiers"
            )

    def flush(self, timeout: float) -> bool:
        """Save all written blocks; return False if this takes longer than `timeout` seconds."""
        self._offers.flush()
        self._offer_states()
        return all(saver.flush(timeout) for saver in self._savers)

    def close(self) -> None:
        """Save the unsaved blocks, and close the stores. Repeated calls share one deadline."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _LAST_SAVES
        self.loads.end_all()
        self._offers.flush()
        self._offer_states()
        closes = [saver.close for saver in self._savers]
        closes += [self._loader.close, self.image_loads.close, self._calls.close]
        for close in closes + [store.close for store in self._stores]:
            close(max(0.0, self._deadline - time.monotonic()))


def is_worth_loading(tokens: int, nbytes: int, compute: float | None, load: float | None) -> bool:
    """Return True if loading `nbytes` bytes is faster than computing `tokens` tokens.

    compute: tokens per second. load: bytes per second. Also True while a rate is None, so that the
    rate is measured.
    """
    if compute is None or load is None:
        return True
    return _OVERHEAD + nbytes / load < tokens / compute


def _wall_time(arrival: float) -> float:
    """Convert a time of `time.perf_counter` to seconds since 1970."""
    return time.time() - (time.perf_counter() - arrival)
