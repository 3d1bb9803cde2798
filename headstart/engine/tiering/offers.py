"""Offers of the pool's blocks to stores: once they are written, and at the latest before reuse.

A step's blocks are offered a few at a time when they are written, and all when no request is left.
If the saver has no room then, a block is offered again just before the pool reuses it. Its bytes
are copied in the engine's thread, and saved in the saver's.

A block's bytes are those of its K/V, followed by those of its rows: the values that a stage of a
pipeline made of the block's tokens for the next stage, without which its K/V are useless there. One
record holds both, so a store has either both or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headstart.attention import PagedKVMemory
from headstart.cache import KVCacheManager, TokenSequence, UnsavedBlock, UnsavedBlocks
from headstart.tiers import Saver, StoredBlock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOGETHER = 32  # blocks that are copied at once
_LEAST_TOKENS = 32  # of a step that shows how fast prompts are computed
_WEIGHT = 0.3  # of the last step
_LONGEST_TEXT = 80  # characters of a block

BlockText = Callable[[Sequence[int]], str]
"""Returns the text of some tokens from anywhere in a prompt. Raises nothing."""


class BlockRows(Protocol):
    """Rows that are stored with K/V.

    layout: their stage, and the order of a block's bytes; part of the fingerprint. title: the same
    for people. nbytes: of one block, may be 0.
    """

    layout: str
    title: str
    nbytes: int

    def read(self, blocks: Sequence[UnsavedBlock]) -> Sequence[bytes | None]:
        """Return the rows of each block; None for a block whose rows are not there."""
        ...

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Take rows, as `read` returned them, of the sequence's blocks from `first` on."""
        ...


class BlockPayload:
    """Bytes of the pool's blocks, to read and write. rows: None for K/V alone."""

    def __init__(self, memory: PagedKVMemory, rows: BlockRows | None = None) -> None:
        self.rows = rows
        self.nbytes = memory.block_bytes + (rows.nbytes if rows is not None else 0)
        """Bytes of one block."""
        self._memory = memory

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[memoryview | None]:
        """Return a copy of each block; None for a block without its rows, which is not saved."""
        rows = self.rows.read(blocks) if self.rows is not None else [b""] * len(blocks)
        ids = [b.block_id for b, data in zip(blocks, rows, strict=True) if data is not None]
        if not ids:
            return [None] * len(blocks)
        copied = self._memory.read_blocks(ids).numpy()
        if self.nbytes > self._memory.block_bytes:
            present = [np.frombuffer(data, dtype=np.uint8) for data in rows if data is not None]
            copied = np.concatenate([copied, np.stack(present)], axis=1)
        payloads = iter(copied)
        return [next(payloads).data if data is not None else None for data in rows]

    def write(
        self,
        sequence: TokenSequence,
        first: int,
        block_ids: Sequence[int],
        payloads: Sequence[memoryview],
    ) -> None:
        """Write the sequence's blocks from `first` on, which have these ids."""
        size = self._memory.block_bytes
        if self.rows is not None:  # before their K/V can be found
            self.rows.write(sequence, first, [payload[size:] for payload in payloads])
        self._memory.write_blocks(block_ids, [payload[:size] for payload in payloads])


def block_text(tokenizer: PreTrainedTokenizerBase | None, is_on: bool) -> BlockText | None:
    """Return the function that formats the text of a block; None if no text is to be stored."""
    return partial(_format_block_text, tokenizer) if tokenizer is not None and is_on else None


def _format_block_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text that people recognize a block by."""
    try:
        # Behind another token, or the first word would lose the space before it.
        anchor, text = (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (list(token_ids[:1]), [token_ids[0], *token_ids])
        )
        return str(text[len(anchor) : len(anchor) + _LONGEST_TEXT])
    except Exception:  # from a tokenizer: a step must not fail for a label
        return ""


class ComputeRate:
    """Tokens of prompts computed in a second: a moving average."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step that computed so many tokens; steps that mostly decode do not count."""
        if tokens < _LEAST_TOKENS:
            return
        rate = tokens / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)


class Offers:
    """Blocks that the store does not have, passed to its saver. Times are in seconds since 1970.

    manager: collects events, which only this object takes. text: formats the text that is stored
    with a block; None to store none. num_dropped: blocks that the pool reused before the saver had
    room for them, or whose rows were gone by then.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        saver: Saver,
        rate: ComputeRate,
        text: BlockText | None,
    ) -> None:
        self.num_dropped = 0
        self._manager = manager
        self._payload = payload
        self._saver = saver
        self._rate = rate
        self._text = text
        self._unsaved = UnsavedBlocks(manager.hasher, tells_tokens=text is not None)

    def note(self, asked: float, *, is_saved: bool = False) -> None:
        """Offer the blocks that the step is about to overwrite; call before anything is written.

        asked: when the oldest request of the step came. is_saved: the store has the new blocks.
        """
        events = self._manager.take_events()
        leaving = self._unsaved.note(events, asked, is_saved=is_saved)
        if leaving and not self._offer(leaving):
            self.num_dropped += len(leaving)

    def commit(self) -> None:
        """Note that the blocks which the current step filled are written."""
        self._unsaved.commit()
        if len(self._unsaved) >= _TOGETHER:
            self.flush()

    def roll_back(self) -> None:
        """Note that the current step failed."""
        self._unsaved.roll_back(self._manager.take_events())

    def flush(self) -> None:
        """Offer all that is written, while the saver has room."""
        while blocks := self._unsaved.pending(_TOGETHER):
            if not self._offer(blocks):
                return
            self._unsaved.handed_on(len(blocks))

    def _offer(self, blocks: Sequence[UnsavedBlock]) -> bool:
        """Copy blocks and offer them; return False if the saver has no room."""
        if not self._saver.has_room(len(blocks) * self._payload.nbytes):
            return False
        seconds = self._manager.block_size / self._rate.value if self._rate.value else 0.0
        offered = [
            StoredBlock(
                *(block.name, block.parent, block.depth, seconds, block.asked, payload),
                words=self._text(block.token_ids) if self._text and block.token_ids else "",
            )
            for block, payload in zip(blocks, self._payload.read(blocks), strict=True)
            if payload is not None
        ]
        self.num_dropped += len(blocks) - len(offered)
        return not offered or self._saver.offer(offered)
