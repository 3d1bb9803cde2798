"""Threads that call slow stores, and the deadline of every call.

A `Worker` is one thread with a queue of jobs. Lookups, loads, saves and images have one worker
each. A read of a file has no timeout, so a call that takes longer than its deadline is abandoned:

    worker    abandons its thread; a new thread begins the job again
    store     is not called before the abandoned thread has returned, nor during a pause
    job       retains the blocks that have arrived, and continues with the other stores

Late calls are detected whenever a caller submits a job to the worker or waits for it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headstart.cache import BlockHash
from headstart.tiers.store import (
    SILENT,
    SLOW,
    BlockStore,
    Faults,
    LoadedBlock,
    Pause,
    StoredBlock,
)

DEADLINE = 5.0  # seconds for an answer, and for each chunk of a load
CHANGE_DEADLINE = 60.0  # seconds to save a batch, or to clear a store
CHUNK_BYTES = 2 << 20
_CHUNK_SECONDS = 0.02  # after this time, a chunk of fewer bytes is passed on
_POLL = 0.01  # seconds between two checks for late calls

T = TypeVar("T")


class _AbandonedError(BaseException):
    """Ends a thread whose call was abandoned."""


@dataclass(eq=False)
class _Call:
    """A call of a store.

    seconds: its deadline. is_load: True if the call reads a chunk of a load.
    """

    store: "GuardedStore"
    began: float
    seconds: float
    is_load: bool
    is_late: bool = False


@dataclass(eq=False)
class Job:
    """A unit of work for a worker.

    work: does the job, and returns True if the job stays in the queue. spent: seconds that calls of
    stores have taken so far. limit: the maximum of `spent`. call: the current call of a store.
    """

    work: Callable[[Any], bool]
    done: bool = False
    spent: float = 0.0
    limit: float = math.inf
    call: _Call | None = None

    def time_left(self) -> float:
        return self.limit - self.spent


class Worker:
    """A daemon thread that does jobs one after the other. It starts at the first job.

    pick: returns the next job of the queue (by default the first), or None to wait. ended: called
    after each call of a job's `work`. Both are called with the condition `changed` held. Several
    workers may share `changed`. If a job raises, a fault of kind `problem` is counted in `faults`.
    """

    def __init__(
        self,
        name: str,
        faults: Faults,
        problem: str,
        changed: threading.Condition | None = None,
        *,
        pick: Callable[[], Job | None] | None = None,
        ended: Callable[[Any], None] = lambda job: None,
    ) -> None:
        self.is_closed = False
        self.jobs: deque[Job] = deque()
        self.changed = changed or threading.Condition()
        self._name = name
        self._faults = faults
        self._problem = problem
        self._pick = pick or (lambda: self.jobs[0] if self.jobs else None)
        self._ended = ended
        self._job: Job | None = None  # the current job
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """True if the thread runs; False before the first job, and in a forked process."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job; mark it as done at once if the worker is closed or gets no thread."""
        with self.changed:
            if self.wake():
                self.jobs.append(job)
            else:
                job.done = True

    def call(self, work: Callable[[Job], T], default: T) -> T:
        """Run `work` in the thread and return its result; `default` if it fails."""
        result = default

        def run(job: Job) -> bool:
            nonlocal result
            result = work(job)
            return False

        job = Job(run)
        self.submit(job)
        self.wait_for(lambda: job.done)
        return result

    def wake(self) -> bool:
        """Let the thread look for a job; return False if the worker is closed or gets no thread.

        Call with `changed` held.
        """
        self.abandon_late_call()
        self._start()
        self.changed.notify_all()
        return self._thread is not None and not self.is_closed

    def abandon_late_call(self) -> None:
        """Replace the thread if its call of a store is late. Call with `changed` held."""
        job = self._job if self._job in self.jobs else None  # it may have moved to another worker
        call = job.call if job is not None else None
        if job is not None and call is not None and call.store.abandon_if_late(call):
            job.spent += time.monotonic() - call.began
            job.call = self._job = self._thread = None
        if self.jobs:
            self._start()

    def _start(self) -> None:
        if self._thread is None and not self.is_closed:
            self._thread = start_thread(self._run, self._name)

    def wait_for(self, condition: Callable[[], object], timeout: float = math.inf) -> bool:
        """Wait for a condition and abandon late calls; return False after `timeout` seconds."""
        return wait_for([self], condition, timeout)

    def close(self, timeout: float) -> None:
        """End all jobs, and wait up to `timeout` seconds for the thread. Idempotent."""
        with self.changed:
            self.is_closed = True
            for job in self.jobs:
                job.done = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self.changed:
                while (job := self._pick()) is None and not self.is_closed:
                    self.changed.wait()
                if job is None:
                    return
                self._job = job
            stays = False
            try:
                stays = not job.done and job.work(job)
            except _AbandonedError:
                return
            except BaseException as error:  # the next job may succeed
                self._faults.note(self._problem, repr(error))
            with self.changed:
                self._job = None
                if not stays:
                    job.done = True
                    self.jobs.remove(job)
                self._ended(job)
                self.changed.notify_all()


def wait_for(
    workers: Sequence[Worker], condition: Callable[[], object], timeout: float = math.inf
) -> bool:
    """Wait like `Worker.wait_for`, for several workers that share `changed`."""
    changed = workers[0].changed
    until = time.monotonic() + timeout
    with changed:
        while not condition():
            left = until - time.monotonic()
            if left <= 0:
                return False
            changed.wait(min(left, _POLL))
            for worker in workers:
                worker.abandon_late_call()
    return True


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; return None if the machine has no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class GuardedStore:
    """A store that jobs call with a deadline.

    After a late call, the store is not called until the late call has returned. It is also paused
    for 5 s to 5 min, unless the call was a load with a deadline shorter than `DEADLINE`. Such a
    deadline is derived from the time to compute the blocks, so the store may only be slow.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.tier, self.faults = store.tier, store.faults
        self.pause = Pause(store.faults)
        self._calls: set[_Call] = set()
        self._changed = threading.Condition()

    @property
    def is_stuck(self) -> bool:
        """True while a call that was late has not returned."""
        with self._changed:
            return any(call.is_late for call in self._calls)

    @property
    def is_unavailable(self) -> bool:
        """True while the store must not be called."""
        return self.pause.is_on or self.is_stuck

    def find(self, names: Sequence[BlockHash], job: Job) -> int:
        return self.call(job, lambda store: store.find(names), 0)

    def first(self, names: Sequence[BlockHash], job: Job) -> int:
        return self.call(job, lambda store: store.first(names), len(names))

    def load(self, names: Sequence[BlockHash], job: Job) -> Iterator[list[LoadedBlock]]:
        """Yield the blocks in chunks, up to the first block that is missing or late."""
        if self.is_unavailable or job.time_left() <= 0:
            return
        chunks = _read_chunks(self.store, names)
        while chunk := self._call(job, lambda _: next(chunks, None), is_load=True):
            self.pause.answered()
            yield chunk
            if job.time_left() <= 0:
                self._note_slow_load()
                return

    def call(
        self,
        job: Job,
        work: Callable[[BlockStore], T],
        default: T,
        deadline: float | None = None,
    ) -> T:
        """Return `work(store)`; `default` if the store must not be called or no time is left."""
        if self.is_unavailable or job.time_left() <= 0:
            return default
        result = self._call(job, work, deadline)
        self.pause.answered()
        return result

    def save(self, blocks: Sequence[StoredBlock], job: Job) -> int:
        if not self.is_unavailable:
            return self._call(job, lambda store: store.save(blocks), CHANGE_DEADLINE)
        self.faults.num_unsaved += len(blocks)
        return 0

    def touch(self, names: Sequence[BlockHash], job: Job) -> None:
        if not self.is_unavailable:
            self._call(job, lambda store: store.touch(names), CHANGE_DEADLINE)

    def clear(self, job: Job) -> bool:
        return self.call(job, lambda store: store.clear(), False, CHANGE_DEADLINE)

    def close(self, timeout: float) -> None:
        """Close the store when all its calls have returned; wait up to `timeout` seconds."""

        def close() -> None:
            with self._changed:
                self._changed.wait_for(lambda: not self._calls)
            self.store.close()

        if (thread := start_thread(close, "headstart-close")) is not None:
            thread.join(timeout)

    def _call(
        self,
        job: Job,
        work: Callable[[BlockStore], T],
        deadline: float | None = None,
        *,
        is_load: bool = False,
    ) -> T:
        """Return `work(store)`. End this thread if the call was abandoned meanwhile."""
        seconds = min(deadline or DEADLINE, job.time_left())
        call = _Call(self, time.monotonic(), seconds, is_load)
        with self._changed:
            self._calls.add(call)
        job.call = call
        try:
            return work(self.store)
        finally:
            with self._changed:
                self._calls.discard(call)
                self._changed.notify_all()
            if call.is_late:
                raise _AbandonedError
            job.call = None
            job.spent += time.monotonic() - call.began

    def abandon_if_late(self, call: _Call) -> bool:
        """Abandon a call if it is late; return False if it is not."""
        if time.monotonic() < call.began + call.seconds:
            return False
        with self._changed:
            if call not in self._calls:
                return False
            call.is_late = True
        if call.seconds >= DEADLINE:
            self.pause.failed(SILENT, f"not within {call.seconds:g} s")
        elif call.is_load:
            self._note_slow_load()
        else:
            self.pause.failed(SLOW, f"no answer within {call.seconds:.2f} s")
        return True

    def _note_slow_load(self) -> None:
        self.faults.note(SLOW, "the remaining blocks are not loaded")


def _read_chunks(store: BlockStore, names: Sequence[BlockHash]) -> Iterator[list[LoadedBlock]]:
    chunk: list[LoadedBlock] = []
    nbytes, began = 0, time.monotonic()
    for block in store.load(names):
        chunk.append(block)
        nbytes += block.payload.nbytes
        if nbytes >= CHUNK_BYTES or time.monotonic() - began > _CHUNK_SECONDS:
            yield chunk
            chunk, nbytes, began = [], 0, time.monotonic()
    yield chunk


class StoreChain:
    """Several tiers, nearest first. A lookup that ends in one tier continues in the next."""

    def __init__(self, stores: Sequence[GuardedStore]) -> None:
        self.stores = stores

    @property
    def block_seconds(self) -> float:
        """Seconds to compute a block, from the nearest store that has measured it; 0 if unknown."""
        return next((s.store.block_seconds for s in self.stores if s.store.block_seconds), 0.0)

    def find(self, names: Sequence[BlockHash], job: Job) -> int:
        count = 0
        for store in self.stores:
            if count < len(names):
                count += store.find(names[count:], job)
        return count

    def first(self, names: Sequence[BlockHash], job: Job) -> int:
        """Return the index of the first block that any store has; `len(names)` without a hit."""
        index = len(names)
        for store in self.stores:
            index = min(index, store.first(names[:index], job)) if index else 0
        return index

    def load(self, names: Sequence[BlockHash], job: Job) -> Iterator[list[LoadedBlock]]:
        """Yield the blocks in chunks, up to the first block that no store returns in time."""
        count = 0
        for store in self.stores:
            if count < len(names):
                for chunk in store.load(names[count:], job):
                    count += len(chunk)
                    yield chunk

    def save(self, blocks: Sequence[StoredBlock], job: Job) -> int:
        """Save blocks in all stores; return the largest number of new blocks in one store."""
        return max(store.save(blocks, job) for store in self.stores)

    def touch(self, names: Sequence[BlockHash], job: Job) -> None:
        for store in self.stores:
            store.touch(names, job)
