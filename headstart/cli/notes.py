"""Lines on stderr beside what was asked for: dim, and broken between words in a terminal."""

import shutil
import sys

import click

__all__ = ["note"]


def note(text: str) -> None:
    """Write a line for the user; other programs get it unbroken."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = click.wrap_text(text, max(columns, 20), preserve_paragraphs=True)
    click.secho(text, dim=True, err=True)
