"""The interface of layers that need more than the K/V of a prefix to resume after it.

Layers with full attention need the K/V of all blocks of a prefix. Layers with a sliding window need
only the last blocks, in a separate pool (`headstart.cache.windows`). Recurrent layers need a state
(`headstart.cache.states`). A model has one such group besides full attention, or none.
"""

from collections.abc import Sequence

from headstart.cache.block import Checkpoint, KVCacheBlock
from headstart.cache.lookup import ComputedBlocks
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissReason


class LayerGroup:
    """State of layers without full attention. The manager calls it after changes of blocks.

    miss_reason: the reason of a miss if K/V are cached but the group cannot resume. num_dropped:
    evictions of the group's content since the start.
    """

    miss_reason = MissReason.STATE

    def __init__(self) -> None:
        self.num_dropped = 0

    def clear(self) -> None:
        """Forget all content and all sequences."""
        raise NotImplementedError

    def resume(self, computed: ComputedBlocks, known: int) -> ComputedBlocks:
        """Return a lookup with the deepest position within `known` tokens to resume from."""
        if computed.sequence.is_loaded:
            return computed
        position, state, writer = self.find(computed, known)
        rows = position - len(computed.blocks) * computed.sequence.block_size
        partial = computed.partial if rows > 0 else None
        return computed._replace(
            num_tokens=position,
            known_tokens=known,
            state=state,
            writer=computed.writer or writer,
            is_fork=computed.writer is None,
            partial=partial._replace(num_rows=rows) if partial is not None else None,
        )

    def find(
        self, computed: ComputedBlocks, known: int
    ) -> tuple[int, Checkpoint | None, str | None]:
        """Return the deepest position within `known` tokens to resume from, and its checkpoint.

        Also return the request that will make a deeper position possible, if any.
        """
        raise NotImplementedError

    def can_admit(self, computed: ComputedBlocks, num_new_tokens: int) -> bool:
        """Return True if a looked-up sequence can start and compute `num_new_tokens` in a step."""
        return self.can_start(computed, computed.num_tokens)

    def can_start(self, computed: ComputedBlocks | None, end: int) -> bool:
        """Return True if a sequence can start and compute tokens up to `end - 1` in this step."""
        raise NotImplementedError

    def window_block(self, block: KVCacheBlock) -> int:
        """Return the window block that is attached to a block; -1 without one."""
        return -1

    def start(self, sequence: TokenSequence, computed: ComputedBlocks | None, end: int) -> None:
        """Give a sequence what it needs to compute tokens up to `end - 1`; see `can_start`."""
        raise NotImplementedError

    def has_slots(self, sequence: TokenSequence, end: int) -> bool:
        """Return True if a step up to token `end` that fills no block changes nothing here."""
        return False

    def extend(self, sequence: TokenSequence, end: int) -> bool:
        """Give a running sequence what it needs to compute tokens up to `end - 1`, if possible."""
        return True

    def compute(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Note that this step computes tokens `start` to `end - 1`; their blocks are indexed."""
        raise NotImplementedError

    def attach_partial(self, sequence: TokenSequence, index: int) -> None:
        """Note that the sequence's partial block `index`, which is written, is indexed."""

    def save_fork(self, computed: ComputedBlocks, step: int) -> bool:
        """Let the step save a state at `computed.known_tokens`; False if this is impossible."""
        return False

    def accept(self, sequence: TokenSequence, num_blocks: int) -> None:
        """Note that a step with drafts is written, and that `num_blocks` blocks remain."""

    def commit(self) -> None:
        """Note that the step has written its rows and states."""
        raise NotImplementedError

    def fail(self) -> None:
        """Forget the states and rows of the failed step. Its sequences end afterwards."""

    def discard(self, sequence: TokenSequence) -> None:
        """Forget the states and rows that the sequence has written. It ends afterwards."""

    def end(self, sequence: TokenSequence, *, is_cached: bool) -> None:
        """End a sequence that still has its blocks. is_cached: its last state may be cached."""
        raise NotImplementedError

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop the states or window blocks of blocks that lose their identity.

        A block whose identity passed to a copy has no node any more.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        raise NotImplementedError
