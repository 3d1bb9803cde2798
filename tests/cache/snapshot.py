"""The whole state of a manager as one value, to check that a call changed nothing."""

from headstart.cache import KVCacheManager, TokenSequence
from headstart.cache.block import Branches, PrefixNode
from tests.cache.steps import counts


def _of_node(node: PrefixNode) -> tuple[object, ...]:
    order = tuple(node.child.order) if isinstance(node.child, Branches) else None
    block = None if node.block is None else node.block.block_id
    return (node, node.key, block, order, tuple(_of_node(child) for child in node.children()))


def _of_sequence(sequence: TokenSequence) -> tuple[object, ...]:
    return (
        sequence,
        tuple(sequence.token_ids),
        tuple(sequence.block_ids),
        sequence.num_computed_tokens,
        sequence.capacity,
        sequence.num_indexed,
        sequence.num_reused,
        tuple(sequence.switched),
        sequence.node,
        sequence.in_progress,
        sequence.step,
    )


def snapshot(manager: KVCacheManager, *others: TokenSequence) -> tuple[object, ...]:
    """Return everything but keys that were cut ahead of need; `others` hold no blocks."""
    pool = manager.pool
    return (
        tuple((b.block_id, b.ref_cnt, b.node) for b in pool.blocks),
        tuple(b.block_id for b in pool.free),
        (pool.version, pool.num_evicted, len(pool.events), manager._step),
        {node: tuple(blocks) for node, blocks in pool.copies.items()},
        tuple(_of_node(root) for root in pool.index.roots()),
        (tuple(pool.index._ghosts), tuple(pool.index._old_ghosts)),
        tuple(_of_sequence(sequence) for sequence in (*manager.sequences, *others)),
        dict(manager._in_progress),
        (frozenset(pool.index.unwritten), tuple(pool.index._unordered)),
        (counts(manager), tuple(manager.stats._admitted)),
    )
