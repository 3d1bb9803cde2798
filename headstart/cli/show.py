"""How the demos are shown: in a terminal no wider than a page, and as a picture of it."""

import os
import re
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headstart.errors import ConfigError

MAX_WIDTH = 80
PANEL = 4
"""Columns that the frame of a card takes."""


def demo_console() -> Console:
    """A terminal no wider than what is shown."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    return console


def show(parts: Iterable[RenderableType], console: Console, svg: Path | None = None) -> None:
    """Print each part as soon as it is there, then all of them into an SVG if one is named.

    Raises ConfigError if the SVG cannot be written.
    """
    shown = []
    for part in parts:
        console.print(part)
        shown.append(part)
    if svg is not None:
        try:
            svg.write_text(_draw(shown), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {svg}: {error.strerror}") from error


def check_svg(svg: Path | None) -> None:
    """Raise ConfigError, before any work, if an SVG of this name cannot be written."""
    if svg is not None and (svg.is_dir() or not os.access(svg.parent, os.W_OK | os.X_OK)):
        where = "it is a folder" if svg.is_dir() else f"there is no folder {svg.parent} to write to"
        raise ConfigError(f"cannot write {svg}: {where}")


class Figures:
    """Numbers in a row below their names; a line for each where the row does not fit."""

    def __init__(self, figures: Mapping[str, str]) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [max(len(name), len(value)) for name, value in self._figures.items()]
        gap = (options.max_width - sum(columns)) // max(len(columns) - 1, 1)
        if gap < 2:
            shown = Table.grid(padding=(0, 2))
            for name, value in self._figures.items():
                shown.add_row(Text(name, style="dim"), Text(value, style="bold"))
        else:
            shown = Table.grid(padding=(0, min(gap, 4)))
            for name in self._figures:
                shown.add_column(min_width=len(name))
            shown.add_row(*self._figures, style="dim")
            shown.add_row(*self._figures.values(), style="bold")
        yield shown


def _draw(parts: Iterable[RenderableType]) -> str:
    """What the terminal showed as an SVG that needs no font from elsewhere."""
    recorder = Console(record=True, width=MAX_WIDTH, file=StringIO(), highlight=False)
    for part in parts:
        recorder.print(part)
    svg = recorder.export_svg(title="headstart demo")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, DejaVu Sans Mono")
    # Viewers other than browsers drop spaces at the ends of a text, and know no textLength: they
    # need these fonts in the size at which a letter is as wide as one of rich's.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return svg.replace("font-size: 20px", "font-size: 20.27px")
