"""How the demos are shown: in a terminal no wider than a page, and as a picture of it."""

import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

from rich.console import Console, RenderableType

MAX_WIDTH = 80


def demo_console() -> Console:
    """A terminal no wider than what is shown."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    return console


def show(parts: Iterable[RenderableType], console: Console, svg: Path | None = None) -> None:
    """Print each part as soon as it is there, then all of them into an SVG if one is named."""
    shown = []
    for part in parts:
        console.print(part)
        shown.append(part)
    if svg is not None:
        svg.write_text(_draw(shown), "utf-8")


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
