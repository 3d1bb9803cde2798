"""Faults of a store: counted, and logged at most once a minute for each kind."""

import logging
import time
from collections import Counter

__all__ = ["SILENT", "SLOW", "Faults"]

_LOG = logging.getLogger("headstart.tiers")
_PAUSE = 60.0  # seconds between two lines about the same kind of fault

SILENT = "it does not answer"
SLOW = "loading is slower than computing"
"""Kinds of what `Loader` and `DeadlineStore` find of any store."""


class Faults:
    """Counts faults by kind. A fault costs a miss, never an error.

    num_unsaved: blocks that were to be saved while the store failed, or was left alone.
    """

    def __init__(self, where: str) -> None:
        self.counts: Counter[str] = Counter()
        self.num_unsaved = 0
        self._where = where
        self._told: dict[str, float] = {}

    def note(self, kind: str, what: object) -> None:
        """Count a fault, and log it unless one of its kind was logged within a minute."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._told.get(kind, -_PAUSE) >= _PAUSE:
            self._told[kind] = now
            _LOG.warning(
                "%s: %s: %s (%d so far; what cannot be loaded is computed)",
                self._where,
                kind,
                what,
                self.counts[kind],
            )
