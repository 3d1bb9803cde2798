"""Loading off the engine's thread: blocks arrive in order, a few at a time, and never too many.

    start ──▶ look up: does the store have it, and is it worth it ──▶ load ──▶ take

Looking up has a thread of its own, so that a prompt that is new waits for nobody's load.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headstart.cache import BlockHash
from headstart.tiers.store import BlockStore, LoadedBlock

__all__ = ["LoadJob", "Loader"]

_LOG = logging.getLogger("headstart.tiers")
_CHUNK_BYTES = 8 << 20
_WEIGHT = 0.3  # of the last measurement in the rate


class LoadJob:
    """Blocks that are looked for in a store and loaded. Its fields change under the loader's lock.

    count: how many of the names are loaded, once that is known. arrived: blocks that nobody has
    taken yet. done: nothing more arrives.
    """

    def __init__(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> None:
        self.names = names
        self.choose = choose
        self.count = 0
        self.arrived: deque[LoadedBlock] = deque()
        self.done = False
        self.cancelled = False


class Loader:
    """Loads for those who wait, in the order in which they asked.

    max_bytes bounds what has arrived and was not taken; loading then waits. rate: bytes a second
    that came of late; None before the first load.
    """

    def __init__(self, store: BlockStore, max_bytes: int) -> None:
        self.rate: float | None = None
        self._store = store
        self._max_bytes = max_bytes
        self._asked: deque[LoadJob] = deque()
        self._found: deque[LoadJob] = deque()
        self._current: set[LoadJob] = set()  # those that a thread works on
        self._nbytes = 0
        self._news = False
        self._closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> LoadJob:
        """Look for these blocks, and load as many as `choose` says when it is told how many are."""
        job = LoadJob(names, choose)
        with self._changed:
            if self._closed or not self._has_threads():
                job.done = self._news = True
                return job
            self._asked.append(job)
            self._changed.notify_all()
        return job

    def _has_threads(self) -> bool:
        """Start the threads that do not run; False if the machine has no more threads."""
        works = ((self._asked, self._look_up), (self._found, self._load))
        for queue, work in works[len(self._threads) :]:
            name = f"headstart{work.__name__}"
            thread = threading.Thread(target=self._run, args=(queue, work), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._threads.append(thread)
        return True

    def take(self, job: LoadJob, most: int) -> list[LoadedBlock]:
        """Up to `most` of the blocks that have arrived, in order."""
        with self._changed:
            taken = [job.arrived.popleft() for _ in range(min(most, len(job.arrived)))]
            self._release(taken)
        return taken

    def cancel(self, job: LoadJob) -> None:
        """Nobody waits for the job any more."""
        with self._changed:
            job.cancelled = job.done = True
            self._release(job.arrived)
            job.arrived.clear()

    def _release(self, blocks: Sequence[LoadedBlock] | deque[LoadedBlock]) -> None:
        self._nbytes -= sum(block.payload.nbytes for block in blocks)
        self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until something arrived, or a job is done, since the last call."""
        with self._changed:
            if not self._news:
                self._changed.wait_for(lambda: self._news or self._closed, timeout)
            self._news = False

    def close(self, timeout: float) -> None:
        """End every job. Idempotent."""
        with self._changed:
            self._closed = True
            for job in (*self._asked, *self._found, *self._current):
                job.cancelled = job.done = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    # In the loader's threads

    def _run(self, queue: deque[LoadJob], work: Callable[[LoadJob], bool]) -> None:
        """Do the work of one thread for each job of its queue; True says that it goes on."""
        while True:
            with self._changed:
                while not queue and not self._closed:
                    self._changed.wait()
                if not queue:
                    return
                job = queue.popleft()
                self._current.add(job)
            goes_on = False
            try:
                goes_on = not job.cancelled and work(job)
            except BaseException:  # or whoever asks next would wait for ever
                _LOG.exception("a load failed; what it was for is computed")
            with self._changed:
                self._current.discard(job)
                if goes_on and not self._closed:
                    self._found.append(job)
                else:
                    job.done = self._news = True
                self._changed.notify_all()

    def _look_up(self, job: LoadJob) -> bool:
        job.count = job.choose(self._store.find(job.names))
        return job.count > 0

    def _load(self, job: LoadJob) -> bool:
        chunk: list[LoadedBlock] = []
        nbytes, waiting = 0, 0
        seconds, begun = 0.0, time.perf_counter()
        for block in self._store.load(job.names[: job.count]):
            chunk.append(block)
            waiting += block.payload.nbytes
            if waiting >= _CHUNK_BYTES:
                seconds += time.perf_counter() - begun
                if not self._hand_on(job, chunk, waiting):
                    return False
                chunk, nbytes, waiting = [], nbytes + waiting, 0
                begun = time.perf_counter()
        seconds += time.perf_counter() - begun
        self._hand_on(job, chunk, waiting)
        self._note_rate(nbytes + waiting, seconds)
        return False

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        if nbytes:
            rate = nbytes / max(seconds, 1e-9)
            self.rate = rate if self.rate is None else self.rate + _WEIGHT * (rate - self.rate)

    def _hand_on(self, job: LoadJob, chunk: list[LoadedBlock], nbytes: int) -> bool:
        """Have blocks of so many bytes wait to be taken; False if nobody wants them any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    job.cancelled or not self._nbytes or self._nbytes + nbytes <= self._max_bytes
                )
            )
            if job.cancelled:
                return False
            job.arrived.extend(chunk)
            self._nbytes += nbytes
            self._news = True
            self._changed.notify_all()
        return True
