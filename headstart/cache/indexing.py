"""Indexing of a sequence's blocks, so that later lookups find them."""

from headstart.cache.block import PartialNode, PrefixNode
from headstart.cache.lookup import longest_head
from headstart.cache.pool import BlockPool
from headstart.cache.sequence import TokenSequence


def index_blocks(pool: BlockPool, sequence: TokenSequence, full: int, *, deduplicate: bool) -> None:
    """Index the sequence's blocks `num_indexed` to `full - 1`.

    deduplicate: if a block with the same content is cached already, switch the sequence to it.
    """
    keys, i = sequence.keys, sequence.num_indexed
    node = sequence.node or pool.index.make_root(sequence.root)
    while i < full and node.child is not None:
        node = pool.index.child(node, keys[i])
        _index_block(pool, sequence, i, node, deduplicate=deduplicate)
        i += 1
    if i + 1 == full:  # the usual case in decoding
        node = pool.store_child(node, keys[i], sequence.blocks[i])
    elif i < full:
        node = pool.store_chain(node, keys[i:full], sequence.blocks[i:full])
    sequence.node, sequence.num_indexed = node, full


def _index_block(
    pool: BlockPool, sequence: TokenSequence, i: int, node: PrefixNode, *, deduplicate: bool
) -> None:
    block, cached = sequence.blocks[i], node.block
    if cached is None or not deduplicate:
        pool.store(node, block)
        _drop_covered(pool, node)
    else:
        pool.index.use(node)
        pool.touch([cached])
        sequence.switched.add(i)
        sequence.blocks[i] = cached
        sequence.block_ids[i] = cached.block_id
        pool.release([block])


def index_partial(pool: BlockPool, sequence: TokenSequence) -> None:
    """Index the sequence's partial block, unless a cached block has the same rows."""
    size, start = sequence.block_size, sequence.num_indexed
    rows = sequence.num_computed_tokens - start * size
    if rows <= 0:
        return
    index = pool.index
    key = sequence.cut_partial(sequence.num_computed_tokens, size)
    node = sequence.node or index.make_root(sequence.namespace)
    cached = longest_head(index, node, key)
    if cached is None or cached.num_rows < rows:
        partial = index.child(node, key, PartialNode)
        index.attach(partial, sequence.blocks[start])
        if pool.group is not None:
            pool.group.attach_partial(sequence, start)
        _drop_covered(pool, partial)


def _drop_covered(pool: BlockPool, node: PrefixNode) -> None:
    """Drop the content of a free partial block if this node's block has all its rows."""
    covered = pool.index.covered_partial(node)
    if isinstance(covered, PartialNode) and covered.block and not covered.block.ref_cnt:
        pool.drop([covered.block])
