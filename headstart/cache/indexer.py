"""Indexing of blocks, and which sequence computes which block.

A full block is indexed before the step that fills it has run, so that other sequences of that step
can hit it already; a partial one when its request ends.
"""

from headstart.cache.block import PartialNode, PrefixNode
from headstart.cache.config import CacheConfig
from headstart.cache.identity import BlockKey, Namespace
from headstart.cache.lookup import longest_head
from headstart.cache.pool import BlockPool
from headstart.cache.sequence import TokenSequence


class BlockIndexer:
    """Puts the blocks of sequences into the index of a pool.

    A full block gets its name before the step that fills it has run, so that other sequences
    of that step can hit it already.
    """

    def __init__(self, config: CacheConfig, pool: BlockPool) -> None:
        self._block_size = config.block_size
        self._deduplicate = config.deduplicate
        self._pool = pool
        self._index = pool.index

    def index_full_blocks(self, sequence: TokenSequence, full: int) -> None:
        """This step computes the sequence's first `full` blocks: name those without a name."""
        keys, at = sequence.keys, sequence.num_indexed
        node = sequence.node or self._index.make_root(sequence.root)
        while at < full and node.child is not None:
            node = self._index.child(node, keys[at])
            self._index_block(sequence, at, node)
            at += 1
        if at + 1 == full:  # as when a sequence decodes
            node = self._pool.store_child(node, keys[at], sequence.blocks[at])
        elif at < full:
            node = self._pool.store_chain(node, keys[at:full], sequence.blocks[at:full])
        sequence.node, sequence.num_indexed = node, full

    def _index_block(self, sequence: TokenSequence, at: int, node: PrefixNode) -> None:
        """The sequence's block is full, and this is its identity."""
        block, cached = sequence.blocks[at], node.block
        if cached is None or not self._deduplicate:
            self._pool.store(node, block)
            self._drop_covered(node)
        else:
            self._pool.touch([cached])
            sequence.switched.add(at)
            sequence.blocks[at] = cached
            sequence.block_ids[at] = cached.block_id
            self._pool.release([block])

    def keep_partial(self, sequence: TokenSequence) -> None:
        """Let the rows of the last block be found, unless a cached block has them already."""
        rows = sequence.num_computed_tokens % self._block_size
        if rows == 0:
            return
        key = sequence.cut_partial(sequence.num_computed_tokens, self._block_size)
        node = sequence.node or self._index.make_root(sequence.namespace)
        held = longest_head(self._index, node, key)
        if held is None or held.num_rows < rows:
            partial = self._index.child(node, key, PartialNode)
            self._index.attach(partial, sequence.blocks[sequence.num_indexed])
            self._drop_covered(partial)

    def _drop_covered(self, node: PrefixNode) -> None:
        """Empty a partial block whose rows this node's block has too."""
        covered = self._index.covered_partial(node)
        if isinstance(covered, PartialNode) and covered.block and not covered.block.ref_cnt:
            self._pool.drop([covered.block])


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
        if sequence.num_indexed < len(sequence.keys) and sequence.is_stored:
            block = (sequence.node or sequence.root, sequence.keys[sequence.num_indexed])
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
            following = (sequence.node or sequence.root, sequence.keys[sequence.num_indexed])
            assert sequence.in_progress == block == following, f"{name} announces another block"
            assert any(sequence is other for other in running), f"{name} announces, and is gone"
