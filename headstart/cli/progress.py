"""One line on stderr that says what a user waits for: a model, or a long prompt.

It is drawn in terminals alone, and gone when the wait is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headstart.cli.reply_metrics import duration

if TYPE_CHECKING:
    from headstart.engine.streams import PromptProgress, RequestStream

_PATIENCE = 0.3  # seconds before a line appears: shorter waits need none


@contextmanager
def waiting(describe: Callable[[float], str]) -> Iterator[None]:
    """Show what `describe` makes of the seconds since now, until the block is left."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    start = time.perf_counter()

    def line() -> Text:
        elapsed = time.perf_counter() - start
        text = describe(elapsed) if elapsed >= _PATIENCE else ""
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

    with Live(get_renderable=line, console=console, transient=True, redirect_stdout=False):
        yield


def describe_loading(name: str, size: int | None) -> Callable[[float], str]:
    """For `waiting`: a model of so many bytes of weights is loaded."""
    weights = "" if size is None else f", {show_bytes(size)} of weights"
    return lambda elapsed: f"loading {name}{weights}: {duration(elapsed)}"


def describe_reading(stream: RequestStream) -> Callable[[float], str]:
    """For `waiting`: the prompt of a request is read."""
    return lambda elapsed: reading_line(stream.progress(), elapsed)


def reading_line(progress: PromptProgress, elapsed: float) -> str:
    """How far a prompt is read, and how long the rest takes at the rate so far.

    >>> from headstart.engine.streams import PromptProgress
    >>> reading_line(PromptProgress(total=7644, read=6600, cached=5600), 2.0)
    'read 6,600 of 7,644 tokens, 5,600 of them cached; 2.09 s to go'
    >>> reading_line(PromptProgress(total=7644, read=0, cached=0), 2.0)
    'reading 7,644 tokens'
    """
    total, read, cached = progress
    if not read:
        return f"reading {total:,} tokens"
    line = f"read {read:,} of {total:,} tokens, {cached:,} of them cached"
    if read == cached:
        return line
    return f"{line}; {duration(elapsed / (read - cached) * (total - read))} to go"


def show_bytes(size: float) -> str:
    """A size in the unit that leaves one to three digits before the point.

    >>> show_bytes(999), show_bytes(3_087_467_144)
    ('999 B', '3.1 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
