"""Loading off the engine's thread: blocks arrive in order, a few at a time, and never too many."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headstart.cache import BlockHash
from headstart.tiers.store import BlockStore, LoadedBlock

__all__ = ["LoadJob", "Loader"]

_CHUNK_BYTES = 8 << 20
_WEIGHT = 0.3  # of the last measurement in the rate


class LoadJob:
    """Blocks that are looked for in a store and loaded. Its fields change under the loader's lock.

    found: how many of the names the store has; None until that is known. arrived: blocks that
    nobody has taken yet. done: nothing more arrives.
    """

    def __init__(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> None:
        self.names = names
        self.choose = choose
        self.found: int | None = None
        self.arrived: deque[LoadedBlock] = deque()
        self.done = False
        self.cancelled = False


class Loader:
    """Loads for those who wait, in the order in which they asked, in a thread of its own.

    max_bytes bounds what has arrived and was not taken; the thread then waits. rate: bytes a second
    that came of late; None before the first load.
    """

    def __init__(self, store: BlockStore, max_bytes: int) -> None:
        self.rate: float | None = None
        self._store = store
        self._max_bytes = max_bytes
        self._jobs: deque[LoadJob] = deque()
        self._nbytes = 0
        self._news = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> LoadJob:
        """Look for these blocks, and load as many as `choose` says when it is told how many are."""
        job = LoadJob(names, choose)
        with self._changed:
            if self._closed:
                job.done = True
                return job
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="headstart-loader", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return job

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
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # In the loader's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                if not job.cancelled:
                    self._load(job)
            finally:
                with self._changed:
                    job.done = self._news = True
                    self._changed.notify_all()

    def _load(self, job: LoadJob) -> None:
        job.found = self._store.find(job.names)
        count = job.choose(job.found)
        chunk: list[LoadedBlock] = []
        nbytes, waiting = 0, 0
        seconds, begun = 0.0, time.perf_counter()
        for block in self._store.load(job.names[:count]) if count else ():
            chunk.append(block)
            waiting += block.payload.nbytes
            if waiting >= _CHUNK_BYTES:
                seconds += time.perf_counter() - begun
                if not self._hand_on(job, chunk, waiting):
                    return
                chunk, nbytes, waiting = [], nbytes + waiting, 0
                begun = time.perf_counter()
        seconds += time.perf_counter() - begun
        self._hand_on(job, chunk, waiting)
        self._note_rate(nbytes + waiting, seconds)

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
