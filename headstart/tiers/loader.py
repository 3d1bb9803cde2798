"""Loading off the engine's thread: blocks arrive in order, a few at a time, and never too many.

    start ──▶ look up: does the store have it, and is it worth it ──▶ load ──▶ take
                                                          parked ◀──┘  ▲
                                                             └─────────┘

Looking up has a thread of its own, so that a prompt that is new waits for nobody's load. A job of
which too much waits to be taken is parked, and the next one is loaded. The job that is taken now
(`prefer`) always goes on: if others hold all room, the one that holds most gives blocks back from
its end, and loads these again later.

Neither a file nor a name server can be asked with a time limit, so a store may be silent for ever.
Whoever waits calls `end_late` now and then: a job of which nothing came for `DEADLINE` seconds
ends, and its thread is left to itself. Until that returns, and while `pause` is on, nothing is
asked of the store. A job that is slow ends in the same way, once the store took as long as
computing the blocks would, or `_LEAST_WAIT` if that is longer. The first load may take `_TRIAL`
more, since nobody knew how fast the store is.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headstart.cache import BlockHash
from headstart.tiers.deadline import DEADLINE
from headstart.tiers.faults import SILENT, SLOW
from headstart.tiers.pause import Pause
from headstart.tiers.store import BlockStore, LoadedBlock

__all__ = ["LoadJob", "Loader"]

_CHUNK_BYTES = 8 << 20
_TRIAL = 1.0  # seconds that the first load may be behind computing
_LEAST_WAIT = 0.25  # seconds that a later load may take, however fast computing is
_WEIGHT = 0.3  # of the last measurement in the rate
_LEAST_RATE = 1.0  # bytes a second of a store that gave nothing in time


class LoadJob:
    """Blocks that are looked for in a store and loaded. Its fields change under the loader's lock.

    count: how many of the names are loaded, once that is known; of a job that ended early, those
    that came. num_loaded: how many have come of these so far. arrived: blocks that nobody has taken
    yet. done: nothing more arrives. is_parked: nothing more arrives before others are taken, or
    this one is preferred. is_late: its thread was left to itself. asked: when the store was asked
    for what it has not given yet, by `time.monotonic`. spent: seconds that the store took before
    that. limit: seconds that it may take in all.
    """

    def __init__(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> None:
        self.names = names
        self.choose = choose
        self.count = 0
        self.num_loaded = 0
        self.arrived: deque[LoadedBlock] = deque()
        self.done = False
        self.cancelled = False
        self.is_parked = False
        self.is_late = False
        self.asked: float | None = None
        self.spent = 0.0
        self.limit = DEADLINE

    def is_silent(self, now: float) -> bool:
        """True if the store has given nothing for too long, and nobody has noted that yet."""
        return not self.is_late and self.asked is not None and now - self.asked > DEADLINE

    def is_slow(self, now: float) -> bool:
        """True if computing would have been faster, and nobody has noted that yet."""
        return (
            not self.is_late
            and self.asked is not None
            and self.spent + now - self.asked > self.limit
        )

    def note_answer(self, now: float | None = None) -> None:
        """Add the time since the store was asked; `now`: it is asked for more."""
        if self.asked is not None:
            self.spent += time.monotonic() - self.asked
        self.asked = now


class Loader:
    """Loads for those who wait, in the order in which they asked.

    max_bytes bounds what has arrived and was not taken; a job that needs more is parked. compute:
    the seconds that computing so many blocks takes. rate: bytes a second that came of late; None
    before the first load. is_guarded: no answer of the store takes longer than a deadline, since
    each of its tiers has one and a pause of its own; so none is late here.
    """

    def __init__(
        self,
        store: BlockStore,
        max_bytes: int,
        compute: Callable[[int], float],
        pause: Pause,
        *,
        is_guarded: bool = False,
    ) -> None:
        self.rate: float | None = None
        self._store = store
        self._max_bytes = max_bytes
        self._compute = compute
        self._pause = pause
        self._block_bytes = 0  # of the last block that came
        self._is_guarded = is_guarded
        self._asked: deque[LoadJob] = deque()
        self._found: deque[LoadJob] = deque()
        self._current: set[LoadJob] = set()  # those that a thread works on
        self._holding: set[LoadJob] = set()  # those of which blocks wait to be taken
        self._preferred: LoadJob | None = None
        self._nbytes = 0
        self._news = False
        self._closed = False
        self._lock = threading.RLock()  # not the condition: Ctrl-C in its `__exit__` would keep it
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def start(self, names: Sequence[BlockHash], choose: Callable[[int], int]) -> LoadJob:
        """Look for these blocks, and load as many as `choose` says when it is told how many are."""
        job = LoadJob(names, choose)
        self.end_late()
        with self._lock:
            if self._closed or self._pause.is_on or not self._has_threads():
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

    def end_late(self) -> None:
        """End the jobs that wait for a store that is silent or slow, and those behind them."""
        with self._lock:
            now = time.monotonic()
            silent = [job for job in self._current if job.is_silent(now) and not self._is_guarded]
            slow = [job for job in self._current if job.is_slow(now) and job not in silent]
            if not (silent or slow):
                return
            for job in (*silent, *slow):
                job.is_late = True
                self._pause.late(job)
                job.note_answer()
                if job.count:
                    self._note_rate(job.count, self._block_bytes * job.count, job.spent)
            for job in (*silent, *slow, *self._asked, *self._found):
                job.cancelled = job.done = True
            self._news = True
            self._changed.notify_all()
        if silent:
            self._pause.failed(SILENT, f"not within {DEADLINE:g} s")
        for job in slow:
            self._note_slow(job)

    def _note_slow(self, job: LoadJob, num_more: int = 0) -> None:
        """Count a job that took too long; num_more: blocks that came and are not counted yet.

        After a slow lookup the store is left alone for a while, since no rate prevents the next.
        """
        if job.count:
            came = f"{job.num_loaded + num_more:,} of {job.count:,} blocks came"
            self._pause.faults.note(SLOW, f"{came} within {job.limit:.2f} s")
        else:
            self._pause.failed(SLOW, f"no lookup within {job.limit:.2f} s")

    def take(self, job: LoadJob, most: int) -> list[LoadedBlock]:
        """Up to `most` of the blocks that have arrived, in order."""
        with self._lock:
            taken = [job.arrived.popleft() for _ in range(min(most, len(job.arrived)))]
            if not job.arrived:
                self._holding.discard(job)
            self._release(taken)
        return taken

    def prefer(self, job: LoadJob | None) -> None:
        """Load this job before all others: what arrives of it is taken at once. None: no job."""
        if job is not self._preferred:
            with self._lock:
                self._preferred = None if job is None or job.cancelled else job
                self._changed.notify_all()

    def cancel(self, job: LoadJob) -> None:
        """Nobody waits for the job any more."""
        with self._lock:
            job.cancelled = job.done = True
            self._release(job.arrived)
            job.arrived.clear()
            self._holding.discard(job)
            if self._preferred is job:
                self._preferred = None

    def cancel_all(self) -> None:
        """Nobody waits for any job; whatever an interruption left, no bytes are held."""
        with self._lock:
            for job in (*self._asked, *self._found, *self._current, *self._holding):
                job.cancelled = job.done = True
                job.arrived.clear()
            self._holding.clear()
            self._preferred = None
            self._nbytes = 0
            self._changed.notify_all()

    def _release(self, blocks: Sequence[LoadedBlock] | deque[LoadedBlock]) -> None:
        self._nbytes -= sum(block.payload.nbytes for block in blocks)
        self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until something arrived, or a job is done, since the last call."""
        with self._lock:
            if not self._news:
                self._changed.wait_for(lambda: self._news or self._closed, timeout)
            self._news = False

    def close(self, timeout: float) -> None:
        """End every job; one whose thread is in the store after that time is late. Idempotent."""
        with self._lock:
            self._closed = True
            for job in (*self._asked, *self._found, *self._current):
                job.cancelled = job.done = True
            self._changed.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            for job in self._current:
                self._pause.late(job)

    # In the loader's threads

    def _run(self, queue: deque[LoadJob], work: Callable[[LoadJob], bool]) -> None:
        """Do the work of one thread for each job of its queue; True says that it goes on."""
        while True:
            with self._lock:
                while (job := self._pick(queue)) is None and not self._closed:
                    self._changed.wait()
                if job is None:
                    return
                self._current.add(job)
            goes_on = has_answered = False
            try:
                goes_on = not job.cancelled and work(job)
                has_answered = not (goes_on or job.cancelled)
            except BaseException as error:  # or whoever asks next would wait for ever
                self._pause.faults.note("a load failed", repr(error))
            with self._lock:
                self._current.discard(job)
                self._pause.returned(job)
                job.asked = None
                if has_answered:
                    self._pause.answered()
                # One behind a late call would wait with it.
                if goes_on and not self._closed and not self._pause.is_stuck:
                    self._found.append(job)
                else:
                    job.count = job.num_loaded  # if it gives some back, these alone come again
                    job.done = self._news = True
                self._changed.notify_all()

    def _pick(self, queue: deque[LoadJob]) -> LoadJob | None:
        """Take the next job of a thread from its queue; None if none can go on."""
        if queue is self._asked:
            return queue.popleft() if queue else None
        for job in sorted(queue, key=lambda one: one is not self._preferred):
            if job.cancelled or self._make_room(job):
                queue.remove(job)
                job.is_parked = False
                return job
        if not all(job.is_parked for job in queue):
            for job in queue:
                job.is_parked = True
            self._news = True
            self._changed.notify_all()
        return None

    def _make_room(self, job: LoadJob) -> bool:
        """True if more of a job may arrive. Others give blocks back for the one preferred."""
        is_preferred = job is self._preferred
        while self._nbytes and self._nbytes + _CHUNK_BYTES > self._max_bytes:
            others = self._holding - {job} if is_preferred else ()
            largest = max(others, key=lambda one: len(one.arrived), default=None)
            if largest is None or len(largest.arrived) == 1:  # it would look as if it had ended
                return is_preferred and not job.arrived
            self._give_back(largest)
        return True

    def _give_back(self, job: LoadJob) -> None:
        """Have the last block that arrived of a job loaded again later."""
        if job.done:
            job.done = False
            job.spent = 0.0
            self._found.append(job)
        self._nbytes -= job.arrived.pop().payload.nbytes
        job.num_loaded -= 1

    def _look_up(self, job: LoadJob) -> bool:
        job.limit = self._limit(len(job.names))
        job.asked = time.monotonic()
        found = self._store.find(job.names)
        job.note_answer()
        job.count = job.choose(found)
        job.limit = self._limit(job.count)
        return job.count > 0

    def _limit(self, blocks: int) -> float:
        """Seconds that the store may take for so many blocks."""
        seconds = self._compute(blocks)
        return _TRIAL + seconds if self.rate is None else max(_LEAST_WAIT, seconds)

    def _load(self, job: LoadJob) -> bool:
        """Load a job as far as there is room; True if there is more of it."""
        chunk: list[LoadedBlock] = []
        nbytes, waiting = 0, 0
        names = job.names[job.num_loaded : job.count]
        is_first, before = self.rate is None, job.spent
        goes_on, at = True, 0
        job.asked = time.monotonic()
        for at, block in enumerate(self._store.load(names), start=1):
            job.note_answer(time.monotonic())
            if job.cancelled:
                return False
            chunk.append(block)
            waiting += block.payload.nbytes
            self._block_bytes = block.payload.nbytes
            if is_first:
                job.limit = _TRIAL + self._compute(at)
            if job.spent > job.limit and at < len(names):
                self._note_slow(job, len(chunk))
                break
            if waiting >= _CHUNK_BYTES and at < len(names):
                job.note_answer()
                goes_on = self._hand_on(job, chunk, waiting)
                chunk, nbytes, waiting = [], nbytes + waiting, 0
                job.asked = time.monotonic()
                if not goes_on:
                    break
        job.note_answer()
        if chunk:
            self._hand_on(job, chunk, waiting)
        if nbytes + waiting:
            self._note_rate(at, nbytes + waiting, job.spent - before)
        return not (goes_on or job.cancelled)

    def _note_rate(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Note what came in so many seconds: in part, but at once where computing was faster."""
        rate = max(nbytes / max(seconds, 1e-9), _LEAST_RATE)
        if self.rate is None or (rate < self.rate and seconds > self._compute(blocks)):
            self.rate = rate
        else:
            self.rate += _WEIGHT * (rate - self.rate)

    def _hand_on(self, job: LoadJob, chunk: list[LoadedBlock], nbytes: int) -> bool:
        """Have blocks of so many bytes wait to be taken; True if the job may go on at once."""
        with self._lock:
            if job.cancelled:
                return False
            job.arrived.extend(chunk)
            job.num_loaded += len(chunk)
            self._holding.add(job)
            self._nbytes += nbytes
            self._news = True
            self._changed.notify_all()
            gives_way = self._preferred is not job and self._preferred in self._found
            return not gives_way and self._make_room(job)
