"""The interface for the cached content of layers without full attention.

To resume after a prefix, layers with full attention need the K/V of all its blocks. Layers with a
sliding window need only the last blocks, in a separate pool (`headstart.cache.windows`). Recurrent
layers need a state (`headstart.cache.states`). A model has at most one of the last two kinds.
"""

from collections.abc import Sequence

from headstart.cache.block import Checkpoint, KVCacheBlock
from headstart.cache.lookup import ComputedBlocks
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissReason


class LayerGroup:
    """The states or window blocks of a model's layers without full attention.

    miss_reason: the reason to report if K/V are cached, but no sequence can resume after them
    because of this group. num_dropped: the number of states or window blocks that were evicted.
    """

    miss_reason = MissReason.STATE

    def __init__(self) -> None:
        self.num_dropped = 0

    def clear(self) -> None:
        """Forget all content and all sequences."""

    def resume(self, computed: ComputedBlocks, known_tokens: int) -> ComputedBlocks:
        """Return the lookup, cut to the deepest position where the group can resume.

        known_tokens: the number of tokens with cached K/V, which bounds the position.
        """
        if computed.sequence.is_loaded:
            return computed
        position, state, writer = self.find(computed, known_tokens)
        rows = position - len(computed.blocks) * computed.sequence.block_size
        partial = computed.partial if rows > 0 else None
        return computed._replace(
            num_tokens=position,
            known_tokens=known_tokens,
            state=state,
            writer=computed.writer or writer,
            is_fork=computed.writer is None,
            partial=partial._replace(num_rows=rows) if partial is not None else None,
        )

    def find(
        self, computed: ComputedBlocks, known_tokens: int
    ) -> tuple[int, Checkpoint | None, str | None]:
        """Return the deepest position up to `known_tokens` to resume from, and its checkpoint.

        Also return the request that is writing a deeper checkpoint, if any.
        """
        raise NotImplementedError

    def can_admit(self, computed: ComputedBlocks, num_new_tokens: int) -> bool:
        """Return True if the sequence can start and compute `num_new_tokens` in one step."""
        return self.can_start(computed, computed.num_tokens)

    def can_start(self, computed: ComputedBlocks | None, end: int) -> bool:
        """Return True if the sequence can start and compute tokens up to `end - 1` in this step."""
        raise NotImplementedError

    def window_block(self, block: KVCacheBlock) -> int:
        """Return the window block that is attached to a block; -1 without one."""
        return -1

    def start(self, sequence: TokenSequence, computed: ComputedBlocks | None, end: int) -> None:
        """Allocate the state or the window of a new sequence. Call it only if it can start."""

    def has_slots(self, sequence: TokenSequence, end: int) -> bool:
        """Return True if `extend` and `compute` would change nothing for tokens up to `end - 1`.

        Call it only if these tokens fill no block.
        """
        return False

    def extend(self, sequence: TokenSequence, end: int) -> bool:
        """Allocate window blocks for tokens up to `end - 1`; return False if too few are free."""
        return True

    def compute(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Note that this step computes tokens `start` to `end - 1`. Call it after indexing."""

    def attach_partial(self, sequence: TokenSequence, index: int) -> None:
        """Note that the sequence's block `index` was indexed as a partial block."""

    def save_fork(self, computed: ComputedBlocks, step: int) -> bool:
        """Let this step save a checkpoint at `known_tokens`; return False if it cannot."""
        return False

    def accept(self, sequence: TokenSequence, num_blocks: int) -> None:
        """Commit a step with drafts; release window blocks after the first `num_blocks` blocks."""

    def commit(self) -> None:
        """Note that the step has written its rows and states."""

    def fail(self) -> None:
        """Forget the states and rows of the failed step, whose sequences end after this call."""

    def discard(self, sequence: TokenSequence) -> None:
        """Forget the states and rows that the sequence has written. It ends after this call."""

    def end(self, sequence: TokenSequence, *, is_cached: bool) -> None:
        """End a sequence that still has its blocks. is_cached: its last state may be cached."""

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop the states or window blocks of blocks that lose their identity.

        The `node` of a block is None if another block still holds the same prefix.
        """

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
