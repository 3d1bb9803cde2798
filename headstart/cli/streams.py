"""The terminal's streams in any locale: text that cannot be shown or read is no traceback.

Under the C locale, or with PYTHONIOENCODING=latin-1, Python cannot write most characters, and reads
bytes that it cannot decode as lone surrogates.
"""

import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

import click

from headstart.errors import RequestError

if sys.platform != "win32":
    import termios

# Spaces behind neither a comma nor a middle dot, and the space that keeps words together.
_BETWEEN_WORDS = re.compile(r"(?<![,\N{MIDDLE DOT}]) ")
_GLUE = "\N{NO-BREAK SPACE}"


def prepare_streams() -> None:
    """Make stdout and stderr show ? for what they cannot encode, and stdin refuse what is no text.

    An ASCII stdin is read as UTF-8. Closed streams become empty ones.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        narrow = sys.stdin.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
        encoding = "utf-8" if narrow else sys.stdin.encoding
        sys.stdin.reconfigure(encoding=encoding, errors="strict")


@contextmanager
def reading_stdin() -> Iterator[None]:
    """Raise RequestError for bytes on stdin that are no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        encoding = error.encoding.upper()
        raise RequestError(f"stdin is not {encoding} text: {error.reason}") from error


def as_typed(argument: str) -> str:
    """Return an argument of the command line decoded as UTF-8 in any locale.

    Raises RequestError.

    >>> as_typed(b"caf\\xc3\\xa9".decode("ascii", "surrogateescape"))
    'café'
    """
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"a prompt is not UTF-8 text: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise RequestError(f"a prompt is no text: {error.reason}") from error


def note(text: str, indent: str = "", *, in_parts: bool = False) -> None:
    """Write a dim line to stderr; in a terminal it is broken between words.

    indent: begins further lines. in_parts: break behind commas and middle dots only.
    """
    if in_parts:
        text = _BETWEEN_WORDS.sub(_GLUE, text)
    click.secho(_fit(text, sys.stderr, indent).replace(_GLUE, " "), dim=True, err=True)


def tell_error(text: object) -> None:
    """Write an error to stderr; in a terminal it is broken between words."""
    click.echo(_fit(f"headstart: {text}", sys.stderr), err=True)


def show_field(name: str, text: str, indent: int) -> None:
    """Write a name and its text to stdout; further lines are indented, too."""
    click.echo(_fit(f"{name:{indent}}{text}", sys.stdout, " " * indent))


def columns_of(stream: TextIO) -> int | None:
    """Return the columns of a stream's terminal, None if it has none."""
    if not stream.isatty():
        return None
    with suppress(OSError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _fit(text: str, stream: TextIO, indent: str = "") -> str:
    """Break lines at the terminal's width; names and flags, which are copied, stay whole."""
    columns = columns_of(stream)
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(
        width=max(columns, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(wrapper.fill, text.splitlines()))


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], *signals: int) -> Iterator[None]:
    """Handle signals for a while; outside of the main thread they keep their handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals if is_main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def hiding_typed() -> Iterator[None]:
    """Stop the terminal's echo, which would disturb lines that are redrawn; input is not lost."""
    with _changed_terminal(lambda flags: flags & ~termios.ECHO):
        yield


@contextmanager
def keeping_typed() -> Iterator[None]:
    """Keep what is typed before Ctrl-C, which would discard it."""
    with _changed_terminal(lambda flags: flags | termios.NOFLSH):
        yield


@contextmanager
def _changed_terminal(change: Callable[[int], int]) -> Iterator[None]:
    """Change the local flags of the keyboard's terminal, if there is one, for a while."""
    if not _has_keyboard():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], change(before[3]), *before[4:]])
        yield
    finally:
        if _has_keyboard():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _has_keyboard() -> bool:
    """Return True if stdin and stdout are a terminal, and this process is in its foreground.

    A process in the background that changes a terminal's settings is stopped.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal of another session
        return False
