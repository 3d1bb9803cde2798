"""Loading off the engine's thread: blocks arrive in order, a few at a time, and never too many.

    start ──▶ looked up: how many are there, and are they worth loading ──▶ loaded ──▶ done
                                                                              │
                                                              blocks wait ◀───┘ until `take`

Lookups have a thread of their own, so that a new prompt does not wait for the load of another.
Loads run one after the other. Half of the bytes that may wait to be taken belong to the preferred
job, whose blocks are taken as they come: jobs that nobody takes yet may fill the other half and
never delay it. A load that takes longer than computing its blocks would ends early.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults
from headstart.tiers.guard import StoreChain, start_thread
from headstart.tiers.store import LoadedBlock

__all__ = ["LoadJob", "Loader"]

_TRIAL = 1.0  # seconds that the first load may take longer than computing
_LEAST_WAIT = 0.25  # seconds that a later load may take, however fast computing is
_WEIGHT = 0.3  # of the last measurement in the rate
_LEAST_RATE = 1.0  # bytes a second of a store that gave nothing in time


class LoadJob:
    """Blocks to look up and load.

    choose: returns how many to load of those that the stores have. count: how many are to be
    loaded; 0 until that is known. num_loaded: how many of these have come. arrived: blocks that
    wait to be taken. done: nothing more arrives. spent: seconds that the stores took. limit:
    seconds that they may take.
    """

    def __init__(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> None:
        self.names = names
        self.choose = choose
        self.count = 0
        self.num_loaded = 0
        self.arrived: deque[LoadedBlock] = deque()
        self.done = False
        self.spent = 0.0
        self.limit = 0.0

    def time_left(self) -> float:
        """Return the seconds that the stores may still take."""
        return self.limit - self.spent


class Loader:
    """Loads jobs in the order in which they were started, the preferred one first.

    max_bytes bounds what has arrived and was not taken, up to a chunk. compute: returns the seconds
    that computing so many blocks takes. rate: bytes a second of late; None before the first load.
    """

    def __init__(
        self,
        stores: StoreChain,
        max_bytes: int,
        compute: Callable[[int], float],
        faults: Faults,
    ) -> None:
        self.rate: float | None = None
        self._stores = stores
        self._max_bytes = max_bytes
        self._compute = compute
        self._faults = faults
        self._started: deque[LoadJob] = deque()  # to be looked up
        self._found: deque[LoadJob] = deque()  # to be loaded
        self._preferred: LoadJob | None = None
        self._nbytes = 0  # of blocks that wait to be taken
        self._has_news = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> LoadJob:
        """Look these blocks up, and load as many as `choose` returns for the number found."""
        job = LoadJob(names, choose)
        with self._changed:
            job.done = self._is_closed or not self._has_threads()
            if not job.done:
                self._started.append(job)
                self._changed.notify_all()
        return job

    def _has_threads(self) -> bool:
        """Start the threads that do not run; False if the machine has no more threads."""
        for work in (self._look_up, self._load)[len(self._threads) :]:
            thread = start_thread(partial(self._run, work), f"headstart{work.__name__}")
            if thread is None:
                return False
            self._threads.append(thread)
        return True

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
        """End a job, and drop what has arrived of it."""
        with self._changed:
            job.done = True
            self._release(job.arrived)
            job.arrived.clear()

    def _release(self, blocks: Iterable[LoadedBlock]) -> None:
        self._nbytes -= sum(block.payload.nbytes for block in blocks)
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
        preferred = self._preferred
        job = preferred if preferred is not None and preferred in queue else queue[0]
        return job if job.done or self._has_room(job) else None

    def _has_room(self, job: LoadJob) -> bool:
        """True if more of a job may arrive now."""
        if job is self._preferred:
            return self._nbytes < self._max_bytes or not job.arrived
        return self._nbytes < self._max_bytes // 2

    def _look_up(self, job: LoadJob) -> bool:
        """Find out how many blocks of a job to load; True if there are any."""
        job.limit = self._limit(len(job.names))
        began = time.monotonic()
        found = self._stores.find(job.names, job.time_left)
        job.spent = time.monotonic() - began
        job.count = job.choose(found)
        job.limit = self._limit(job.count)
        return job.count > 0

    def _limit(self, blocks: int) -> float:
        """Return the seconds that the stores may take for so many blocks."""
        seconds = self._compute(blocks)
        return _TRIAL + seconds if self.rate is None else max(_LEAST_WAIT, seconds)

    def _load(self, job: LoadJob) -> bool:
        """Load a job; True if it gives way to the preferred one, and has more."""
        names = job.names[job.num_loaded : job.count]
        is_first, before = self.rate is None, job.spent
        count, nbytes, goes_on = 0, 0, True
        began = time.monotonic()
        for chunk in self._stores.load(names, job.time_left):
            job.spent += time.monotonic() - began
            count += len(chunk)
            nbytes += sum(block.payload.nbytes for block in chunk)
            if is_first:
                job.limit = _TRIAL + self._compute(count)
            goes_on = self._hand_on(job, chunk)
            began = time.monotonic()
            if not goes_on:
                break
        else:
            job.spent += time.monotonic() - began
        if nbytes:
            self._note_rate(count, nbytes, job.spent - before)
        elif job.time_left() <= 0:
            self._note_rate(job.count, 0, job.spent)
        return not goes_on and not job.done

    def _hand_on(self, job: LoadJob, chunk: list[LoadedBlock]) -> bool:
        """Have blocks wait to be taken, and wait for room for more; True if the job goes on."""
        with self._changed:
            if job.done:
                return False
            job.arrived.extend(chunk)
            job.num_loaded += len(chunk)
            self._nbytes += sum(block.payload.nbytes for block in chunk)
            self._has_news = True
            self._changed.notify_all()
            if job.num_loaded == job.count:
                return True
            self._changed.wait_for(lambda: self._must_stop(job) or self._has_room(job))
            return not self._must_stop(job)

    def _must_stop(self, job: LoadJob) -> bool:
        """True if a job is over, or another one is preferred."""
        is_other_preferred = self._preferred is not job and self._preferred in self._found
        return job.done or self._is_closed or is_other_preferred

    def _note_rate(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Note what came in so many seconds: in part, but at once where computing was faster."""
        rate = max(nbytes / max(seconds, 1e-9), _LEAST_RATE)
        if self.rate is None or (rate < self.rate and seconds > self._compute(blocks)):
            self.rate = rate
        else:
            self.rate += _WEIGHT * (rate - self.rate)
