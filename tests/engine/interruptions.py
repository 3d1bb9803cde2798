"""Raises an exception at a chosen line of headstart, as Ctrl-C or a lack of memory may."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import headstart

_PACKAGE = str(Path(headstart.__file__).parent)

Line = tuple[str, int]


class Interruption:
    """Traces a call, line by line of headstart's own code; raises before line number `at`.

    Lines are counted as they are executed, from 0. `lines` are those that were. With
    `again_after` the same is raised once more so many lines later, wherever that is.
    """

    def __init__(
        self,
        error: BaseException | None = None,
        at: int | None = None,
        again_after: int | None = None,
    ) -> None:
        self.lines: list[Line] = []
        self._error = error
        self._stops = set() if at is None else {at}
        if at is not None and again_after is not None:
            self._stops.add(at + again_after)

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns; raises what it raises."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return function()
        finally:
            sys.settrace(before)

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """A trace function."""
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            number = len(self.lines)
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if number in self._stops and self._error is not None:
                raise self._error
        return self.trace


def first_and_last(lines: list[Line]) -> list[int]:
    """Indices at which each line is executed for the first and for the last time."""
    first: dict[Line, int] = {}
    last: dict[Line, int] = {}
    for at, line in enumerate(lines):
        first.setdefault(line, at)
        last[line] = at
    return sorted({*first.values(), *last.values()})
