"""Every invariant of the manager in one place; tests check them after every step."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headstart.cache.block import KVCacheBlock
from headstart.cache.identity import count_tokens
from headstart.cache.index import PrefixNode, TailNode

if TYPE_CHECKING:
    from headstart.cache.manager import KVCacheManager
    from headstart.cache.sequence import TokenSequence


def check_manager(manager: "KVCacheManager") -> None:
    """Raise AssertionError if an invariant is broken. Costs a walk over everything."""
    _check_blocks(manager)
    nodes = {node for root in manager.pool.index.roots() for node in _descend(root)}
    _check_index(manager, nodes)
    for sequence in manager.sequences:
        _check_sequence(manager, sequence)


def _descend(root: PrefixNode) -> Iterator[PrefixNode]:
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        todo += node.children()


def _check_blocks(manager: "KVCacheManager") -> None:
    """Reference counts are those of the tables; the free queue has just the unheld blocks."""
    pool = manager.pool
    held = Counter(block.block_id for s in manager.sequences for block in s.blocks)
    free = [block.block_id for block in pool.free]
    assert len(free) == len(set(free)) == len(pool.free), "the free queue has a block twice"
    assert set(free).isdisjoint(held), "a held block is on the free queue"
    assert len(free) + len(held) == len(pool.blocks), "a block is neither free nor held"
    for at, block in enumerate(pool.blocks):
        assert block.block_id == at, f"block {at} has another id"
        assert block.ref_cnt == held[at], f"{block} is in {held[at]} block tables"
        assert block.next_free_block.prev_free_block is block, f"{block}: broken link"
        if block.writer is not None:
            assert block in block.writer.blocks, f"{block} is written by one that has it not"


def _check_index(manager: "KVCacheManager", nodes: set[PrefixNode]) -> None:
    """Blocks and identities point at one another; nothing useless or misplaced is kept."""
    pool = manager.pool
    for block in pool.blocks:
        if block.node is not None:
            assert block.node in nodes, f"{block} has an identity that no lookup finds"
            same: list[KVCacheBlock | None] = [block.node.block, *pool.copies.get(block.node, [])]
            assert same.count(block) == 1, f"{block} is not what its identity holds"
    assert not (pool.copies and manager.config.deduplicate), "a block was cached twice"
    for node, copies in pool.copies.items():
        assert copies, "an identity without copies is said to have some"
        for block in copies:
            assert block.node is node and block.ref_cnt, f"{block} is no copy, or nobody's"
    pool.index.check(nodes)
    for node in nodes:
        if node.block is not None:
            assert node.block.node is node, f"an identity holds {node.block}, which is not its"
        if node.parent is not None:
            _check_place(manager, node)


def _check_place(manager: "KVCacheManager", node: PrefixNode) -> None:
    assert node.parent is not None
    tokens = count_tokens(node.key)
    if isinstance(node, TailNode):
        assert 0 < tokens < manager.block_size, f"a tail of {tokens} tokens"
        assert not node.children(), "a tail has children"
        assert node.block is not None and node.block.ref_cnt == 0, "a tail is held or empty"
    else:
        assert tokens == manager.block_size, f"a block of {tokens} tokens has a name"
    assert node.parent.child is None or node.parent.branches is None, "two sets of children"
    branches = node.parent.branches
    if branches is not None:
        in_order = branches.order.count(node.key)
        assert in_order == (node.block is not None), "the order is not that of the cached"
        assert branches.order == sorted(branches.order), "the order is none"
        assert branches.nodes[node.key] is node, "an identity is misplaced"


def _check_sequence(manager: "KVCacheManager", sequence: "TokenSequence") -> None:
    """The block table covers the computed tokens, and its full blocks are what they should be."""
    name, size = sequence.request_id, manager.block_size
    used = -(-sequence.num_computed_tokens // size)
    assert len(sequence.blocks) == used, f"{name} holds {len(sequence.blocks)} blocks, uses {used}"
    assert sequence.capacity == used * size, f"{name} counts its slots wrong"
    assert sequence.num_computed_tokens <= len(sequence.token_ids), f"{name} computed too much"
    full = sequence.num_computed_tokens // size if manager.config.enable_prefix_caching else 0
    assert sequence.num_named == full, f"{name} has {full} full blocks, {sequence.num_named} named"
    node = sequence.node
    for at in range(full - 1, -1, -1):
        assert node is not None and node.key == sequence.keys[at], f"{name}: wrong identity"
        assert sequence.blocks[at].node is node, f"{name}: block {at} has another identity"
        node = node.parent
    assert node is None or node.parent is None, f"{name}: the path ends before the root"
    for block in sequence.blocks[full:]:
        assert block.node is None, f"{name}: a block that is not full has a name"
        assert block.writer is sequence, f"{name}: its last block is written by another"
    table = [block.block_id for block in sequence.blocks]
    assert sequence.block_ids == table, f"{name} has a block table that is not its blocks'"
