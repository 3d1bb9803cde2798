"""Tables of what is kept on disk."""

import time
from collections.abc import Iterator, Sequence

from headstart.cli.progress import show_bytes
from headstart.tiers import ModelRecord
from headstart.tiers.contents import KeptPrefix, ModelState

__all__ = ["NAME_DIGITS", "in_order", "show_age", "show_models", "show_prefixes"]

NAME_DIGITS = 12  # of a prefix's name
_WIDTH = 100  # columns of what is no terminal
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def show_age(seconds: float) -> str:
    """How long ago, in the largest unit that fits.

    >>> show_age(5), show_age(90), show_age(200_000)
    ('5 s', '1 min', '2 d')
    """
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def show_models(states: Sequence[ModelState], columns: int | None = None) -> str:
    """A line for each model: its size, tokens, age, and what its hits have saved.

    columns: of the terminal, where the rest of a line that does not fit stands below it.
    """
    if not states:
        return "no prefixes are kept"
    rows = [("model", "fingerprint", "size", "tokens", "last used", "loaded", "saved")]
    rows += [
        (
            one.model.record.title,
            one.model.record.fingerprint[:NAME_DIGITS],
            show_bytes(one.nbytes),
            f"{one.num_blocks * one.model.record.block_size:,}",
            show_age(time.time() - one.used),
            f"{one.hits * one.model.record.block_size:,} tokens",
            f"{one.saved_seconds:.1f} s",
        )
        for one in states
    ]
    return "\n".join(_align(rows, left=2, columns=columns))


def show_prefixes(
    prefixes: Sequence[KeptPrefix], model: ModelRecord, most: int, columns: int | None = None
) -> str:
    """A line for each stretch between two forks, below the one that it goes on from.

    Below it stands how the stretch's text begins, if that is kept. columns: as in `show_models`.
    """
    rows = [("prefix", "tokens", "size", "last used", "loaded", "saved")]
    words = [""]
    for depth, prefix in in_order(prefixes):
        if len(rows) > most:
            more = sum(1 for _ in in_order(prefixes)) - most
            rows.append((f"... {more:,} more", "", "", "", "", ""))
            words.append("")
            break
        first, last = prefix.stretch[0], prefix.stretch[-1]
        size = model.block_size
        rows.append(
            (
                "  " * depth + prefix.name.hex()[:NAME_DIGITS],
                f"{first.depth * size:,} to {(last.depth + 1) * size:,}",
                show_bytes(len(prefix.stretch) * model.block_bytes),
                show_age(time.time() - max(block.used for block in prefix.stretch)),
                f"{sum(block.hits for block in prefix.stretch) * size:,} tokens",
                f"{sum(block.hits * block.seconds for block in prefix.stretch):.1f} s",
            )
        )
        words.append(_quote(prefix.words, 2 * depth, columns or _WIDTH))
    lines = zip(_align(rows, left=1, columns=columns), words, strict=True)
    return "\n".join(line for pair in lines for line in pair if line)


def _quote(text: str, indent: int, columns: int) -> str:
    """The beginning of a text on a line of its own; empty for none.

    >>> _quote("The quick brown fox jumps over the lazy dog", 2, 20)
    '  "The quick bro..."'
    """
    most = max(columns - indent - 2, 8)
    short = text if len(text) <= most else f"{text[: most - 3].rstrip()}..."
    return f'{" " * indent}"{short}"' if text else ""


def in_order(prefixes: Sequence[KeptPrefix]) -> Iterator[tuple[int, KeptPrefix]]:
    """Each prefix with how many forks are before it, and then what it goes on with."""
    todo = [(0, prefix) for prefix in reversed(prefixes)]
    while todo:
        depth, prefix = todo.pop()
        yield depth, prefix
        todo += [(depth + 1, one) for one in reversed(prefix.then)]


def _align(rows: Sequence[Sequence[str]], left: int, columns: int | None) -> list[str]:
    """Rows in columns of equal width, the first `left` of them aligned to the left.

    Where they are wider than `columns` the others stand in a line of their own, indented.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_wide = columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        parts = [cells[:left], ["", *cells[left:]]] if is_wide else [cells]
        lines.append("\n".join(line for part in parts if (line := "  ".join(part).rstrip())))
    return lines
