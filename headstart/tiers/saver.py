"""Saving off the engine's thread: offers are queued up to a number of bytes, and dropped beyond."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults
from headstart.tiers.store import BlockStore, StoredBlock

__all__ = ["Saver"]

_BATCH_BLOCKS = 64
_BATCH_BYTES = 16 << 20
_REST = 15
_MUCH = 32 << 20  # bytes saved, after which an empty queue returns its memory
_MOST_KEPT = 1 << 14  # names for whoever asks what the store has


class Saver:
    """Saves what it is offered, in a thread of its own. Nothing here waits but `flush`.

    num_dropped: blocks that were offered while the queue was full. Whoever offers keeps count of
    nothing: a block that is dropped may be offered again. faults: where what a store raises is
    noted, though none is to.

    While an engine computes on the cores that saving needs, `rest` has it rest for `_REST` times as
    long as it worked. drained: called when the queue is empty after many bytes, whose memory is
    free now.
    """

    def __init__(
        self,
        store: BlockStore,
        max_bytes: int,
        faults: Faults,
        drained: Callable[[], object] = lambda: None,
    ) -> None:
        self.num_saved = 0
        self.num_dropped = 0
        self._store = store
        self._faults = faults
        self._drained = drained
        self.max_bytes = max_bytes
        self._blocks: deque[StoredBlock] = deque()
        self._touched: dict[BlockHash, None] = {}
        self._kept: deque[BlockHash] = deque(maxlen=_MOST_KEPT)
        self._nbytes = 0
        self._busy = False
        self._closed = False
        self._rests = False
        self._hurried = 0  # callers that wait for all to be saved
        self._lock = threading.RLock()  # not the condition: Ctrl-C in its `__exit__` would keep it
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._process = 0  # that the thread is of
        self._has_gone = False

    def has_room(self, nbytes: int) -> bool:
        """True if an offer of so many bytes would be taken."""
        return not self._closed and (not self._blocks or self._nbytes + nbytes <= self.max_bytes)

    def offer(self, blocks: Sequence[StoredBlock]) -> bool:
        """Queue blocks to be saved; False, and all are dropped, if there is no room."""
        nbytes = sum(memoryview(block.payload).nbytes for block in blocks)
        with self._lock:
            if not self.has_room(nbytes):
                self.num_dropped += len(blocks)
                return False
            self._blocks.extend(blocks)
            self._nbytes += nbytes
            self._wake()
        return True

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Note that blocks of the store were of use."""
        with self._lock:
            if not self._closed:
                self._touched.update(dict.fromkeys(names))
                self._wake()

    @property
    def is_saving(self) -> bool:
        """True while something waits to be saved, or is being saved."""
        with self._lock:
            return self._runs and bool(self._blocks or self._touched or self._busy)

    def take_kept(self) -> list[BlockHash]:
        """Blocks that the store was seen to have since the last call: saved, or of use.

        The oldest are left out if it is long ago.
        """
        with self._lock:
            kept = list(self._kept)
            self._kept.clear()
        return kept

    def rest(self, on: bool) -> None:
        """Leave the cores to others for most of the time from now on, or no longer."""
        if on is not self._rests:
            with self._lock:
                self._rests = on
                self._changed.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="headstart-saver", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has no more threads: the next offer tries again
                return
            self._thread, self._process = thread, os.getpid()
        self._changed.notify_all()

    @property
    def _runs(self) -> bool:
        """True while the thread runs; it does not in a process that was forked.

        After a Ctrl-C within `Thread.is_alive` Python 3.11 says False of a thread that runs.
        """
        return not self._has_gone and self._process == os.getpid()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._has_gone = True

    def _work(self) -> None:
        nbytes = 0  # saved since memory was returned
        while True:
            with self._lock:
                while not (self._blocks or self._touched or self._closed):
                    self._changed.wait()
                if not (self._blocks or self._touched):
                    return
                batch, touched = self._take_batch()
                self._busy = True
            began = time.monotonic()
            kept = touched  # they were loaded from there
            try:
                if batch:
                    kept = self._save(batch) + touched
                if touched:
                    self._store.touch(touched)
            except BaseException as error:  # or nothing would be saved from now on
                self._faults.note("blocks could not be saved", repr(error))
            size = sum(memoryview(block.payload).nbytes for block in batch)
            nbytes += size
            del batch
            if nbytes >= _MUCH and not self._blocks:
                self._drained()
                nbytes = 0
            with self._lock:
                self._nbytes -= size
                self._busy = False
                self._kept.extend(kept)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: not self._rests or self._hurried or self._closed,
                    _REST * (time.monotonic() - began) if self._rests else 0,
                )

    def _save(self, batch: Sequence[StoredBlock]) -> list[BlockHash]:
        """Save blocks; the names of those that the store has then."""
        count = self._store.save(batch)
        self.num_saved += count
        names = [block.name for block in batch]
        if count == len(names):
            return names
        kept: list[BlockHash] = []
        while names:  # it may have had some, or have no room
            found = self._store.find(names)
            kept += names[:found]
            names = names[found + 1 :]
        return kept

    def _take_batch(self) -> tuple[list[StoredBlock], list[BlockHash]]:
        batch: list[StoredBlock] = []
        nbytes = 0
        while self._blocks and len(batch) < _BATCH_BLOCKS and nbytes < _BATCH_BYTES:
            batch.append(self._blocks.popleft())
            nbytes += memoryview(batch[-1].payload).nbytes
        touched = list(self._touched)
        self._touched.clear()
        return batch, touched

    def flush(self, timeout: float) -> bool:
        """Wait until all is saved; False if that takes longer than so many seconds."""
        until = time.monotonic() + timeout
        with self._lock:
            self._hurried += 1
            self._changed.notify_all()
            try:
                while self._blocks or self._touched or self._busy:
                    left = until - time.monotonic()
                    if left <= 0 or not self._runs:
                        return False
                    self._changed.wait(left)
            finally:
                self._hurried -= 1
        return True

    def drop(self, timeout: float) -> bool:
        """Forget what is queued, and wait for what is being saved; False if that takes longer."""
        with self._lock:
            self._forget_queued()
            is_idle = self._changed.wait_for(lambda: not self._busy, timeout)
            self._kept.clear()
            return is_idle

    def _forget_queued(self) -> None:
        self._nbytes -= sum(memoryview(block.payload).nbytes for block in self._blocks)
        self._blocks.clear()
        self._touched.clear()

    def close(self, timeout: float) -> None:
        """Save what is queued, for so many seconds at the most; then take no more. Idempotent."""
        until = time.monotonic() + timeout
        self.flush(timeout)
        with self._lock:
            self._closed = True
            self.num_dropped += len(self._blocks)
            self._forget_queued()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until - time.monotonic()))
