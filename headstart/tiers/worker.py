"""Loads and saves off the engine's thread: the worker between the pool and slow stores.

`ObjectStore` has objects of any size, such as image embeddings, over a `BlockStore` of blocks of
one size. An object is cut into blocks of `OBJECT_BLOCK` bytes, the first of which begins with its
length. An object that lost a block is missing.
"""

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headstart.cache import BlockHash
from headstart.tiers.guard import GuardedStore, StoreChain, start_thread
from headstart.tiers.store import BlockStore, Faults, LoadedBlock, ModelRecord, StoredBlock

_TRIAL = 1.0  # seconds that the first load may take longer than computing
_LEAST_WAIT = 0.25  # seconds that a later load may take, however fast computing is
_WEIGHT = 0.3  # of the last measurement in the rate
_LEAST_RATE = 1.0  # bytes a second of a store that gave nothing in time

_BATCH_BLOCKS = 64  # of a save
_BATCH_BYTES = 16 << 20
_REST = 15  # times as long as a save took
_DRAIN_BYTES = 32 << 20  # saved, after which an empty queue returns its memory
_MOST_STORED = 1 << 14  # names that wait for `take_kept`


@dataclass(eq=False)
class LoadJob:
    """Blocks to look up and load.

    choose: returns how many to load of those that the stores have. count: how many are to be
    loaded; 0 until that is known. num_loaded: how many of these have come. arrived: blocks that
    wait to be taken. done: nothing more arrives. spent: seconds that the stores took. limit:
    seconds that they may take.
    """

    names: Sequence[BlockHash]
    choose: Callable[[int], int]
    count: int = 0
    num_loaded: int = 0
    arrived: deque[LoadedBlock] = field(default_factory=deque)
    done: bool = False
    spent: float = 0.0
    limit: float = 0.0

    def time_left(self) -> float:
        return self.limit - self.spent


class Loader:
    """Jobs loaded in the order in which they were started, the preferred one first.

        start ──▶ looked up: how many are there, and are they worth loading ──▶ loaded ──▶ done
                                                                                  │
                                                                  blocks wait ◀───┘ until `take`

    Lookups have a separate thread, so that a new prompt does not wait for the load of another.
    Loads run one after the other. Half of the bytes that may wait to be taken belong to the
    preferred job, whose blocks are taken as they come: other jobs may fill the other half and never
    delay it. A load that takes longer than computing its blocks would ends early.

    max_bytes bounds the bytes that have arrived and were not taken, up to a chunk. compute: returns
    the seconds to compute so many blocks. rate: recent bytes a second; None before the first load.
    queued_bytes: of blocks that wait to be taken.
    """

    def __init__(
        self, stores: StoreChain, max_bytes: int, compute: Callable[[int], float], faults: Faults
    ) -> None:
        self.rate: float | None = None
        self._stores = stores
        self._max_bytes = max_bytes
        self._compute = compute
        self._faults = faults
        self._started: deque[LoadJob] = deque()  # to be looked up
        self._found: deque[LoadJob] = deque()  # to be loaded
        self._preferred: LoadJob | None = None
        self.queued_bytes = 0
        self._has_news = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> LoadJob:
        """Look these blocks up, and load as many as `choose` returns for the number found."""
        job = LoadJob(names, choose)
        with self._changed:
            if self._is_closed:
                job.done = True
                return job
            for work in (self._look_up, self._load)[len(self._threads) :]:
                thread = start_thread(partial(self._run, work), f"headstart{work.__name__}")
                if thread is None:  # the machine has no more threads
                    break
                self._threads.append(thread)
            job.done = len(self._threads) < 2
            if not job.done:
                self._started.append(job)
                self._changed.notify_all()
        return job

    def take(self, job: LoadJob, most: int) -> list[LoadedBlock]:
        """Return up to `most` of the blocks that have arrived, in order."""
        with self._changed:
            taken = [job.arrived.popleft() for _ in range(min(most, len(job.arrived)))]
            self._release(taken)
        return taken

    def prefer(self, job: LoadJob | None) -> None:
        """Load this job before all others, since its blocks are taken as they come."""
        if job is not self._preferred:
            with self._changed:
                self._preferred = job
                self._changed.notify_all()

    def cancel(self, job: LoadJob) -> None:
        """End a job, and drop its blocks."""
        with self._changed:
            job.done = True
            self._release(job.arrived)
            job.arrived.clear()

    def _release(self, blocks: Iterable[LoadedBlock]) -> None:
        self.queued_bytes -= sum(block.payload.nbytes for block in blocks)
        self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until blocks arrived, or a job is done or lacks room, since the last call."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self._is_closed, timeout)
            self._has_news = False

    def close(self, timeout: float) -> None:
        """End every job, and wait for the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            for job in (*self._started, *self._found):
                job.done = True
            self._changed.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    # In the threads of lookups and loads

    def _run(self, work: Callable[[LoadJob], bool]) -> None:
        """Work on the jobs of one queue until the loader is closed."""
        is_lookup = work == self._look_up
        queue = self._started if is_lookup else self._found
        while True:
            with self._changed:
                while (job := self._pick(queue)) is None and not self._is_closed:
                    self._changed.wait()
                if job is None or self._is_closed:
                    return
            has_more = False
            try:
                has_more = not job.done and work(job)
            except BaseException as error:  # the next job may succeed
                self._faults.note("a load failed", repr(error))
            with self._changed:
                job.done |= not has_more
                if is_lookup or job.done:
                    queue.remove(job)
                if is_lookup and not job.done:
                    self._found.append(job)
                self._has_news |= job.done or not self._has_room(job)  # it has to be preferred
                self._changed.notify_all()

    def _pick(self, queue: deque[LoadJob]) -> LoadJob | None:
        """Return the next job of a queue; None if there is none that has room for blocks."""
        if not queue or queue is self._started:
            return queue[0] if queue else None
        job = self._preferred if self._preferred in queue else queue[0]
        assert job is not None
        return job if job.done or self._has_room(job) else None

    def _has_room(self, job: LoadJob) -> bool:
        """Return True if more blocks of a job may arrive now."""
        if job is self._preferred:
            return self.queued_bytes < self._max_bytes or not job.arrived
        return self.queued_bytes < self._max_bytes // 2

    def _look_up(self, job: LoadJob) -> bool:
        """Find out how many blocks of a job to load; return True if there are any."""
        job.limit = self._limit(len(job.names))
        began = time.monotonic()
        num_stored = self._stores.find(job.names, job.time_left)
        job.spent = time.monotonic() - began
        job.count = job.choose(num_stored)
        job.limit = self._limit(job.count)
        return job.count > 0

    def _limit(self, blocks: int) -> float:
        seconds = self._compute(blocks)
        return _TRIAL + seconds if self.rate is None else max(_LEAST_WAIT, seconds)

    def _load(self, job: LoadJob) -> bool:
        """Load a job; return True if it gives way to the preferred one, and has more."""
        is_first, before = self.rate is None, job.spent
        count, nbytes, continues = 0, 0, True
        began = time.monotonic()
        for chunk in self._stores.load(job.names[job.num_loaded : job.count], job.time_left):
            job.spent += time.monotonic() - began
            count += len(chunk)
            nbytes += sum(block.payload.nbytes for block in chunk)
            if is_first:
                job.limit = _TRIAL + self._compute(count)
            continues = self._hand_on(job, chunk)
            began = time.monotonic()
            if not continues:
                break
        else:
            job.spent += time.monotonic() - began
        if nbytes:
            self._note_rate(count, nbytes, job.spent - before)
        elif job.time_left() <= 0:
            self._note_rate(job.count, 0, job.spent)
        return not continues and not job.done

    def _hand_on(self, job: LoadJob, chunk: list[LoadedBlock]) -> bool:
        """Queue blocks to be taken, wait for room for more; return True if the job continues."""

        def must_stop() -> bool:
            is_other_preferred = self._preferred is not job and self._preferred in self._found
            return job.done or self._is_closed or is_other_preferred

        with self._changed:
            if job.done:
                return False
            job.arrived.extend(chunk)
            job.num_loaded += len(chunk)
            self.queued_bytes += sum(block.payload.nbytes for block in chunk)
            self._has_news = True
            self._changed.notify_all()
            if job.num_loaded == job.count:
                return True
            self._changed.wait_for(lambda: must_stop() or self._has_room(job))
            return not must_stop()

    def _note_rate(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Average a measurement into the rate; replace it at once where computing was faster."""
        rate = max(nbytes / max(seconds, 1e-9), _LEAST_RATE)
        if self.rate is None or (rate < self.rate and seconds > self._compute(blocks)):
            self.rate = rate
        else:
            self.rate += _WEIGHT * (rate - self.rate)


class Saver:
    """Blocks saved in a thread. Only `flush`, `drop` and `close` wait for it.

    num_dropped: blocks that were offered while the queue was full; they may be offered again.
    queued_bytes: of blocks that wait to be saved, or are being saved.
    faults: counts exceptions of a store. drained: called when the queue is empty after many bytes,
    whose memory is free now. While an engine computes on the cores that saving needs, `rest` makes
    the thread rest `_REST` times as long as it worked.
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
        self._stores = stores
        self._faults = faults
        self._drained = drained
        self._blocks: deque[StoredBlock] = deque()
        self._touched: dict[BlockHash, None] = {}
        self._stored: deque[BlockHash] = deque(maxlen=_MOST_STORED)
        self.queued_bytes = 0
        self._is_busy = False
        self._is_closed = False
        self._rests = False
        self._num_waiting = 0  # callers that wait for all to be saved
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def has_room(self, nbytes: int) -> bool:
        """Return True if an offer of so many bytes would be accepted."""
        fits = not self._blocks or self.queued_bytes + nbytes <= self.max_bytes
        return fits and not self._is_closed

    def offer(self, blocks: Sequence[StoredBlock]) -> bool:
        """Queue blocks to be saved; return False, and drop all, if there is no room."""
        nbytes = _count_bytes(blocks)
        with self._changed:
            if not self.has_room(nbytes):
                self.num_dropped += len(blocks)
                return False
            self._blocks.extend(blocks)
            self.queued_bytes += nbytes
            self._wake()
        return True

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Note that blocks of the store were used."""
        with self._changed:
            if not self._is_closed:
                self._touched.update(dict.fromkeys(names))
                self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, "headstart-saver")
        self._changed.notify_all()

    @property
    def is_saving(self) -> bool:
        """True while something waits to be saved, or is being saved."""
        return bool(self._blocks or self._touched or self._is_busy)

    def take_kept(self) -> list[BlockHash]:
        """Return the blocks that the store was seen to have since the last call.

        They were saved or used. The oldest are left out after a long time.
        """
        with self._changed:
            names = list(self._stored)
            self._stored.clear()
        return names

    def rest(self, on: bool) -> None:
        """Leave the cores to others for most of the time from now on, or no longer."""
        if on is not self._rests:
            with self._changed:
                self._rests = on
                self._changed.notify_all()

    def _run(self) -> None:
        """Save batches until the saver is closed and its queue is empty."""
        unreturned = 0  # bytes saved since memory was returned
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._blocks or self._touched or self._is_closed)
                if not (self._blocks or self._touched):
                    return
                batch: list[StoredBlock] = []
                nbytes = 0
                while self._blocks and len(batch) < _BATCH_BLOCKS and nbytes < _BATCH_BYTES:
                    batch.append(self._blocks.popleft())
                    nbytes += _count_bytes(batch[-1:])
                touched = list(self._touched)
                self._touched.clear()
                self._is_busy = True
            began = time.monotonic()
            stored = touched
            try:
                stored = self._save(batch) + touched
                if touched:
                    self._stores.touch(touched)
            except BaseException as error:  # the next batch may succeed
                self._faults.note("blocks could not be saved", repr(error))
            unreturned += nbytes
            del batch
            if unreturned >= _DRAIN_BYTES and not self._blocks:
                self._drained()
                unreturned = 0
            with self._changed:
                self.queued_bytes -= nbytes
                self._is_busy = False
                self._stored.extend(stored)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: not self._rests or self._num_waiting or self._is_closed,
                    _REST * (time.monotonic() - began) if self._rests else 0,
                )

    def _save(self, batch: Sequence[StoredBlock]) -> list[BlockHash]:
        """Save blocks; return the names of those that the store has then."""
        names = [block.name for block in batch]
        count = self._stores.save(batch) if batch else 0
        self.num_saved += count
        if count == len(names):
            return names
        stored: list[BlockHash] = []
        while names:  # the store may have had some, or have no room
            num_stored = self._stores.find(names)
            stored += names[:num_stored]
            names = names[num_stored + 1 :]
        return stored

    def flush(self, timeout: float) -> bool:
        """Wait until all is saved; return False if that takes longer than so many seconds."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            until = time.monotonic() + timeout
            while self.is_saving and (left := until - time.monotonic()) > 0:
                if self._thread is None or not self._thread.is_alive():
                    break  # this process was forked
                self._changed.wait(left)
            self._num_waiting -= 1
            return not self.is_saving

    def drop(self, timeout: float) -> bool:
        """Forget the queue, and wait for the current save; return False if that takes longer."""
        with self._changed:
            self._forget_queued()
            is_idle = self._changed.wait_for(lambda: not self._is_busy, timeout)
            self._stored.clear()
            return is_idle

    def _forget_queued(self) -> None:
        self.queued_bytes -= _count_bytes(self._blocks)
        self._blocks.clear()
        self._touched.clear()

    def close(self, timeout: float) -> None:
        """Save the queue, for so many seconds at most; then accept no more. Idempotent."""
        until = time.monotonic() + timeout
        self.flush(timeout)
        with self._changed:
            self._is_closed = True
            self.num_dropped += len(self._blocks)
            self._forget_queued()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))


def _count_bytes(blocks: Iterable[StoredBlock]) -> int:
    return sum(memoryview(block.payload).nbytes for block in blocks)


OBJECT_BLOCK = 1 << 16
_LENGTH = struct.Struct("<Q")

OBJECTS = ModelRecord("objects, 1", "image embeddings", 1, OBJECT_BLOCK)
"""The record of all objects of all models: an object's key covers all that it depends on."""


class ObjectStore:
    """Bytes by key; an object that is missing or damaged is None. No method raises.

    stores: the tiers, nearest first. Loading waits for each up to its deadline; saving does not.
    """

    def __init__(self, stores: Sequence[GuardedStore], saver: Saver) -> None:
        self._stores = stores
        self._saver = saver

    def load(self, key: bytes) -> memoryview | None:
        """Return the object of this key, as it was saved; one of a farther tier is saved in all."""
        for index, guarded in enumerate(self._stores):
            data = guarded.call(lambda store: self._load(store, key), None)
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
        """Store an object that took so long to make, if the saver has room for it."""
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
    """Return the number of blocks of an object of so many bytes."""
    return -(-(nbytes + _LENGTH.size) // OBJECT_BLOCK)


def _name(key: bytes, index: int) -> BlockHash:
    data = b"object" + struct.pack("<QQ", index, len(key)) + key
    return BlockHash(hashlib.sha256(data).digest())
