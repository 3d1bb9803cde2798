"""The terminal's streams, whatever the locale: what cannot be shown or read is no traceback.

Under the C locale, or with PYTHONIOENCODING=latin-1, Python cannot write most characters and
reads bytes that it does not understand as half surrogates.
"""

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

import click

from headstart.errors import RequestError

if sys.platform != "win32":
    import termios

# Spaces that stand neither behind a comma nor behind a middle dot, and what keeps words together.
_BETWEEN_WORDS = re.compile(r"(?<![,\N{MIDDLE DOT}]) ")
_GLUE = "\N{NO-BREAK SPACE}"

__all__ = [
    "as_typed",
    "columns_of",
    "hiding_typed",
    "keeping_typed",
    "note",
    "prepare_streams",
    "reading_stdin",
    "show_field",
    "tell_error",
]


def prepare_streams() -> None:
    """Have stdout and stderr show ? for what they cannot encode; stdin refuses what is no text.

    An ASCII stdin is read as UTF-8, as files are. One that was closed is empty, and what goes to
    closed ones is lost.
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
    """An argument of the command line as UTF-8, whatever the locale took it for.

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

    indent: what further lines begin with. in_parts: it is broken behind commas and dots alone.
    """
    if in_parts:
        text = _BETWEEN_WORDS.sub(_GLUE, text)
    click.secho(_fit(text, sys.stderr, indent).replace(_GLUE, " "), dim=True, err=True)


def tell_error(text: object) -> None:
    """Write what is wrong to stderr; in a terminal it is broken between words."""
    click.echo(_fit(f"headstart: {text}", sys.stderr), err=True)


def show_field(name: str, text: str, indent: int) -> None:
    """Write a name and what it is to stdout; what goes on in further lines is indented, too."""
    click.echo(_fit(f"{name:{indent}}{text}", sys.stdout, " " * indent))


def columns_of(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream is, None if it is none; the other may be a pipe."""
    if not stream.isatty():
        return None
    with suppress(OSError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _fit(text: str, stream: TextIO, indent: str = "") -> str:
    """The text in lines of the terminal's width; names and flags, which are copied, stay whole."""
    columns = columns_of(stream)
    if columns is None:
        return text
    wrap = partial(
        textwrap.wrap,
        width=max(columns, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join("\n".join(wrap(line)) for line in text.splitlines())


@contextmanager
def hiding_typed() -> Iterator[None]:
    """Have the terminal not show what is typed meanwhile; whoever reads the line next has it all.

    Shown, it would stand within what is printed, and move the lines that are drawn anew.
    """
    with _changed_terminal(lambda flags: flags & ~termios.ECHO):
        yield


@contextmanager
def keeping_typed() -> Iterator[None]:
    """Have the terminal keep what is typed before Ctrl-C; else Ctrl-C throws it away."""
    with _changed_terminal(lambda flags: flags | termios.NOFLSH):
        yield


@contextmanager
def _changed_terminal(change: Callable[[int], int]) -> Iterator[None]:
    """Other local flags for the terminal that is the keyboard, if there is one, meanwhile."""
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
    """Whether stdin is the terminal that stdout shows, and this process is the one that reads it.

    Any other that changed a terminal's settings would be stopped.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # a terminal, and not that of this session
        return False
