"""A reply that grows, rendered as Markdown.

Paragraphs, lists and blocks of code that are over are printed for good. Only the last one is drawn
again while it grows, so that a reply longer than the screen scrolls as any text does.
"""

from __future__ import annotations

import re
from typing import Self, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.theme import Theme

from headstart.cli.reply import printable

__all__ = ["MarkdownWriter", "split_finished"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_SPARE_ROWS = 2
# Few terminals say their background: these are readable on black and on white alike.
_BOLD, _BLUE, _GREEN, _PURPLE = "bold", "color(31)", "color(65)", "color(133)"
_STYLES = {
    "markdown.code": f"bold {_BLUE}",
    "markdown.item.bullet": _BOLD,
    "markdown.item.number": _BOLD,
    "markdown.hr": "dim",
    "markdown.block_quote": _PURPLE,
    "markdown.link": f"underline {_BLUE}",
    "markdown.link_url": f"underline {_BLUE}",
}
_CODE_STYLES = {
    ("Comment",): "italic dim",
    ("Keyword",): f"bold {_BLUE}",
    ("Literal", "String"): _GREEN,
    ("Literal", "Number"): _PURPLE,
    ("Name", "Function"): _BOLD,
    ("Name", "Class"): _BOLD,
}


class MarkdownWriter:
    """Shows a text that grows on a terminal; a `reply.Writer`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        console.push_theme(Theme(_STYLES))
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
    markdown = Markdown(printable(text), hyperlinks=False)
    # Handed on to rich's Syntax, which takes a theme as well as a theme's name.
    markdown.code_theme = cast("str", _CODE_THEME)
    return markdown


_CODE_THEME = ANSISyntaxTheme({kind: Style.parse(told) for kind, told in _CODE_STYLES.items()})
