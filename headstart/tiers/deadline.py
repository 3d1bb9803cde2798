"""A store that is late is a miss: nobody waits for a server or a disk that does not answer.

Every call runs in a thread of its own, since neither a file nor a name server can be asked with a
time limit. A thread that is late is left to itself; the store is asked again once it has returned.
That costs some changes of threads, which take milliseconds beside an engine that computes: the
blocks of prompts come through `Loader`, whose threads are there anyway.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from headstart.cache import BlockHash
from headstart.tiers.faults import SILENT, Faults
from headstart.tiers.pause import Pause
from headstart.tiers.store import BlockStore, LoadedBlock, StoredBlock

__all__ = ["DEADLINE", "DeadlineStore"]

DEADLINE = 5.0  # seconds for an answer, and for each block of a load
_CLEARING = 60.0  # seconds for forgetting all blocks, of which there may be very many
_AHEAD = 8  # blocks that are read before they are asked for

T = TypeVar("T")


class DeadlineStore:
    """Another store, of which no answer takes longer than a deadline; a `BlockStore`.

    pause: its own, over the store's faults; no other tier is left alone when this one is late.

    A late answer is a miss and a failure. The store is left alone while `pause` is on, which is a
    miss as well, and until the late call has returned. `save` and `touch` have no deadline: the
    saver's thread alone waits for them.
    """

    def __init__(self, store: BlockStore, pause: Pause) -> None:
        self.pause = pause
        self._store = store

    @property
    def tier(self) -> str:
        """The other store's."""
        return self._store.tier

    @property
    def faults(self) -> Faults:
        """The other store's, and those of its pause."""
        return self.pause.faults

    @property
    def num_kept(self) -> int:
        """The other store's."""
        return self._store.num_kept

    @property
    def block_seconds(self) -> float:
        """The other store's."""
        return self._store.block_seconds

    def find(self, names: Sequence[BlockHash]) -> int:
        return next(self._ask(lambda: iter([self._store.find(names)])), 0)

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        return self._ask(lambda: self._store.load(names))

    def together(self, work: Callable[[BlockStore], T]) -> T | None:
        """The result of `work`, which calls the other store; None if all of it is late."""
        return next(self._ask(lambda: iter([work(self._store)])), None)

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        if not self.pause.is_on:
            return self._store.save(blocks)
        self.faults.num_unsaved += len(blocks)
        return 0

    def touch(self, names: Sequence[BlockHash]) -> None:
        if not self.pause.is_on:
            self._store.touch(names)

    def clear(self) -> bool:
        return next(self._ask(lambda: iter([self._store.clear()]), _CLEARING), False)

    def close(self, timeout: float = DEADLINE) -> None:
        """Close the store, or have it closed once the late calls in it have returned."""
        thread = threading.Thread(target=self._close, name="headstart-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no more threads: the process's end closes it
            return
        thread.join(timeout)

    def _close(self) -> None:
        self.pause.wait_for_late()
        self._store.close()

    def _ask(self, work: Callable[[], Iterable[T]], seconds: float | None = None) -> Iterator[T]:
        """The answers up to the first that is late; none if the store is left alone.

        seconds: for each answer; `DEADLINE` unless given.
        """
        if self.pause.is_on:
            return
        seconds = DEADLINE if seconds is None else seconds
        call = _Call(work, self.pause)
        waits = True
        try:
            if not call.start():
                return
            while answers := call.take(seconds):
                waits = False
                yield from answers
                waits = True
            if call.is_done:
                self.pause.answered()
            else:
                self.pause.failed(SILENT, f"not within {seconds:g} s")
        finally:  # of whatever kind: Ctrl-C leaves the call in the store, too
            call.leave(is_late=waits)


class _Call(Generic[T]):
    """One call of a store, in a thread that is a few answers ahead of whoever takes them."""

    def __init__(self, work: Callable[[], Iterable[T]], pause: Pause) -> None:
        self.is_done = False
        self._work = work
        self._pause = pause
        self._answers: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_wanted = True
        self._has_begun = False
        self._lock = threading.RLock()  # not the condition: Ctrl-C in its `__exit__` would keep it
        self._changed = threading.Condition(self._lock)

    def start(self) -> bool:
        """Begin; False if the machine has no more threads."""
        try:
            threading.Thread(target=self._run, name="headstart-store", daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        with self._lock:
            if not self._is_wanted:
                return
            self._has_begun = True
        try:
            for answer in self._work():
                with self._lock:
                    self._answers.append(answer)
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: len(self._answers) < _AHEAD or not self._is_wanted
                    )
                    if not self._is_wanted:
                        break
        except BaseException as error:  # of any kind: whoever waits is to have it
            self._error = error
        with self._lock:
            self.is_done = True
            self._pause.returned(self)
            self._changed.notify_all()

    def take(self, seconds: float) -> list[T]:
        """The answers that are there, at least one; none if it is over, or late.

        Raises what the store raised, though none is to.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._answers or self.is_done, seconds)
            taken = list(self._answers)
            self._answers.clear()
            self._changed.notify_all()
        if not taken and self._error is not None:
            raise self._error
        return taken

    def leave(self, *, is_late: bool) -> None:
        """Nobody wants the rest. is_late: it was waited for, and the store may never answer."""
        with self._lock:
            self._is_wanted = False
            if is_late and self._has_begun and not self.is_done:
                self._pause.late(self)
            self._changed.notify_all()
