"""When a store is left alone: for a while after a failure, and while a late call is in it."""

import threading
import time

from headstart.tiers.faults import Faults

__all__ = ["Pause"]

_FIRST = 5.0  # seconds after the first failure, and twice as long after each further one
_LONGEST = 300.0


class Pause:
    """Five seconds after a failure, and twice as long after each further one, up to five minutes.

    An answer makes the next pause short again, and ends none. A call that does not return in time
    has the store left alone until it does, however long that is. One for each store, shared by all
    who ask it. Every failure is a fault. For any thread.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._seconds = 0.0
        self._until = 0.0
        self._late: set[object] = set()
        self._lock = threading.RLock()  # not the condition: Ctrl-C in its `__exit__` would keep it
        self._changed = threading.Condition(self._lock)

    @property
    def is_on(self) -> bool:
        """True while the store is to be left alone."""
        return time.monotonic() < self._until or self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """True while a call that was late has not returned."""
        return bool(self._late)

    def late(self, call: object) -> None:
        """Nobody waits for this call any more, and it has not returned."""
        with self._lock:
            self._late.add(call)

    def returned(self, call: object) -> None:
        """This call has returned, whether it was late or not."""
        with self._lock:
            self._late.discard(call)
            self._changed.notify_all()

    def wait_for_late(self) -> None:
        """Wait until every call that was late has returned, however long that takes."""
        with self._lock:
            self._changed.wait_for(lambda: not self._late)

    def failed(self, kind: str, why: object) -> None:
        """The store failed: count and tell it, and leave the store alone from now on."""
        with self._lock:
            # Calls that failed together count as one failure.
            if time.monotonic() >= self._until:
                self._seconds = min(2 * self._seconds, _LONGEST) or _FIRST
                self._until = time.monotonic() + self._seconds
            seconds = self._seconds
        self.faults.note(kind, f"{why}; the store is left alone for {seconds:.0f} s")

    def answered(self) -> None:
        """The store answered: the next pause is a short one."""
        with self._lock:
            self._seconds = 0.0
