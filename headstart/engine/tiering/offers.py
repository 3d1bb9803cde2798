"""Offers blocks of the pool to a store: once they are written, and at the latest before they go.

A step's blocks are offered a few at a time when they are written, and all when no request is left.
If the saver has no room then, a block is offered again just before the pool reuses it. Its bytes
are copied in the engine's thread, and saved in the saver's.
"""

from collections.abc import Sequence

from headstart.cache import KVCacheManager, UnsavedBlock, UnsavedBlocks
from headstart.engine.tiering.payload import BlockPayload
from headstart.engine.tiering.rates import ComputeRate
from headstart.engine.tiering.words import Spell
from headstart.tiers import Saver, StoredBlock

__all__ = ["Offers"]

_TOGETHER = 32  # blocks that are copied at once


class Offers:
    """Hands what the store does not have to its saver. Times are in seconds since 1970.

    manager: one that collects events, which nobody else takes. spell: the text of tokens, which is
    kept with blocks; None to keep none. num_dropped: blocks that the pool reused before the saver
    had room for them, or whose rows were gone by then.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        saver: Saver,
        rate: ComputeRate,
        spell: Spell | None,
    ) -> None:
        self.num_dropped = 0
        self._manager = manager
        self._payload = payload
        self._block_size = manager.block_size
        self._saver = saver
        self._rate = rate
        self._spell = spell
        self._unsaved = UnsavedBlocks(manager.names, tells_tokens=spell is not None)

    def note(self, asked: float, *, is_saved: bool = False) -> None:
        """Blocks were taken, and nothing is written yet: offer what is about to go.

        asked: when the oldest request of the step came. is_saved: the store has the new blocks.
        """
        events = self._manager.take_events()
        leaving = self._unsaved.note(events, asked, is_saved=is_saved)
        if leaving and not self._offer(leaving):
            self.num_dropped += len(leaving)

    def commit(self) -> None:
        """Callback: the blocks that the step under way filled are written."""
        self._unsaved.commit()
        if len(self._unsaved) >= _TOGETHER:
            self.flush()

    def roll_back(self) -> None:
        """The step under way did not come about."""
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
        seconds = self._rate.seconds(self._block_size)
        whole = [
            StoredBlock(
                *(one.name, one.parent, one.depth, seconds, one.asked, payload),
                words=self._words(one),
            )
            for one, payload in zip(blocks, self._payload.read(blocks), strict=True)
            if payload is not None
        ]
        self.num_dropped += len(blocks) - len(whole)
        return not whole or self._saver.offer(whole)

    def _words(self, block: UnsavedBlock) -> str:
        return self._spell(block.token_ids) if self._spell is not None and block.token_ids else ""
