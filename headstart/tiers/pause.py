"""How long a store that failed is left alone."""

import threading
import time

from headstart.tiers.faults import Faults

__all__ = ["Pause"]

_FIRST = 5.0  # seconds after the first failure, and twice as long after each further one
_LONGEST = 300.0


class Pause:
    """Five seconds after a failure, then longer and longer, up to five minutes; an answer ends it.

    Every failure is a fault. For any thread.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._seconds = 0.0
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """True while the store is to be left alone."""
        return time.monotonic() < self._until

    def failed(self, kind: str, why: object) -> None:
        """The store failed: count and tell it, and leave the store alone from now on."""
        with self._lock:
            if not self.is_on:  # or calls that failed together would count as many failures
                self._seconds = min(2 * self._seconds, _LONGEST) or _FIRST
                self._until = time.monotonic() + self._seconds
            seconds = self._seconds
        self.faults.note(kind, f"{why}; the store is left alone for {seconds:.0f} s")

    def answered(self) -> None:
        """The store answered: the next pause is a short one."""
        with self._lock:
            self._seconds = 0.0
