"""The block pool as a picture in the terminal.

    ■ held: in the block table of a request     □ cached: free, but can be hit     · empty

The color shows which request computed the block. In a large pool, a cell stands for several
blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from headstart.cache import BlockState, KVCacheManager

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

HELD, CACHED, EMPTY = "■", "□", "·"
SIGNS = {BlockState.HELD: HELD, BlockState.CACHED: CACHED, BlockState.EMPTY: EMPTY}
# Contrast ratio of at least 3:1 on black and on white. On white, a terminal's yellow has less.
COLORS = tuple(f"color({number})" for number in (31, 133, 136, 65, 63, 167))
CELLS_PER_ROW = (64, 48, 32, 16)
MAX_CELLS = 512


class PoolPicture:
    """The state of each block of a pool, and its owner: the request that computed it.

    When a block is filled with other content, the new request becomes its owner.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        count = manager.config.num_blocks
        self._contents: list[object] = [None] * count
        self._owners: list[int | None] = [None] * count
        self._states = [EMPTY] * count

    def watch(self, replies: Iterator[RequestOutput], owner: int) -> Iterator[RequestOutput]:
        """Yield the outputs of a request, and make `owner` the owner of its new blocks.

        The picture shows the state of the pool before the request released its blocks.
        """
        for count, output in enumerate(replies):
            states = self._scan(owner)
            if HELD in states or count == 0:
                self._states = states
            yield output

    def update(self, owner: int) -> None:
        """Update the picture; `owner` becomes the owner of blocks with new content."""
        self._states = self._scan(owner)

    def _scan(self, owner: int) -> list[str]:
        states = []
        for index, (state, content) in enumerate(self._manager.picture()):
            old_content = self._contents[index]
            if state is BlockState.EMPTY:
                self._owners[index] = None
            elif self._owners[index] is None or (
                old_content is not None and old_content is not content
            ):
                self._owners[index] = owner
            self._contents[index] = content
            states.append(SIGNS[state])
        return states

    def draw(self, columns: int = 80) -> Text:
        """Draw rows of cells, each with the id of its first block, and a legend.

        Rows with only empty blocks are left out. For an empty pool, the first row is drawn.
        """
        per_cell = max(1, -(-len(self._states) // MAX_CELLS))
        cells = []  # held if any block is, else cached or empty; the owner of the first such block
        for start in range(0, len(self._states), per_cell):
            states = self._states[start : start + per_cell]
            state = min(states, key=(HELD, CACHED, EMPTY).index)
            cells.append((state, self._owners[start + states.index(state)]))
        picture = Text()
        width = max(5, len(f"{len(self._states):,}"))
        per_row = next((n for n in CELLS_PER_ROW if width + 2 + n <= columns), CELLS_PER_ROW[-1])
        starts = range(0, len(cells), per_row)
        used = [s for s in starts if any(state != EMPTY for state, _ in cells[s : s + per_row])]
        for start in used or starts[:1]:
            picture.append(f"{start * per_cell:>{width},}  ", style="dim")
            for (state, owner), run in groupby(cells[start : start + per_row]):
                style = "dim" if owner is None else color_of(owner)
                style = style if owner is None or state == CACHED else f"bold {style}"
                picture.append(state * len(list(run)), style=style)
            picture.append("\n")
        picture.append(self._legend(per_cell, " " * (width + 2), columns))
        return picture

    def _legend(self, per_cell: int, indent: str, columns: int) -> Text:
        counts = Counter(self._states)
        legend = Text(indent)
        for state, name in ((HELD, "held"), (CACHED, "cached"), (EMPTY, "empty")):
            legend.append(f"{state} {name} {counts[state]:,}   ")
        if per_cell > 1:
            scale = f"({per_cell:,} blocks per cell)"
            gap = "" if legend.cell_len + len(scale) <= columns else f"\n{indent}"
            legend.append(f"{gap}{scale}", style="dim")
        legend.append(f"\n{indent}computed by request")
        for owner, number in sorted(Counter(filter(None, self._owners)).items()):
            legend.append(f"  {owner}", style=f"bold {color_of(owner)}").append(f": {number:,}")
        return legend


def color_of(owner: int) -> str:
    """Return the color of an owner's blocks."""
    return COLORS[(owner - 1) % len(COLORS)]
