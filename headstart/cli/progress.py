"""One line on stderr that says what a user waits for: a model, or a long prompt.

It is drawn in terminals alone, and gone when the wait is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headstart.cli.reply_metrics import duration
from headstart.imports import load_module

if TYPE_CHECKING:
    from headstart.frontend.streams import PromptProgress, RequestStream

_PATIENCE = 0.3  # seconds before a line appears: shorter waits need none
_FEW = 0.02  # share of files that says nothing of how fast they are read: headers, some samples


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
        return Text(text, style="dim")

    with Live(get_renderable=line, console=console, transient=True, redirect_stdout=False):
        yield


def describe_loading(name: str, files: Sequence[Path]) -> Callable[[float], str]:
    """For `waiting`: a model is loaded from the files of its weights; none where they are wrong."""
    size = sum(file.stat().st_size for file in files)
    try:
        # It takes numpy, 0.1 s of imports that `headstart --help` does without.
        cached = load_module("headstart.cli.page_cache").CachedShare(files) if size else None
        first = cached.read() if cached else 1.0
    except (OSError, ValueError):  # a system that does not tell, or an empty file
        cached, first = None, 1.0

    began, at = 0.0, first  # when reading did, and what was in memory then

    def describe(elapsed: float) -> str:
        nonlocal began, at
        share = 1.0
        if cached and first < 1:
            with suppress(OSError):
                share = cached.read()
        if share <= first + _FEW:  # modules are imported
            began, at = elapsed, share
        return loading_line(name, size, (at, share), elapsed, began)

    return describe


def loading_line(
    name: str, size: int, cached: tuple[float, float], elapsed: float, began: float = 0.0
) -> str:
    """What is loaded; while its files are read from the disk, how far and how long still.

    cached: the shares that were in memory when reading began, and are now. began: when it did.

    >>> loading_line("a/model", 3_000_000_000, (0.0, 0.25), 2.0)
    'loading a/model: read 750.0 MB of 3.0 GB of weights; about 6 s to go'
    >>> loading_line("a/model", 3_000_000_000, (0.0, 1.0), 8.0)
    'loading a/model, 3.0 GB of weights: 8.00 s'
    """
    first, now = cached
    if not size:
        return f"loading {name}: {duration(elapsed)}"
    if now >= 1 or now <= first:
        return f"loading {name}, {show_bytes(size)} of weights: {duration(elapsed)}"
    left = _roughly((elapsed - began) * (1 - now) / (now - first))
    read = f"read {show_bytes(now * size)} of {show_bytes(size)} of weights"
    return f"loading {name}: {read}; about {left} to go"


def converting_line(name: str, elapsed: float) -> str:
    """A GGUF file's metadata become a configuration and a tokenizer.

    >>> converting_line("some.gguf", 12.0)
    'reading configuration and tokenizer of some.gguf: 12.00 s'
    """
    return f"reading configuration and tokenizer of {name}: {duration(elapsed)}"


def describe_check(doing: str) -> Callable[[float], str]:
    """For `waiting`: what is checked before the model is loaded.

    >>> describe_check("counting the tokens of the prompt")(2.0)
    'counting the tokens of the prompt: 2.00 s'
    """
    return lambda elapsed: f"{doing}: {duration(elapsed)}"


def starting_line(name: str, replicas: int, elapsed: float) -> str:
    """Ray and then replicas of a model start, in processes of their own.

    >>> starting_line("a/model", 1, 2.0), starting_line("a/model", 2, 12.0)
    ('starting 1 replica of a/model: 2.00 s', 'starting 2 replicas of a/model: 12.00 s')
    """
    count = "1 replica" if replicas == 1 else f"{replicas} replicas"
    return f"starting {count} of {name}: {duration(elapsed)}"


def describe_reading(stream: RequestStream) -> Callable[[float], str]:
    """For `waiting`: the prompt of a request is read."""
    read, at = 0, 0.0

    def describe(elapsed: float) -> str:
        nonlocal read, at
        progress = stream.progress()
        if progress.read != read:
            read, at = progress.read, elapsed
        return reading_line(progress, elapsed, at)

    return describe


def reading_line(progress: PromptProgress, elapsed: float, at: float) -> str:
    """Return how far a prompt is read, and the time that the rest takes at the rate so far.

    Before there is a rate, and after the last chunk, the time since the beginning stands instead.
    at: the seconds that the tokens read so far took.

    >>> from headstart.frontend.streams import PromptProgress
    >>> reading_line(PromptProgress(total=7644, read=6600, cached=5600), 2.5, 2.0)
    'read 6,600 of 7,644 tokens, 5,600 of them cached; about 2 s to go'
    >>> reading_line(PromptProgress(total=7644, read=0, cached=0), 2.0, 0.0)
    'reading 7,644 tokens: 2.00 s'
    >>> reading_line(PromptProgress(total=7644, read=7644, cached=5600), 2.5, 2.0)
    'read 7,644 of 7,644 tokens, 5,600 of them cached: 2.50 s'
    """
    total, read, cached = progress
    if not read:
        return f"reading {total:,} tokens: {duration(elapsed)}"
    line = f"read {read:,} of {total:,} tokens, {cached:,} of them cached"
    if read in (cached, total):
        return f"{line}: {duration(elapsed)}"
    return f"{line}; about {_roughly(at / (read - cached) * (total - cached) - elapsed)} to go"


def quantizing_line(done: int, layers: int, elapsed: float, at: float) -> str:
    """How far a model is quantised, and how long the rest takes at the rate so far.

    at: the seconds that the layers which are done took.

    >>> quantizing_line(0, 30, 1.0, 0.0), quantizing_line(10, 30, 21.0, 20.0)
    ('quantising 30 layers', 'quantised 10 of 30 layers; about 39 s to go')
    """
    if not done:
        return f"quantising {layers} layers"
    left = _roughly(at / done * layers - elapsed)
    return f"quantised {done} of {layers} layers; about {left} to go"


def describe_blank(elapsed: float) -> str:
    """For `waiting`: a reply begins with spaces and empty lines."""
    return f"the reply is empty so far: {duration(elapsed)}"


def _roughly(seconds: float) -> str:
    """How long something takes that is only estimated.

    >>> _roughly(0.2), _roughly(59.8), _roughly(100)
    ('1 s', '60 s', '2 min')
    """
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"


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
