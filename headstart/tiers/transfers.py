"""Loads and saves between the pool and slow stores, in separate threads.

`ObjectStore` stores objects of any size, such as image embeddings, as blocks of `OBJECT_BLOCK`
bytes in a `BlockStore`. The first block begins with the object's length. An object with a missing
block counts as missing.
"""

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.tiers.store import BlockStore, Faults, LoadedBlock, ModelRecord, StoredBlock
from headstart.tiers.worker import GuardedStore, Job, StoreChain, Worker, wait_for

_TRIAL = 1.0  # seconds by which the first load may exceed the time to compute the blocks
_MIN_WAIT = 0.25  # seconds that each later load may take even if computing is faster
_WEIGHT = 0.3  # weight of the last measurement in the average rate
_MIN_RATE = 1.0  # bytes per second, for a store that returned nothing in time

_BATCH_BLOCKS = 64  # maximum blocks in a save
_BATCH_BYTES = 16 << 20
_REST = 15  # duration of a rest, as a multiple of the save before it
_DRAIN_BYTES = 32 << 20  # saved bytes after which `drained` is called
_MAX_STORED = 1 << 14  # maximum number of names for `take_saved`
STATES_AT_ONCE = 64  # names of states in a query


class StateName(NamedTuple):
    """The name of a stored state, its position in tokens, and the blocks that it needs."""

    name: BlockHash
    position: int
    num_blocks: int


@dataclass(eq=False)
class StateSearch:
    """The search for the recurrent state that a job loads before its blocks.

    Without a state the blocks are useless. candidates: takes the number of blocks that the stores
    have, and returns the states to look for, deepest first. span: positions of the tokens that are
    computed if no state is found. num_stored: number of blocks that the stores have. match: the
    deepest state that the stores have, if any. has_arrived: True if the state was loaded. block:
    the loaded state, until it is taken. rest: the states that were not looked up yet.
    """

    candidates: Callable[[int], Iterator[StateName]]
    span: range
    block_size: int
    num_stored: int = 0
    match: StateName | None = None
    has_arrived: bool = False
    block: LoadedBlock | None = None
    rest: Iterator[StateName] = field(default_factory=lambda: iter(()))

    def count_blocks(self, position: int) -> int:
        """Return the number of blocks whose computation a state at `position` saves."""
        return -(-(position - self.span.start) // self.block_size)


@dataclass(eq=False, kw_only=True)
class LoadJob(Job):
    """Blocks to look up and load.

    choose: takes the number of blocks that the stores have, and returns the number to load. count:
    number of blocks to load; 0 until the lookup has ended. num_loaded, nbytes: number and bytes of
    the blocks that have arrived. arrived: blocks that wait to be taken. state: None for a model
    without recurrent layers. With a state, `count` is 0 if the pool has all blocks that the state
    needs.
    """

    names: Sequence[BlockHash]
    choose: Callable[[int], int]
    count: int = 0
    num_loaded: int = 0
    nbytes: int = 0
    arrived: deque[LoadedBlock] = field(default_factory=deque)
    lookup_seconds: float = 0.0
    state: StateSearch | None = None

    @property
    def has_work(self) -> bool:
        """True if there is something to load."""
        return bool(self.count or (self.state is not None and self.state.match))

    @property
    def skipped_blocks(self) -> int:
        """Number of blocks whose computation the complete load saves."""
        state = self.state
        if state is None:
            return self.count
        return state.count_blocks(state.match.position) if state.match is not None else 0


class Loader:
    """A queue of load jobs in the order of their start. The preferred job runs first.

        start ──▶ look up blocks, choose how many to load ──▶ load ──▶ done
                                                                │
                                                blocks wait ◀───┘ until `take`

    Lookups have a separate worker, so that a new prompt does not wait for the load of another.
    Loads run one after the other. The engine takes the blocks of the preferred job as they arrive.
    Blocks of other jobs may fill only half of `max_bytes`, so they never delay the preferred job.
    A load ends early if it takes longer than computing its blocks would.

    max_bytes: limit of the bytes that wait to be taken; exceeded by at most one chunk. compute:
    returns the seconds to compute a number of blocks. rate: recent bytes per second; None before
    the first load. queued_bytes: bytes that wait to be taken. states: the stores of states; None
    for a model without recurrent layers.
    """

    def __init__(
        self,
        stores: StoreChain,
        max_bytes: int,
        compute: Callable[[int], float],
        faults: Faults,
        states: StoreChain | None = None,
    ) -> None:
        self.rate: float | None = None
        self.queued_bytes = 0
        self._stores = stores
        self._states = states
        self._max_bytes = max_bytes
        self._compute = compute
        self._preferred: LoadJob | None = None
        self._has_news = False
        self._changed = threading.Condition()
        self._lookups, self._loads = self._workers = [
            Worker(name, faults, "a load failed", self._changed, pick=pick, ended=self._note_end)
            for name, pick in (("headstart-lookup", None), ("headstart-load", self._pick))
        ]

    def start(
        self,
        names: Sequence[BlockHash],
        choose: Callable[[int], int],
        state: StateSearch | None = None,
    ) -> LoadJob:
        """Look up these blocks, and load the number of blocks that `choose` returns.

        With a state, `choose` takes the number of blocks whose computation the state saves.
        """
        job = LoadJob(self._look_up, names=names, choose=choose, state=state)
        self._lookups.submit(job)
        return job

    def take(self, job: LoadJob, limit: int) -> list[LoadedBlock]:
        """Return up to `limit` of the blocks that have arrived, in order."""
        with self._changed:
            taken = [job.arrived.popleft() for _ in range(min(limit, len(job.arrived)))]
            self._release(taken)
        return taken

    def prefer(self, job: LoadJob | None) -> None:
        """Load this job before all others; None prefers no job."""
        with self._changed:
            for worker in self._workers:
                worker.abandon_late_call()
            if job is not self._preferred:
                self._preferred = job
                self._changed.notify_all()

    def cancel(self, job: LoadJob) -> None:
        """End a job and drop its blocks."""
        with self._changed:
            job.done = True
            self.take_state(job)
            self.take(job, len(job.arrived))

    def take_state(self, job: LoadJob) -> LoadedBlock | None:
        """Return the state of a job if it has arrived and was not taken before; else None."""
        state = job.state
        with self._changed:
            if state is None or (block := state.block) is None:
                return None
            state.block = None
            self._release([block])
            return block

    def _release(self, blocks: Iterable[LoadedBlock]) -> None:
        self.queued_bytes -= sum(block.payload.nbytes for block in blocks)
        self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until a job gets blocks, ends or lacks space, or did so since the last call."""
        with self._changed:
            wait_for(self._workers, lambda: self._has_news or self._loads.is_closed, timeout)
            self._has_news = False

    def close(self, timeout: float) -> None:
        """End every job, and wait for the threads. Idempotent."""
        until = time.monotonic() + timeout
        for worker in self._workers:
            worker.close(max(0.0, until - time.monotonic()))

    # In the threads of the workers

    def _pick(self) -> LoadJob | None:
        """Return the next job to load; None if there is no job, or no space for its blocks."""
        jobs = self._loads.jobs
        if not jobs:
            return None
        job = self._preferred if self._preferred in jobs else jobs[0]
        assert isinstance(job, LoadJob)
        return job if job.done or self._may_load(job) else None

    def _may_load(self, job: LoadJob) -> bool:
        """Return True if `max_bytes` leaves space for more blocks of a job."""
        if job is self._preferred:
            return self.queued_bytes < self._max_bytes or not job.arrived
        return self.queued_bytes < self._max_bytes // 2

    def _note_end(self, job: LoadJob) -> None:
        """Wake the engine if a job has ended or must wait for space."""
        self._has_news |= job.done or not self._may_load(job)

    def _look_up(self, job: LoadJob) -> bool:
        """Look up a job's blocks and choose how many to load; queue the job if it has work."""
        state = job.state
        blocks = len(job.names) if state is None else state.count_blocks(state.span.stop)
        job.limit = self._limit(blocks)
        num_stored = self._stores.find(job.names, job)
        if state is not None:
            state.num_stored, state.rest = num_stored, state.candidates(num_stored)
        self._choose(job, num_stored)
        job.lookup_seconds = job.spent
        job.limit = self._limit(job.skipped_blocks)
        if not job.has_work:
            return False
        job.work = self._load
        with self._changed:
            self._lookups.jobs.remove(job)
            self._loads.submit(job)
        return True

    def _choose(self, job: LoadJob, num_stored: int) -> None:
        """Set the number of blocks to load and the state to load before them."""
        state = job.state
        if state is None:
            job.count = job.choose(num_stored)
            return
        state.match, job.count = None, 0
        assert self._states is not None
        while job.time_left() > 0 and (names := list(islice(state.rest, STATES_AT_ONCE))):
            index = self._states.first([name.name for name in names], job)
            if index == len(names):
                continue
            state.rest = chain(names[index + 1 :], state.rest)
            state.match = names[index]
            if job.choose(job.skipped_blocks) > 0:
                job.count = state.match.num_blocks
            else:
                state.match = None
            return

    def _limit(self, blocks: int) -> float:
        seconds = self._compute(blocks)
        return _TRIAL + seconds if self.rate is None else max(_MIN_WAIT, seconds)

    def _load(self, job: LoadJob) -> bool:
        """Load a job; return True if the preferred job interrupts it."""
        is_first = self.rate is None
        if job.state is not None and not self._load_state(job, job.state):
            return False
        for chunk in self._stores.load(job.names[job.num_loaded : job.count], job):
            if is_first:
                job.limit = _TRIAL + self._compute(job.num_loaded + len(chunk))
            if not self._queue_chunk(job, chunk):
                if not job.done:
                    return True
                break
        if job.nbytes:
            num_skipped = job.num_loaded if job.state is None else job.skipped_blocks
            self._note_rate(num_skipped, job.nbytes, job.spent - job.lookup_seconds)
        elif job.time_left() <= 0:
            self._note_rate(job.count, 0, job.spent)
        return False

    def _load_state(self, job: LoadJob, state: StateSearch) -> bool:
        """Load a job's state unless it has arrived; return True if the job has more to load.

        If a state cannot be loaded, try the next deepest state that the stores have.
        """
        assert self._states is not None
        while state.match is not None and not state.has_arrived:
            chunks = self._states.load([state.match.name], job)
            if (chunk := next(chunks, None)) is None:
                self._choose(job, state.num_stored)
                continue
            with self._changed:
                if not job.done:
                    state.block, state.has_arrived = chunk[0], True
                    job.nbytes += chunk[0].payload.nbytes
                    self.queued_bytes += chunk[0].payload.nbytes
                    self._has_news = True
                    self._changed.notify_all()
                break
        return job.has_work and not job.done

    def _queue_chunk(self, job: LoadJob, chunk: list[LoadedBlock]) -> bool:
        """Queue blocks to be taken, then wait for space; return True if the job continues."""

        def must_stop() -> bool:
            is_other_preferred = self._preferred is not job and self._preferred in self._loads.jobs
            return job.done or is_other_preferred

        with self._changed:
            if job.done:
                return False
            nbytes = sum(block.payload.nbytes for block in chunk)
            job.arrived.extend(chunk)
            job.num_loaded += len(chunk)
            job.nbytes += nbytes
            self.queued_bytes += nbytes
            self._has_news = True
            self._changed.notify_all()
            if job.num_loaded < job.count:
                self._changed.wait_for(lambda: must_stop() or self._may_load(job))
                return not must_stop()
            return True

    def _note_rate(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Update the average rate; if computing would have been faster, lower it at once."""
        rate = max(nbytes / max(seconds, 1e-9), _MIN_RATE)
        if self.rate is None or (rate < self.rate and seconds > self._compute(blocks)):
            self.rate = rate
        else:
            self.rate += _WEIGHT * (rate - self.rate)


@dataclass(eq=False, kw_only=True)
class _Batch(Job):
    """Blocks to save, and the names of stored blocks that were used (`touched`).

    nbytes: bytes of the unsaved blocks. stored: the blocks that the stores have after the save.
    """

    unsaved: list[StoredBlock]
    nbytes: int
    touched: list[BlockHash]
    stored: list[BlockHash] = field(default_factory=list)


class Saver:
    """A queue of blocks that a worker saves. Only `flush`, `drop` and `close` wait for a save.

    num_dropped: blocks that were offered while the queue was full; they may be offered again.
    queued_bytes: bytes of blocks that wait to be saved, or are being saved. faults: counts
    exceptions of stores. drained: called when the queue is empty after many bytes were saved, so
    that their memory can be returned to the system.
    """

    def __init__(
        self,
        stores: StoreChain,
        max_bytes: int,
        faults: Faults,
        drained: Callable[[], object] = lambda: None,
    ) -> None:
        self.num_saved = 0
        self.num_dropped = 0
        self.max_bytes = max_bytes
        self.queued_bytes = 0
        self._stores = stores
        self._drained = drained
        self._undrained = 0  # bytes saved since the last call of `drained`
        self._blocks: deque[StoredBlock] = deque()
        self._touched: dict[BlockHash, None] = {}
        self._batch: _Batch | None = None  # being saved
        self._stored: deque[BlockHash] = deque(maxlen=_MAX_STORED)
        self._rests = False
        self._num_waiting = 0  # callers that wait in `flush`
        self._worker = Worker(
            *("headstart-saver", faults, "blocks could not be saved"),
            pick=self._pick,
            ended=self._note_end,
        )
        self._changed = self._worker.changed

    def has_space(self, nbytes: int) -> bool:
        """Return True if blocks of `nbytes` bytes would be accepted."""
        fits = not self._blocks or self.queued_bytes + nbytes <= self.max_bytes
        return fits and not self._worker.is_closed

    def offer(self, blocks: Sequence[StoredBlock]) -> bool:
        """Queue blocks to be saved; drop them all and return False if there is no space."""
        nbytes = _count_bytes(blocks)
        with self._changed:
            if not self.has_space(nbytes):
                self.num_dropped += len(blocks)
                return False
            self._blocks.extend(blocks)
            self.queued_bytes += nbytes
            self._worker.wake()
        return True

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Record that stored blocks were used."""
        with self._changed:
            if not self._worker.is_closed:
                self._touched.update(dict.fromkeys(names))
                self._worker.wake()

    @property
    def is_saving(self) -> bool:
        """True while something waits to be saved, or is being saved."""
        return bool(self._blocks or self._touched or self._batch)

    def take_saved(self) -> list[BlockHash]:
        """Return the blocks saved or used since the last call, at most the last `_MAX_STORED`."""
        with self._changed:
            names = list(self._stored)
            self._stored.clear()
        return names

    def rest(self, on: bool) -> None:
        """Turn rests between saves on or off. A rest leaves the cores to a running step."""
        if on is not self._rests:
            with self._changed:
                self._rests = on
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything is saved; return False after `timeout` seconds."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            # A forked process has no saving thread.
            self._worker.wait_for(lambda: not (self.is_saving and self._worker.is_alive), timeout)
            self._num_waiting -= 1
            return not self.is_saving

    def drop(self, timeout: float) -> bool:
        """Forget the queue, and wait for the current save; return False after `timeout` seconds."""
        with self._changed:
            self._forget_queued()
            is_idle = self._worker.wait_for(lambda: self._batch is None, timeout)
            self._stored.clear()
            return is_idle

    def _forget_queued(self) -> None:
        self.queued_bytes -= _count_bytes(self._blocks)
        self._blocks.clear()
        self._touched.clear()

    def close(self, timeout: float) -> None:
        """Save the queue within `timeout` seconds; then accept no more blocks. Idempotent."""
        until = time.monotonic() + timeout
        self.flush(timeout)
        with self._changed:
            self.num_dropped += len(self._blocks)
            self._forget_queued()
            self._worker.close(0.0)
        self._worker.close(max(0.0, until - time.monotonic()))

    # In the worker's thread

    def _pick(self) -> Job | None:
        """Return the queued job (a rest, or a batch whose save was abandoned), or a new batch."""
        jobs = self._worker.jobs
        if not jobs and (self._blocks or self._touched):
            blocks: list[StoredBlock] = []
            nbytes = 0
            while self._blocks and len(blocks) < _BATCH_BLOCKS and nbytes < _BATCH_BYTES:
                blocks.append(self._blocks.popleft())
                nbytes += _count_bytes(blocks[-1:])
            touched = list(self._touched)
            self._touched.clear()
            self._batch = _Batch(self._save, unsaved=blocks, nbytes=nbytes, touched=touched)
            jobs.append(self._batch)
        return jobs[0] if jobs else None

    def _save(self, batch: _Batch) -> bool:
        """Save a batch, and record which of its blocks the stores have afterwards."""
        if batch.unsaved:
            batch.stored = self._save_blocks(batch.unsaved, batch)
        if batch.touched:
            self._stores.touch(batch.touched, batch)
        return False

    def _save_blocks(self, blocks: Sequence[StoredBlock], job: Job) -> list[BlockHash]:
        names = [block.name for block in blocks]
        count = self._stores.save(blocks, job)
        self.num_saved += count
        if count == len(names):
            return names
        stored: list[BlockHash] = []
        while names:  # a store had some blocks before, or lacks space for some
            num_stored = self._stores.find(names, job)
            stored += names[:num_stored]
            names = names[num_stored + 1 :]
        return stored

    def _note_end(self, job: Job) -> None:
        """Release a batch, and queue a rest if rests are on."""
        if not isinstance(job, _Batch):
            return
        self.queued_bytes -= job.nbytes
        self._stored.extend((*job.stored, *job.touched))
        self._batch = None
        job.unsaved = []
        self._undrained += job.nbytes
        if self._undrained >= _DRAIN_BYTES and not self._blocks:
            self._undrained = 0
            self._drained()
        if self._rests:
            self._worker.jobs.append(Job(lambda _: self._rest(_REST * job.spent)))

    def _rest(self, seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._rests or self._num_waiting or self._worker.is_closed, seconds
            )
        return False


def _count_bytes(blocks: Iterable[StoredBlock]) -> int:
    return sum(memoryview(block.payload).nbytes for block in blocks)


OBJECT_BLOCK = 1 << 16
_LENGTH = struct.Struct("<Q")

OBJECTS = ModelRecord("objects, 1", "image embeddings and replies", 1, OBJECT_BLOCK)
"""All models share this `ModelRecord`: an object's key covers everything that it depends on."""


class ObjectStore:
    """Objects: bytes by key. No method raises.

    stores: the tiers, nearest first. `load` waits for each tier up to a deadline; `save` does not
    wait.
    """

    def __init__(self, stores: Sequence[GuardedStore], saver: Saver) -> None:
        self._stores = stores
        self._saver = saver

    def load(self, key: bytes, job: Job) -> memoryview | None:
        """Return an object; None if it is missing or damaged.

        An object that only a farther tier has is then saved in all tiers.
        """
        for index, guarded in enumerate(self._stores):
            data = guarded.call(job, lambda store: self._load(store, key), None)
            if data is not None:
                if index:
                    seconds = guarded.store.block_seconds
                    self.save(key, data, _count_blocks(len(data)) * seconds)
                return data
        return None

    def _load(self, store: BlockStore, key: bytes) -> memoryview | None:
        first = next(iter(store.load([_name(key, 0)])), None)
        if first is None:
            return None
        length = _LENGTH.unpack_from(first.payload)[0]
        count = _count_blocks(length)
        names = [_name(key, index) for index in range(1, count)]
        if store.find(names) < len(names):
            return None
        parts = [first.payload, *(block.payload for block in store.load(names))]
        if len(parts) < count:
            return None
        self._saver.touch([_name(key, 0), *names])
        return memoryview(b"".join(parts))[_LENGTH.size : _LENGTH.size + length]

    def save(self, key: bytes, data: bytes | memoryview, seconds: float) -> None:
        """Save an object that took `seconds` to compute, if the saver's queue has space."""
        count = _count_blocks(len(data))
        whole = memoryview((_LENGTH.pack(len(data)) + data).ljust(count * OBJECT_BLOCK, b"\0"))
        names = [_name(key, index) for index in range(count)]
        parents = [BlockHash(bytes(32)), *names]
        parts = [whole[i * OBJECT_BLOCK : (i + 1) * OBJECT_BLOCK] for i in range(count)]
        now = time.time()
        self._saver.offer(
            [
                StoredBlock(names[i], parents[i], i, seconds / count, now, parts[i])
                for i in range(count)
            ]
        )


def _count_blocks(nbytes: int) -> int:
    """Return the number of blocks of an object of `nbytes` bytes."""
    return -(-(nbytes + _LENGTH.size) // OBJECT_BLOCK)


def _name(key: bytes, index: int) -> BlockHash:
    data = b"object" + struct.pack("<QQ", index, len(key)) + key
    return BlockHash(hashlib.sha256(data).digest())
