"""A block's bytes in a store: those of its K/V, and behind them those of its rows.

Rows are what a stage of a pipeline made of the block's tokens and hands the next stage: without
them K/V are of no use there. One record holds both, so a store has either both or nothing.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headstart.attention import PagedKVMemory
from headstart.cache import TokenSequence, UnsavedBlock

__all__ = ["BlockPayload", "BlockRows"]


class BlockRows(Protocol):
    """Rows that are kept beside K/V.

    layout: whose they are, and how a block's bytes lie; part of the fingerprint. title: the same
    for people. nbytes: of one block, may be 0.
    """

    layout: str
    title: str
    nbytes: int

    def read(self, blocks: Sequence[UnsavedBlock]) -> Sequence[bytes | None]:
        """The rows of each block; None for one whose rows are not there."""
        ...

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Have rows, as `read` gave them, of the sequence's blocks from `first` on."""
        ...


class BlockPayload:
    """Reads and writes the bytes of blocks. rows: None keeps K/V alone."""

    def __init__(self, memory: PagedKVMemory, rows: BlockRows | None = None) -> None:
        self.rows = rows
        self.nbytes = memory.block_bytes + (rows.nbytes if rows is not None else 0)
        """Bytes of one block."""
        self._memory = memory

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[memoryview | None]:
        """A copy of each block; None for one without its rows, which is not to be kept."""
        found = self.rows.read(blocks) if self.rows is not None else [b""] * len(blocks)
        ids = [one.block_id for one, data in zip(blocks, found, strict=True) if data is not None]
        if not ids:
            return [None] * len(blocks)
        copied = self._memory.read_blocks(ids).numpy()
        if self.nbytes > self._memory.block_bytes:
            there = [np.frombuffer(data, dtype=np.uint8) for data in found if data is not None]
            copied = np.concatenate([copied, np.stack(there)], axis=1)
        payloads = iter(copied)
        return [next(payloads).data if data is not None else None for data in found]

    def write(
        self,
        sequence: TokenSequence,
        first: int,
        block_ids: Sequence[int],
        payloads: Sequence[memoryview],
    ) -> None:
        """Write the sequence's blocks from `first` on, which are held under these ids."""
        size = self._memory.block_bytes
        if self.rows is not None:  # before their K/V can be found
            self.rows.write(sequence, first, [payload[size:] for payload in payloads])
        self._memory.write_blocks(block_ids, [payload[:size] for payload in payloads])
