"""Faults of a store: counted, logged at most once a minute for each kind, followed by a pause."""

import logging
import time
from collections import Counter

__all__ = ["SILENT", "SLOW", "Faults", "Pause"]

_LOG = logging.getLogger("headstart.tiers")
_BETWEEN_LINES = 60.0  # seconds between two lines about the same kind of fault
_FIRST = 5.0  # seconds of a pause after the first failure
_LONGEST = 300.0

SILENT = "it does not answer"
SLOW = "loading is slower than computing"
"""The kinds of fault that `GuardedStore` finds of any store."""


class Faults:
    """Counts faults by kind. A fault costs a miss, never an error.

    num_unsaved: blocks that could not be saved because the store failed or was left alone.
    """

    def __init__(self, store: str) -> None:
        self.counts: Counter[str] = Counter()
        self.num_unsaved = 0
        self._store = store
        self._logged: dict[str, float] = {}

    def note(self, kind: str, detail: object) -> None:
        """Count a fault, and log it unless one of its kind was logged within a minute."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -_BETWEEN_LINES) >= _BETWEEN_LINES:
            self._logged[kind] = now
            _LOG.warning(
                "%s: %s: %s (%d so far; what cannot be loaded is computed)",
                self._store,
                kind,
                detail,
                self.counts[kind],
            )


class Pause:
    """The time for which a store is left alone after a failure.

    Five seconds, and twice as long after each further failure, up to five minutes. An answer makes
    the next pause short again, and does not end the current one.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._seconds = 0.0
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """True while the store is to be left alone."""
        return time.monotonic() < self._until

    def failed(self, kind: str, detail: object) -> None:
        """Count a failure, and leave the store alone from now on."""
        if not self.is_on:  # calls that failed together count as one failure
            self._seconds = min(2 * self._seconds, _LONGEST) or _FIRST
            self._until = time.monotonic() + self._seconds
        self.faults.note(kind, f"{detail}; the store is left alone for {self._seconds:.0f} s")

    def answered(self) -> None:
        """Make the next pause a short one."""
        self._seconds = 0.0
