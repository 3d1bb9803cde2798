"""A prompt as the engine takes it: token ids, and the other parts of some prompts.

Most prompts are token ids alone. A prompt may also have embeddings for some of its positions (an
image's, in place of its placeholders') and special position ids (M-RoPE gives each token three).
Their sources must be part of the prompt's identity, or its K/V would be found by a different
prompt: `items` has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.cache import MultiModalItem
from headstart.engine.outputs import ImageUse


class PlacedRows(NamedTuple):
    """Embeddings `[tokens, hidden]` of the positions from `position` on."""

    position: int
    rows: Tensor


class EmbeddingSource(Protocol):
    """Embeddings for some positions of a sequence; other positions have those of the token ids."""

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Return the rows within positions `start` to `stop - 1`.

        Called again for the same positions when a preempted sequence is computed again, and, in
        deterministic mode, for all positions of a block at each of its tokens.
        """


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """An `EmbeddingSource` of rows that are known from the beginning."""

    parts: Sequence[PlacedRows]

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        for position, rows in self.parts:
            first, last = max(start, position), min(stop, position + len(rows))
            if first < last:
                yield PlacedRows(first, rows[first - position : last - position])


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPositions:
    """Position ids that are not 0, 1, 2, ...: int64 `[axes, prompt tokens]`.

    A token after the prompt, at place p, has the position `p + delta` on every axis.
    """

    table: NDArray[np.int64]
    delta: int

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return position ids int64 `[axes, stop - start]`."""
        known = self.table[:, start:stop]
        after = np.arange(start + known.shape[1], stop) + self.delta
        return np.concatenate([known, np.tile(after, (len(self.table), 1))], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class PromptExtras:
    """The parts of a prompt beyond its token ids.

    items: for the prefix's identity; the digest of an item must cover everything that determines
    embeddings or positions, and the item all positions that it affects. embeddings: replace those
    of the token ids. positions: replace 0, 1, 2, ...
    """

    items: tuple[MultiModalItem, ...] = ()
    embeddings: EmbeddingSource | None = None
    positions: RotaryPositions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A prompt that needs no more processing.

    text: its text, if it was one. images: the images in it, as its output reports them.
    """

    token_ids: Sequence[int]
    text: str | None = None
    extras: PromptExtras | None = None
    images: tuple[ImageUse, ...] = ()
