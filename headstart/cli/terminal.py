"""Input and output in a terminal of any locale and width: notes, errors, progress, metrics.

Under the C locale, or with PYTHONIOENCODING=latin-1, Python cannot write most characters, and reads
undecodable bytes as lone surrogates. This module prevents the tracebacks that would result.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from headstart.errors import RequestError
from headstart.imports import load_module

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.streams import RequestStream

if sys.platform != "win32":
    import termios

# Spaces that do not follow a comma or a middle dot.
_BETWEEN_WORDS = re.compile(r"(?<![,\N{MIDDLE DOT}]) ")
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
MAX_WIDTH = 80  # columns of a picture
_PROGRESS_DELAY = 0.3  # seconds before a progress line appears
_MIN_READ_SHARE = 0.02  # the speed is estimated after this share of the files was read
_SAMPLES = 256  # pages of each file in the sample


class OutputConsole(Console):
    """A console that raises BrokenPipeError. rich's console ends the program with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def prepare_streams() -> None:
    """Make stdout and stderr write ? for characters that they cannot encode; make stdin strict.

    A stdin in ASCII is read as UTF-8. Closed streams are replaced by empty streams.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = sys.stdin.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
        encoding = "utf-8" if is_ascii else sys.stdin.encoding
        sys.stdin.reconfigure(encoding=encoding, errors="strict")


@contextmanager
def reading_stdin() -> Iterator[None]:
    """Raise RequestError if stdin is not valid text."""
    try:
        yield
    except UnicodeDecodeError as error:
        encoding = error.encoding.upper()
        raise RequestError(f"stdin is not {encoding} text: {error.reason}") from error


def decode_argument(argument: str) -> str:
    r"""Return an argument of the command line decoded as UTF-8 in any locale.

    Raises RequestError.

    >>> decode_argument(b"caf\xc3\xa9".decode("ascii", "surrogateescape"))
    'café'
    """
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"an argument is not UTF-8 text: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise RequestError(f"an argument is not text: {error.reason}") from error


def note(text: str, indent: str = "", *, in_parts: bool = False) -> None:
    """Write a dim text to stderr, and break lines between words if stderr is a terminal.

    indent: prefix of all lines but the first. in_parts: break lines only after commas and middle
    dots.
    """
    if in_parts:
        text = _BETWEEN_WORDS.sub(_NO_BREAK_SPACE, text)
    click.secho(_fit(text, sys.stderr, indent).replace(_NO_BREAK_SPACE, " "), dim=True, err=True)


def show_error(text: object) -> None:
    """Write an error to stderr, and break lines between words if stderr is a terminal."""
    click.echo(_fit(f"headstart: {text}", sys.stderr), err=True)


def show_field(name: str, text: str, indent: int) -> None:
    """Write a name and its text to stdout. All lines of the text are indented."""
    click.echo(_fit(f"{name:{indent}}{text}", sys.stdout, " " * indent))


def columns_of(stream: TextIO) -> int | None:
    """Return the number of columns of a stream's terminal; None if it is not a terminal."""
    if not stream.isatty():
        return None
    with suppress(OSError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _fit(text: str, stream: TextIO, indent: str = "") -> str:
    """Break lines at the terminal's width, but not within names and flags, which users copy."""
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
    """Set a handler of signals within a context. Outside of the main thread, do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    old_handlers = {number: signal.signal(number, handler) for number in signals if is_main}
    try:
        yield
    finally:
        for number, previous in old_handlers.items():
            signal.signal(number, previous)


def without_echo() -> AbstractContextManager[None]:
    """Switch off the terminal's echo, which would disturb redrawn lines. Input is not lost."""
    return _changed_terminal(lambda flags: flags & ~termios.ECHO)


def preserving_input() -> AbstractContextManager[None]:
    """Keep the terminal from discarding typed input at Ctrl-C."""
    return _changed_terminal(lambda flags: flags | termios.NOFLSH)


@contextmanager
def _changed_terminal(change: Callable[[int], int]) -> Iterator[None]:
    """Change the local flags of the terminal of stdin within a context."""
    if not _has_keyboard():
        yield
        return
    old_settings = termios.tcgetattr(sys.stdin)
    try:
        termios.tcsetattr(
            sys.stdin,
            termios.TCSANOW,
            [*old_settings[:3], change(old_settings[3]), *old_settings[4:]],
        )
        yield
    finally:
        if _has_keyboard():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, old_settings)


def _has_keyboard() -> bool:
    """Return True if stdin and stdout are a terminal, and this process is in its foreground.

    A background process that changes a terminal's settings would be stopped.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # another session has the terminal
        return False


def duration(seconds: float | None) -> str:
    """Format seconds with about three digits and a unit; None as a dash.

    >>> duration(2.314), duration(0.3141), duration(0.03141), duration(None), duration(1593.84)
    ('2.31 s', '314 ms', '31.4 ms', '–', '26.6 min')
    """
    if seconds is None:
        return "–"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.09995 else f"{seconds * 1000:.1f} ms"


def _roughly(seconds: float) -> str:
    """Format seconds as an estimate.

    >>> _roughly(0.2), _roughly(59.8), _roughly(100)
    ('1 s', '60 s', '2 min')
    """
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"


def show_bytes(size: float) -> str:
    """Format a number of bytes in the unit that leaves one to three digits before the point.

    >>> show_bytes(999), show_bytes(3_087_467_144)
    ('999 B', '3.1 GB')
    """
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**power:.1f} {'KMGT'[power - 1]}B"


def count(number: int, noun: str) -> str:
    """Format a number and a noun, with an s for the plural.

    >>> count(1, "turn"), count(1200, "turn")
    ('1 turn', '1,200 turns')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def cached_share(output: RequestOutput) -> str:
    """Format the number of cached prompt tokens and their share of the prompt, rounded down."""
    percent = 100 * output.num_cached_tokens // len(output.prompt_token_ids)
    return f"{output.num_cached_tokens:,} ({percent}%)"


def figures(output: RequestOutput) -> str:
    """Return the line below a reply: numbers of tokens and cached tokens, and times."""
    metrics, end = output.metrics, output.outputs[0].finish_reason
    end = "interrupted" if end == "abort" else end
    if not output.outputs[0].text.strip():
        end = f"empty reply, {end}"
    loaded = "".join(f", {number:,} from {tier}" for tier, number in output.loaded_tokens.items())
    per_token = metrics.time_per_token  # None for a reply of one token
    pace = "" if per_token is None else f", then {duration(per_token)} each"
    if metrics.num_accepted_tokens:
        tokens = metrics.num_generation_tokens
        steps = max(1, tokens - metrics.num_accepted_tokens)
        pace += f", {tokens / steps:.1f} tokens a step"
    return (
        f"[prompt {len(output.prompt_token_ids):,} tokens, cached {cached_share(output)}{loaded} · "
        f"first token {duration(metrics.time_to_first_token)}{pace} · {end}]"
    )


def draw_svg(parts: Iterable[RenderableType], title: str) -> str:
    """Draw the parts of an output as an SVG that loads no fonts."""
    recorder = Console(record=True, width=MAX_WIDTH, file=io.StringIO(), highlight=False)
    for part in parts:
        recorder.print(part)
    svg = recorder.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, DejaVu Sans Mono")
    # Some viewers drop spaces at the ends of text and ignore textLength. So spaces are preserved,
    # and the font size gives letters of the same width as rich's font.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return svg.replace("font-size: 20px", "font-size: 20.27px")


@contextmanager
def waiting(message: str | Callable[[float], str]) -> Iterator[None]:
    """Show a progress line on stderr within a context, if stderr is a terminal.

    message: a string, which is followed by the time, or a function of the seconds since the start.
    """
    console = OutputConsole(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    start = time.perf_counter()

    def line() -> Text:
        elapsed = time.perf_counter() - start
        text = f"{message}: {duration(elapsed)}" if isinstance(message, str) else message(elapsed)
        return Text(text if elapsed >= _PROGRESS_DELAY else "", style="dim")

    live = Live(get_renderable=line, console=console, transient=True, redirect_stdout=False)
    with without_echo(), live:
        yield


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, if stderr is a terminal; yield a function to update it.

    The function takes the number of finished items and the number of all items.
    """
    console = OutputConsole(stderr=True, highlight=False)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class CachedShare:
    """An estimate of the share of files that is in the system's page cache."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Map the files. Raises OSError on a system without `mincore`."""
        try:
            self._mincore = ctypes.CDLL(None, use_errno=True).mincore
        except (AttributeError, TypeError) as error:  # Windows
            raise OSError("the system has no mincore") from error
        numpy = load_module("numpy")  # imported here: `headstart --help` must not load it
        self._maps = [numpy.memmap(file, numpy.uint8, mode="r") for file in files]

    def read(self) -> float:
        """Return the share, from 0 to 1, estimated from a sample of pages. Raises OSError."""
        state, cached = (ctypes.c_ubyte * 1)(), 0.0
        for content in self._maps:
            pages = range(0, content.size, mmap.PAGESIZE)
            sample = pages[:: max(1, len(pages) // _SAMPLES)]
            for offset in sample:
                address = ctypes.c_void_p(content.ctypes.data + offset)
                if self._mincore(address, ctypes.c_size_t(1), state):
                    raise OSError(ctypes.get_errno(), "mincore failed")
                cached += (state[0] & 1) * content.size / len(sample)
        return float(cached / sum(content.size for content in self._maps))


def describe_loading(name: str, files: Sequence[Path]) -> Callable[[float], str]:
    """Return a function for `waiting` while a model is loaded from its files of weights.

    While the files are read from disk, it returns the progress and the estimated time left.
    """
    size = sum(file.stat().st_size for file in files)
    try:
        cached = CachedShare(files) if size else None
        first = cached.read() if cached else 1.0
    except (OSError, ValueError):  # the system has no mincore, or the file is empty
        cached, first = None, 1.0
    began, share_before = 0.0, first  # when reading began, and the share that was cached then

    def describe(elapsed: float) -> str:
        nonlocal began, share_before
        share = 1.0
        if cached and first < 1:
            with suppress(OSError):
                share = cached.read()
        if share <= first + _MIN_READ_SHARE:  # modules are still being imported
            began, share_before = elapsed, share
        if share_before < share < 1:
            left = _roughly((elapsed - began) * (1 - share) / (share - share_before))
            read = f"read {show_bytes(share * size)} of {show_bytes(size)} of weights"
            return f"loading {name}: {read}; about {left} to go"
        weights = f", {show_bytes(size)} of weights" if size else ""
        return f"loading {name}{weights}: {duration(elapsed)}"

    return describe


def describe_reading(stream: RequestStream) -> Callable[[float], str]:
    """Return a function for `waiting` while the prompt of a request is computed.

    It returns the progress and the estimated time left. Before the first chunk and after the last,
    it returns the time since the start instead.
    """
    num_read, last = 0, 0.0  # the number of tokens so far, and the time of the last change

    def describe(elapsed: float) -> str:
        nonlocal num_read, last
        total, read, cached = stream.progress()
        if read != num_read:
            num_read, last = read, elapsed
        if not read:
            return f"reading {total:,} tokens: {duration(elapsed)}"
        line = f"read {read:,} of {total:,} tokens, {cached:,} of them cached"
        if read in (cached, total):
            return f"{line}: {duration(elapsed)}"
        left = last / (read - cached) * (total - cached) - elapsed
        return f"{line}; about {_roughly(left)} to go"

    return describe
