"""Building the pool anew after an operation on it was interrupted half-way.

An exception may come between any two lines: Ctrl-C, or no memory. Links, order, counts and
children may then be half changed. What stays true at every line is this: a block whose `node`
is set and that is not in `index.unwritten` has the rows which the chain of that node's `parent`
and `key` spells. All the rest is made from that, with no block held.

It may be interrupted as well, and is then run again from the start.
"""

from collections.abc import Iterable, Sequence

from headstart.cache.block import KVCacheBlock, PrefixNode, RootNode
from headstart.cache.events import AllBlocksCleared, BlockStored
from headstart.cache.eviction import make_policy
from headstart.cache.index import PrefixIndex
from headstart.cache.pool import BlockPool
from headstart.cache.sequence import TokenSequence


def rebuild(pool: BlockPool, sequences: Sequence[TokenSequence]) -> None:
    """Make the pool whole: every block is free, and what earlier steps cached can be found.

    The order of reuse is kept as far as it can be told; blocks that the sequences held are
    reused last. Cached blocks keep their marks. Mirrors are told of everything that is cached.
    Costs a walk over all blocks.
    """
    pool.version += 1
    for block in pool.index.unwritten:
        block.node = None
    queued = pool.free.salvage()
    held = [block for sequence in sequences for block in reversed(sequence.blocks)]
    order = dict.fromkeys([*queued, *held, *pool.blocks])
    index = PrefixIndex(pool.index.max_ghosts)
    cached = _plant(index, order)
    pool.note_freed(block for block in pool.blocks if block.ref_cnt)
    for block in pool.blocks:
        block.ref_cnt = 0
        block.prev_free_block = block.next_free_block = block
    pool.marks.drop([block for block in pool.blocks if block.node is None])
    pool.free = make_policy(pool.eviction, pool.blocks, pool.shares, pool.marks)
    pool.free.withdraw(cached)
    for block in cached:
        pool.free.release([block])
    pool.copies = {}
    if pool.names is not None:
        full = [(b.block_id, b.node) for b in cached if b.node.__class__ is PrefixNode]
        stored = [BlockStored(at, node, pool.names) for at, node in full if node is not None]
        pool.events = [*pool.events, AllBlocksCleared(), *stored]
    pool.index = index


def _plant(index: PrefixIndex, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
    """Give each block its place in an empty index; of copies, one. Returns the cached blocks."""
    planted: dict[PrefixNode, PrefixNode] = {}
    cached = []
    for block in blocks:
        if block.node is None:
            continue
        node = _plant_path(index, block.node, planted)
        if node.block is None:
            index.attach(node, block)
            cached.append(block)
        else:
            block.node = None
    index.keep_ancestors(n for n in planted.values() if n.block is None)
    return cached


def _plant_path(
    index: PrefixIndex, node: PrefixNode, planted: dict[PrefixNode, PrefixNode]
) -> PrefixNode:
    """The node of the same prefix in the index, made with all that it hangs under."""
    path = []
    at = node
    while at.parent is not None and at not in planted:
        path.append(at)
        at = at.parent
    if at.parent is None:
        assert isinstance(at, RootNode)
        new: PrefixNode = index.make_root(at.namespace)
    else:
        new = planted[at]
    for old in reversed(path):
        new = planted[old] = index.child(new, old.key, old.__class__)
    return new
