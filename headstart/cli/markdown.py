"""Rendering of a growing reply as Markdown.

Finished blocks (paragraphs, lists, code) are printed once. Only the last block, which grows, is
drawn again. So a reply longer than the screen scrolls like any text.
"""

from __future__ import annotations

from typing import Self, cast

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.theme import Theme

from headstart.cli.reply import RawWriter, printable

_PARSER = MarkdownIt().disable("inline")  # `split_finished` needs only blocks
_SPARE_ROWS = 2
# Terminals do not report their background, so these colors are readable on black and on white.
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
_CODE_THEME = ANSISyntaxTheme({kind: Style.parse(style) for kind, style in _CODE_STYLES.items()})


class MarkdownWriter(RawWriter):
    """A writer that shows text as Markdown in a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        console.push_theme(Theme(_STYLES))
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
            self._live.update(_Tail(""))  # otherwise, the tail would be shown twice for a moment
            self._print(finished)
            self._printed += len(finished)
        self._live.update(_Tail(tail))

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(_markdown(text))
            self._console.print()


class _Tail:
    """The end of a Markdown text, cut to the height of the screen."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_markdown(self._text), options, pad=False)
        for index, line in enumerate(lines[-max(1, console.height - _SPARE_ROWS) :]):
            if index:
                yield Segment.line()
            yield from line


def split_finished(text: str) -> tuple[str, str]:
    r"""Split text into its finished blocks and its last block, which may still grow.

    >>> split_finished("one\n\ntwo\n\nthr")
    ('one\n\ntwo\n\n', 'thr')
    >>> split_finished("- one\n\n  more")
    ('', '- one\n\n  more')
    """
    lines = text.splitlines(keepends=True)
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and not token.level]
    # Without an empty line before it, the last block may still merge with the block above.
    last = next((line for line in reversed(starts) if line and not lines[line - 1].strip()), 0)
    end = sum(map(len, lines[:last]))
    return text[:end], text[end:]


def _markdown(text: str) -> Markdown:
    markdown = Markdown(printable(text), hyperlinks=False)
    # rich passes this to its Syntax, which accepts a theme or the name of a theme.
    markdown.code_theme = cast("str", _CODE_THEME)
    return markdown
