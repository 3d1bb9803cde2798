"""Exceptions at any line of headstart's code, as by Ctrl-C or a lack of memory."""

import gc
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

import headstart

__all__ = ["Interrupted", "Interruption", "Line", "points"]

Line = tuple[str, int]
"""A file and a line number."""

Tracer = Callable[[FrameType, str, object], object]


class Interrupted(BaseException):
    """A stand-in for Ctrl-C that only these tests raise."""


class Interruption:
    """Raises `error` before the line with number `at`, from 0 on, that runs inside it.

    Without an error, it only records the places of all executed lines in `lines`. `within`: the
    modules whose lines count, including submodules of packages. The garbage collector is
    disabled, as objects of earlier tests could run finalizers in these lines.
    """

    def __init__(
        self, at: int = -1, error: BaseException | None = None, *within: ModuleType
    ) -> None:
        self.lines: list[Line] = []
        self._raised: list[BaseException] = []
        if error is not None:
            self.line = _countdown(at, error, self._raised)  # type: ignore[method-assign]
        self._tracers = _Tracers(self.line, tuple(map(_files, within or (headstart,))))
        self._before: Tracer | None = None
        self._collects = True

    @property
    def raised(self) -> bool:
        """True once the chosen number of lines has run."""
        return bool(self._raised)

    def __enter__(self) -> "Interruption":
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(self.trace)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)  # type: ignore[arg-type]
        if self._collects:
            gc.enable()

    def trace(self, frame: FrameType, event: str, arg: object) -> Tracer | None:
        """Trace calls; install it in other threads than the one that enters."""
        return self._tracers[frame.f_code.co_filename]

    def line(self, frame: FrameType, event: str, arg: object) -> Tracer:
        """Trace the lines of a frame that count."""
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return self.line


class _Tracers(dict[str, Tracer | None]):
    """The trace function for frames of each file: `line` for counted files, else None."""

    def __init__(self, line: Tracer, files: tuple[str, ...]) -> None:
        self._line = line
        self._files = files

    def __missing__(self, file: str) -> Tracer | None:
        self[file] = self._line if file.startswith(self._files) else None
        return self[file]


def _countdown(at: int, error: BaseException, raised: list[BaseException]) -> Tracer:
    """Return a trace function that raises at line `at`. It runs at every line and must be fast."""
    left = at

    def line(frame: FrameType, event: str, arg: object) -> Tracer:
        nonlocal left
        if event == "line":
            left -= 1
            if left == -1:
                raised.append(error)
                raise error
        return line

    return line


@cache
def _files(module: ModuleType) -> str:
    """Return the prefix of the paths of the module's files."""
    assert module.__file__ is not None
    path = Path(module.__file__)
    return str(path.parent) if path.name == "__init__.py" else str(path)


def points(lines: list[Line], stride: int | None = None) -> list[int]:
    """Return the first and last execution of each line, and a sample of the others."""
    times: dict[Line, list[int]] = {}
    for i, line in enumerate(lines):
        times.setdefault(line, []).append(i)
    chosen = {i for all_times in times.values() for i in (all_times[0], all_times[-1])}
    return sorted(chosen | set(range(0, len(lines), stride or len(lines))))
