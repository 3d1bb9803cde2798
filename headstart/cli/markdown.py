"""A reply that grows, rendered as Markdown.

Paragraphs, lists and blocks of code that are over are printed for good. Only the last one is drawn
again while it grows, so that a reply longer than the screen scrolls as any text does.
"""

from __future__ import annotations

import os
import re
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from headstart.cli.reply import printable

__all__ = ["MarkdownWriter", "split_finished"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_SPARE_ROWS = 2
_LIGHT = ("7", "15")  # of COLORFGBG's sixteen colours


class MarkdownWriter:
    """Shows a text that grows on a terminal; a `reply.Writer`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = 0
        self._text = ""
        self._live = Live(_Tail(""), console=console, transient=True, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(_Tail(""))
        self._live.stop()
        self._print(self._text[self._printed :])

    def write(self, text: str) -> None:
        self._text = text
        finished, tail = split_finished(text[self._printed :])
        if finished:
            # Without its tail, which would be seen twice for a moment.
            self._live.update(_Tail(""))
            self._print(finished)
            self._printed += len(finished)
        self._live.update(_Tail(tail))

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(_markdown(text))
            self._console.print()


class _Tail:
    """The end of a Markdown text, as much of it as the screen holds."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_markdown(self._text), options, pad=False)
        shown = lines[-max(1, console.height - _SPARE_ROWS) :]
        for place, line in enumerate(shown):
            if place:
                yield Segment.line()
            yield from line


def split_finished(text: str) -> tuple[str, str]:
    r"""What cannot change any more, and the block that may still grow.

    A block ends at an empty line, if the line after it is there and not indented (an indented one
    goes on with a list), and outside of fenced code.

    >>> split_finished("one\n\ntwo\n\nthr")
    ('one\n\ntwo\n\n', 'thr')
    >>> split_finished("- one\n\n  more")
    ('', '- one\n\n  more')
    """
    end = position = 0
    fence = ""
    was_empty = False
    for line in text.splitlines(keepends=True):
        opened = _FENCE.match(line)
        if was_empty and not fence and not line[0].isspace():
            end = position
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence) and not line[opened.end() :].strip():
            fence = ""
        was_empty = not line.strip()
        position += len(line)
    return text[:end], text[end:]


def _markdown(text: str) -> Markdown:
    return Markdown(printable(text), code_theme=_code_theme(), hyperlinks=False)


def _code_theme() -> str:
    """Colours for code, by the background that the terminal says it has."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return "ansi_light" if background in _LIGHT else "ansi_dark"
