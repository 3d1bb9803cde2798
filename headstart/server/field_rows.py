"""Rows of names in requests: those that work, have no effect, or must ask for nothing.

works      the name does here what it does in vLLM or OpenAI's API
accepted   any value is taken, and has no effect
refused    only values that ask for nothing are taken; the note says what to do instead
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple

from headstart.errors import HeadstartError
from headstart.validation import describe

__all__ = ["JsonNames", "Row", "Verdict", "accepted", "refused", "works"]

_FEW = 10  # names that an error lists
_LONGEST = 100  # of names that are compared with others: the time grows with both


class Verdict(Enum):
    """The treatment of a name."""

    WORKS = "works"
    ACCEPTED = "accepted, nothing to do here"
    REFUSED = "refused"


class Row(NamedTuple):
    """A name's verdict and a note; `allowed` values are not refused."""

    verdict: Verdict
    note: str = ""
    allowed: tuple[Any, ...] = ()


def works(rows: Mapping[str, str]) -> dict[str, Row]:
    """Make rows of names that work, each with its note."""
    return {name: Row(Verdict.WORKS, note) for name, note in rows.items()}


def accepted(rows: Mapping[str, Sequence[str]]) -> dict[str, Row]:
    """Make rows of names without effect, by the reason."""
    return {name: Row(Verdict.ACCEPTED, note) for note, names in rows.items() for name in names}


def refused(rows: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, Row]:
    """Make rows of names that are refused, by what to do instead; None is always allowed."""
    return {
        name: Row(Verdict.REFUSED, note, allowed)
        for note, names in rows.items()
        for name, allowed in names.items()
    }


class JsonNames:
    """The names that an object of JSON may have: rows, and `own` fields of the body."""

    def __init__(
        self,
        owner: str,
        rows: Mapping[str, Row],
        error: type[HeadstartError],
        own: Iterable[str] = (),
    ) -> None:
        self.owner = owner
        self.rows = rows
        self._error = error
        self.own = frozenset(own)

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that count. Raises the table's error for a wrong name or value."""
        return {name: value for name, value in given.items() if self._counts(name, value)}

    def _counts(self, name: str, value: object) -> bool:
        row = self.rows.get(name)
        if name in self.own or (row is not None and row.verdict is Verdict.WORKS):
            return True
        if row is None:
            raise self._error(f"{self.owner} knows no {name!r}{self.hint(name)}")
        if row.verdict is Verdict.ACCEPTED or value is None or _is_in(value, row.allowed):
            return False
        allowed = ", ".join(dict.fromkeys(map(json.dumps, (None, *row.allowed))))
        raise self._error(f"{name} is {_describe(value)}; allowed: {allowed}; {row.note}")

    def knows(self, name: str) -> bool:
        """Return True if there is such a name, whatever its verdict."""
        return name in self.own or name in self.rows

    def hint(self, name: str) -> str:
        """Return the name that was meant, or all if they are few; empty otherwise."""
        if len(name) > _LONGEST:
            return ""
        near = get_close_matches(name, [*self.own, *self.rows], 1, 0.8)
        if near:
            row = self.rows.get(near[0]) if near[0] not in self.own else None
            if row is not None and row.verdict is Verdict.REFUSED:
                return f", and refuses {near[0]}: {row.note}"
            return f"; the nearest is {near[0]}"
        names = [one for one, row in self.rows.items() if row.verdict is not Verdict.REFUSED]
        names += sorted(self.own - self.rows.keys())
        return f"; it has {', '.join(names)}" if 0 < len(names) <= _FEW else ""


def _describe(value: object) -> str:
    """Show a value, but for what may be a prompt's text, which belongs into no log."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return describe(value)
    return "a text" if isinstance(value, str) else "a list or an object"


def _is_in(value: object, allowed: tuple[Any, ...]) -> bool:
    """Return True if a value is one of these, by its type too: False is not 0."""
    return any(type(value) is type(one) and value == one for one in allowed) or (
        isinstance(value, float) and value in [one for one in allowed if type(one) is int]
    )
