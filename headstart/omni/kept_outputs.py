"""Output rows of a stage that outlive the process: they lie beside their block's K/V in a store.

A stage that finds K/V after a restart can use them only with the rows that it hands the next stage
for them. So a block is kept with all its rows or not at all, and the layout of the rows is part of
the store's fingerprint: rows of another layout are another model's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.cache import TokenSequence, UnsavedBlock
from headstart.engine.config import EngineConfig
from headstart.omni.output_cache import BlockPath, OutputCache
from headstart.omni.stage import StageSpec

__all__ = ["KeptOutputs", "keeps_blocks", "without_store"]


def keeps_blocks(config: EngineConfig) -> bool:
    """True if the options ask for blocks that outlive the process."""
    is_asked = config.kept_folder is not None or bool(config.remote_cache)
    return is_asked and config.enable_prefix_caching


def without_store(config: EngineConfig) -> EngineConfig:
    """The same options for a stage whose blocks end with the process."""
    return replace(config, cache_dir=None, remote_cache=None)


class _BlockLayout(NamedTuple):
    """The rows of one output in a block: `shape` is `[tokens of the block * ratio, ...]`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fits(self, rows: Tensor | None) -> bool:
        return rows is not None and (rows.dtype, tuple(rows.shape)) == (self.dtype, self.shape)


class KeptOutputs:
    """The declared rows of one stage, as bytes of its blocks; a `BlockRows` of its engine's tiers.

    place: the stage's name in `cache`. like: the stage's outputs for one token, `[ratio, ...]`.
    """

    def __init__(
        self,
        spec: StageSpec,
        block_size: int,
        like: Mapping[str, Tensor],
        cache: OutputCache,
        place: str,
    ) -> None:
        kept = [one for one in spec.gives if one.alignment.is_by_token and one.name in like]
        self._layouts = [
            _BlockLayout(
                one.name,
                like[one.name].dtype,
                (block_size * one.alignment.ratio, *like[one.name].shape[1:]),
            )
            for one in kept
        ]
        self._needed = frozenset(one.name for one in kept if one.required)
        self._cache = cache
        self._place = place
        self.title = spec.name
        self.layout = (
            f"stage {spec.name!r}, rows behind K/V: {[tuple(one) for one in self._layouts]}"
        )
        self.nbytes = sum(one.nbytes for one in self._layouts)

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[bytes | None]:
        """The rows of each block, one output after the other; None where one is missing."""
        if not self._layouts:
            return [b""] * len(blocks)
        found: list[bytes | None] = []
        for run in _runs(blocks):
            path = BlockPath(self._place, *run[-1].path())
            rows = self._cache.find(path, run[0].depth)
            data = [self._join(rows_of_block) for rows_of_block in rows]
            found += [*data, *[None] * (len(run) - len(data))]
        return found

    def _join(self, rows: Mapping[str, Tensor]) -> bytes | None:
        if not all(one.fits(rows.get(one.name)) for one in self._layouts):
            return None
        flat = [rows[one.name].contiguous().view(-1).view(torch.uint8) for one in self._layouts]
        return b"".join(part.numpy().tobytes() for part in flat)

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Have rows in the stage-output store, as far as it has room."""
        if not self._layouts:
            return
        keys = sequence.keys[: first + len(blocks)]
        path = BlockPath(self._place, sequence.namespace, keys)
        for index, data in enumerate(blocks, start=first):
            self._cache.put(path, index, self._cut(data), self._needed)
        self._cache.touch(path)

    def _cut(self, data: memoryview) -> dict[str, Tensor]:
        rows, at = {}, 0
        for one in self._layouts:
            flat = np.frombuffer(data[at : at + one.nbytes], dtype=np.uint8).copy()
            rows[one.name] = torch.from_numpy(flat).view(one.dtype).view(one.shape)
            at += one.nbytes
        return rows


def _runs(blocks: Sequence[UnsavedBlock]) -> Iterator[Sequence[UnsavedBlock]]:
    """Blocks that follow one another in one prefix, so that one walk finds all of a run."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at].parent != blocks[at - 1].name:
            yield blocks[first:at]
            first = at
