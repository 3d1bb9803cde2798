"""Blocks in progress: which sequence computes which block, so that none is computed twice."""

from headstart.cache.block import PrefixNode
from headstart.cache.identity import BlockKey, Namespace
from headstart.cache.sequence import TokenSequence


class BlocksInProgress:
    """For each running sequence, the next full block of its known tokens: (parent, key).

    One entry a sequence: a second prompt that begins alike hits what the first has computed and
    then comes to just this block. A decoding sequence does not know its next block, and has no
    entry.
    """

    def __init__(self) -> None:
        self._by_block: dict[tuple[PrefixNode | Namespace, BlockKey], TokenSequence] = {}

    def announce(self, sequence: TokenSequence) -> None:
        """The sequence computes the block after its last named one, if its tokens are known.

        Nobody waits for one that is not stored.
        """
        self.withdraw(sequence)
        if sequence.num_named < len(sequence.keys) and sequence.is_stored:
            block = (sequence.node or sequence.root, sequence.keys[sequence.num_named])
            if block not in self._by_block:
                self._by_block[block] = sequence
                sequence.in_progress = block

    def withdraw(self, sequence: TokenSequence) -> None:
        """The sequence computes nothing that it announced."""
        if sequence.in_progress is not None:
            del self._by_block[sequence.in_progress]
            sequence.in_progress = None

    def writer(self, parent: PrefixNode | Namespace, key: BlockKey) -> TokenSequence | None:
        """The sequence that computes this block, or None."""
        return self._by_block.get((parent, key))

    def check(self, running: tuple[TokenSequence, ...]) -> None:
        """Raise AssertionError if an entry is not a running sequence's own."""
        for block, sequence in self._by_block.items():
            name = sequence.request_id
            following = (sequence.node or sequence.root, sequence.keys[sequence.num_named])
            assert sequence.in_progress == block == following, f"{name} announces another block"
            assert any(sequence is other for other in running), f"{name} announces, and is gone"
