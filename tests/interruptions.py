"""Interrupting code at any of its lines, as Ctrl-C may."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

__all__ = ["Interruption", "interrupted_at"]


class Interruption(BaseException):
    """Stands for Ctrl-C, and is raised by nobody else."""


@contextmanager
def interrupted_at(number: int, *modules: ModuleType) -> Iterator[list[int]]:
    """Raise Interruption at the `number`-th line of these modules that is executed, from 1 on.

    Gives a list that holds the line once it was raised.
    """
    files = {module.__file__ for module in modules}
    left = number
    raised: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and not raised:
            left -= 1
            if left == 0:
                raised.append(frame.f_lineno)
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)
