"""Saving off the engine's thread: offers are queued up to a number of bytes, and dropped beyond."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults
from headstart.tiers.guard import StoreChain, start_thread
from headstart.tiers.store import StoredBlock

__all__ = ["Saver"]

_BATCH_BLOCKS = 64
_BATCH_BYTES = 16 << 20
_REST = 15
_DRAIN_BYTES = 32 << 20  # saved, after which an empty queue returns its memory
_MOST_STORED = 1 << 14  # names that wait for `take_kept`


class Saver:
    """Saves what it is offered in a thread. Only `flush`, `drop` and `close` wait for it.

    num_dropped: blocks that were offered while the queue was full; they may be offered again.
    faults: counts what a store raises. drained: called when the queue is empty after many bytes,
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
        self._nbytes = 0
        self._is_busy = False
        self._is_closed = False
        self._rests = False
        self._num_waiting = 0  # callers that wait for all to be saved
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def has_room(self, nbytes: int) -> bool:
        """True if an offer of so many bytes would be accepted."""
        fits = not self._blocks or self._nbytes + nbytes <= self.max_bytes
        return fits and not self._is_closed

    def offer(self, blocks: Sequence[StoredBlock]) -> bool:
        """Queue blocks to be saved; return False, and drop all, if there is no room."""
        nbytes = _count_bytes(blocks)
        with self._changed:
            if not self.has_room(nbytes):
                self.num_dropped += len(blocks)
                return False
            self._blocks.extend(blocks)
            self._nbytes += nbytes
            self._wake()
        return True

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Note that blocks of the store were of use."""
        with self._changed:
            if not self._is_closed:
                self._touched.update(dict.fromkeys(names))
                self._wake()

    @property
    def is_saving(self) -> bool:
        """True while something waits to be saved, or is being saved."""
        return bool(self._blocks or self._touched or self._is_busy)

    def take_kept(self) -> list[BlockHash]:
        """Return the blocks that the store was seen to have since the last call.

        They were saved, or were of use. The oldest are left out after a long time.
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

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, "headstart-saver")
        self._changed.notify_all()

    def _run(self) -> None:
        """Save batches until the saver is closed and its queue is empty."""
        unreturned = 0  # bytes saved since memory was returned
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._blocks or self._touched or self._is_closed)
                if not (self._blocks or self._touched):
                    return
                batch, touched = self._take_batch()
                self._is_busy = True
            began = time.monotonic()
            stored = touched
            try:
                stored = self._save(batch) + touched
                if touched:
                    self._stores.touch(touched)
            except BaseException as error:  # the next batch may succeed
                self._faults.note("blocks could not be saved", repr(error))
            nbytes = _count_bytes(batch)
            unreturned += nbytes
            del batch
            if unreturned >= _DRAIN_BYTES and not self._blocks:
                self._drained()
                unreturned = 0
            with self._changed:
                self._nbytes -= nbytes
                self._is_busy = False
                self._stored.extend(stored)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: not self._rests or self._num_waiting or self._is_closed,
                    _REST * (time.monotonic() - began) if self._rests else 0,
                )

    def _take_batch(self) -> tuple[list[StoredBlock], list[BlockHash]]:
        batch: list[StoredBlock] = []
        nbytes = 0
        while self._blocks and len(batch) < _BATCH_BLOCKS and nbytes < _BATCH_BYTES:
            batch.append(self._blocks.popleft())
            nbytes += memoryview(batch[-1].payload).nbytes
        touched = list(self._touched)
        self._touched.clear()
        return batch, touched

    def _save(self, batch: Sequence[StoredBlock]) -> list[BlockHash]:
        """Save blocks; return the names of those that the store has then."""
        names = [block.name for block in batch]
        count = self._stores.save(batch) if batch else 0
        self.num_saved += count
        if count == len(names):
            return names
        stored: list[BlockHash] = []
        while names:  # the store may have had some, or have no room
            found = self._stores.find(names)
            stored += names[:found]
            names = names[found + 1 :]
        return stored

    def flush(self, timeout: float) -> bool:
        """Wait until all is saved; return False if that takes longer than so many seconds."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            until = time.monotonic() + timeout
            while self.is_saving and self._is_alive and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._num_waiting -= 1
            return not self.is_saving

    @property
    def _is_alive(self) -> bool:
        """True if the thread runs; False in a process that was forked."""
        return self._thread is not None and self._thread.is_alive()

    def drop(self, timeout: float) -> bool:
        """Forget what is queued, and wait for what is being saved; False if that takes longer."""
        with self._changed:
            self._forget_queued()
            is_idle = self._changed.wait_for(lambda: not self._is_busy, timeout)
            self._stored.clear()
            return is_idle

    def _forget_queued(self) -> None:
        self._nbytes -= _count_bytes(self._blocks)
        self._blocks.clear()
        self._touched.clear()

    def close(self, timeout: float) -> None:
        """Save what is queued, for so many seconds at most; then accept no more. Idempotent."""
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
