"""A store that is late is a miss: nobody waits for a server or a disk that does not answer.

Every call runs in a thread of its own, since neither a file nor a name server can be asked with a
time limit. A thread that is late is left to itself; the store is asked again once it has returned.
That costs some changes of threads, which take milliseconds beside an engine that computes: the
blocks of prompts come through `Loader`, whose threads are there anyway.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from headstart.cache import BlockHash
from headstart.tiers.pause import Pause
from headstart.tiers.store import BlockStore, LoadedBlock, StoredBlock

__all__ = ["DEADLINE", "DeadlineStore"]

DEADLINE = 5.0  # seconds for an answer, and for each block of a load
_AHEAD = 8  # blocks that are read before they are asked for

T = TypeVar("T")


class DeadlineStore:
    """Another store, of which no answer takes longer than a deadline; a `BlockStore`.

    A late answer is a miss and a failure. The store is left alone while `pause` is on, which is a
    miss as well, and until the late call has returned. `save` and `touch` have no deadline: the
    saver's thread alone waits for them.
    """

    def __init__(self, store: BlockStore, pause: Pause) -> None:
        self._store = store
        self._pause = pause
        self._late: list[_Call[Any]] = []
        self._lock = threading.Lock()  # of those

    @property
    def tier(self) -> str:
        """The other store's."""
        return self._store.tier

    def find(self, names: Sequence[BlockHash]) -> int:
        return next(self._ask(lambda: iter([self._store.find(names)])), 0)

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        return self._ask(lambda: self._store.load(names))

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        return 0 if self._is_left_alone else self._store.save(blocks)

    def touch(self, names: Sequence[BlockHash]) -> None:
        if not self._is_left_alone:
            self._store.touch(names)

    def clear(self) -> bool:
        return next(self._ask(lambda: iter([self._store.clear()])), False)

    def close(self) -> None:
        if not self._is_stuck:  # or it would wait for the late call
            for _ in self._within(lambda: _after(self._store.close)):
                pass

    @property
    def _is_stuck(self) -> bool:
        with self._lock:
            self._late = [call for call in self._late if not call.is_done]
            return bool(self._late)

    @property
    def _is_left_alone(self) -> bool:
        return self._pause.is_on or self._is_stuck

    def _ask(self, work: Callable[[], Iterable[T]]) -> Iterator[T]:
        """The answers, unless the store is left alone."""
        return iter(()) if self._is_left_alone else self._within(work)

    def _within(self, work: Callable[[], Iterable[T]]) -> Iterator[T]:
        """The answers up to the first that is late."""
        call = _Call(work)
        if not call.start():
            return
        try:
            while answers := call.take(DEADLINE):
                yield from answers
            if call.is_done:
                self._pause.answered()
            else:
                with self._lock:
                    self._late.append(call)
                self._pause.failed("it does not answer", f"not within {DEADLINE:g} s")
        finally:
            call.leave()


def _after(action: Callable[[], None]) -> Iterator[bool]:
    """One answer, once something is done."""
    action()
    yield True


class _Call(Generic[T]):
    """One call of a store, in a thread that is a few answers ahead of whoever takes them."""

    def __init__(self, work: Callable[[], Iterable[T]]) -> None:
        self.is_done = False
        self._work = work
        self._answers: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_wanted = True
        self._changed = threading.Condition()

    def start(self) -> bool:
        """Begin; False if the machine has no more threads."""
        try:
            threading.Thread(target=self._run, name="headstart-store", daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        try:
            for answer in self._work():
                with self._changed:
                    self._answers.append(answer)
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: len(self._answers) < _AHEAD or not self._is_wanted
                    )
                    if not self._is_wanted:
                        break
        except BaseException as error:  # of any kind: whoever waits is to have it
            self._error = error
        with self._changed:
            self.is_done = True
            self._changed.notify_all()

    def take(self, seconds: float) -> list[T]:
        """The answers that are there, at least one; none if it is over, or late.

        Raises what the store raised, though none is to.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self.is_done, seconds)
            taken = list(self._answers)
            self._answers.clear()
            self._changed.notify_all()
        if not taken and self._error is not None:
            raise self._error
        return taken

    def leave(self) -> None:
        """Nobody wants the rest."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()
