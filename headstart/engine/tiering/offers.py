"""Offers of the pool's blocks to a store: once they are written, and at the latest before reuse.

A step's blocks are offered a few at a time when they are written, and all when no request is left.
If the saver has no room then, a block is offered again just before the pool reuses it. Its bytes
are copied in the engine's thread, and saved in the saver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headstart.cache import KVCacheManager, UnsavedBlock, UnsavedBlocks
from headstart.engine.tiering.payload import BlockPayload
from headstart.tiers import Saver, StoredBlock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BlockText", "ComputeRate", "Offers", "block_text"]

_TOGETHER = 32  # blocks that are copied at once
_LEAST_TOKENS = 32  # of a step that shows how fast prompts are computed
_WEIGHT = 0.3  # of the last step
_LONGEST_TEXT = 80  # characters of a block

BlockText = Callable[[Sequence[int]], str]
"""Returns the text of some tokens from anywhere in a prompt. Raises nothing."""


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
    except Exception:  # whatever a tokenizer raises: a step must not fail for a label
        return ""


class ComputeRate:
    """Tokens of prompts that are computed in a second: a moving average."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step that computed so many tokens; steps that mostly decode do not count."""
        if tokens < _LEAST_TOKENS:
            return
        rate = tokens / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)

    def seconds(self, tokens: int) -> float:
        """Return the seconds to compute so many tokens; 0 before anything was computed."""
        return tokens / self.value if self.value else 0.0


class Offers:
    """Passes what the store does not have to its saver. Times are in seconds since 1970.

    manager: one that collects events, which only this object takes. text: formats the text that is
    stored with a block; None to store none. num_dropped: blocks that the pool reused before the
    saver had room for them, or whose rows were gone by then.
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
        """Note that the blocks which the step under way filled are written."""
        self._unsaved.commit()
        if len(self._unsaved) >= _TOGETHER:
            self.flush()

    def roll_back(self) -> None:
        """Note that the step under way did not come about."""
        self._unsaved.roll_back(self._manager.take_events())

    def flush(self) -> None:
        """Offer all that is written, as far as the saver has room."""
        while some := self._unsaved.pending(_TOGETHER):
            if not self._offer(some):
                return
            self._unsaved.handed_on(len(some))

    def _offer(self, blocks: Sequence[UnsavedBlock]) -> bool:
        """Copy blocks and offer them; False if the saver has no room."""
        if not self._saver.has_room(len(blocks) * self._payload.nbytes):
            return False
        seconds = self._rate.seconds(self._manager.block_size)
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
