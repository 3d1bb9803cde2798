"""Printing of growing replies: Markdown or wrapped text in a terminal, raw text in a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import click
from rich.cells import cell_len

from headstart.cli.terminal import (
    OutputConsole,
    describe_reading,
    figures,
    note,
    waiting,
    without_echo,
)
from headstart.imports import load_module

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.streams import RequestStream

# Control characters. With them a model could move a terminal's cursor or change its state.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_reply(
    stream: RequestStream, *, plain: bool = False, is_text: bool = True
) -> RequestOutput:
    """Print a reply while it grows, then its metrics on stderr; return its last output.

    In a terminal, a reply is shown as Markdown. plain: show it as wrapped text instead. is_text:
    False for output such as JSON, whose lines must not be broken.
    """
    with without_echo():
        with waiting(describe_reading(stream)):
            output = next(stream)
        with waiting("the reply is empty so far"):
            while not output.outputs[0].text.strip() and not output.finished:
                output = next(stream)
        console = OutputConsole(highlight=False)
        writer: RawWriter
        if not console.is_terminal or not is_text:
            writer = RawWriter(clean=console.is_terminal)
        elif plain or console.is_dumb_terminal:
            writer = WrappingWriter(console.width)
        else:  # rich's Markdown takes half a second to import
            writer = load_module("headstart.cli.markdown").MarkdownWriter(console)
        with writer:
            writer.write(output.outputs[0].text)
            for output in stream:
                writer.write(output.outputs[0].text)
        note(figures(output), " ", in_parts=True)
    return output


def printable(text: str) -> str:
    r"""Replace each control character, except tabs and line ends, with U+FFFD.

    >>> printable("a\tb\x1b[2Jc\r\n")
    'a\tb\ufffd[2Jc\n'
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class RawWriter:
    """A writer that does not break lines. clean: replace control characters, for a terminal."""

    def __init__(self, *, clean: bool = False) -> None:
        self._clean = clean
        self._printed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        click.echo()

    def write(self, text: str) -> None:
        """Show the text so far. It must begin with the text of the previous call."""
        new = text[self._printed :]
        click.echo(printable(new) if self._clean else new, nl=False)
        self._printed = len(text)


class WrappingWriter(RawWriter):
    """A writer that breaks lines between words. It shows a word when it is complete."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self._column = 0
        self._spaces = ""  # before the next word
        self._text = ""

    def __exit__(self, *error: object) -> None:
        self._show(self._text[self._printed :])
        super().__exit__(*error)
        sys.stdout.flush()

    def write(self, text: str) -> None:
        self._text = text
        end = max(text.rfind(" "), text.rfind("\n"))
        if end >= self._printed:
            self._show(text[self._printed : end + 1])
            self._printed = end + 1

    def _show(self, text: str) -> None:
        click.echo("".join(self._wrap(printable(text))), nl=False)

    def _wrap(self, text: str) -> Iterator[str]:
        """Yield words and the spaces before them, except spaces at the end of a line."""
        for part in re.findall(r"\n| +|[^ \n]+", text):
            if part == "\n":
                self._column, self._spaces = 0, ""
            elif part.isspace():
                self._spaces += part
                continue
            elif self._column and self._column + cell_len(self._spaces + part) > self._width:
                self._column, self._spaces = cell_len(part), ""
                part = f"\n{part}"
            else:
                part, self._spaces = self._spaces + part, ""
                self._column += cell_len(part)
            yield part
