"""All invariants of the manager, which tests check after every step."""

from collections import Counter
from collections.abc import Iterator

from headstart.cache.block import Branches, KVCacheBlock, PartialNode, PrefixNode
from headstart.cache.config import CacheConfig
from headstart.cache.identity import count_tokens
from headstart.cache.pool import BlockPool
from headstart.cache.sequence import TokenSequence

Sequences = tuple[TokenSequence, ...]


def check_everything(config: CacheConfig, pool: BlockPool, sequences: Sequences) -> None:
    """Raise AssertionError if an invariant is broken. Reads all blocks, nodes and sequences."""
    _check_blocks(pool, sequences)
    nodes = {node for root in pool.index.roots() for node in _descend(root)}
    _check_index(config, pool, nodes)
    for sequence in sequences:
        _check_sequence(config, sequence)


def _descend(root: PrefixNode) -> Iterator[PrefixNode]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children()


def _check_blocks(pool: BlockPool, sequences: Sequences) -> None:
    """Check that reference counts match the block tables, and that all other blocks are free."""
    held = Counter(block.block_id for s in sequences for block in s.blocks)
    pool.free.check()
    free = [block.block_id for block in pool.free]
    assert len(free) == len(set(free)) == len(pool.free), "the free queue has a block twice"
    assert set(free).isdisjoint(held), "a held block is on the free queue"
    assert len(free) + len(held) == len(pool.blocks), "a block is neither free nor held"
    for i, block in enumerate(pool.blocks):
        assert block.block_id == i, f"block {i} has another id"
        assert block.ref_cnt == held[i], f"{block} is in {held[i]} block tables"
        assert block.next_free_block.prev_free_block is block, f"{block}: broken link"


def _check_index(config: CacheConfig, pool: BlockPool, nodes: set[PrefixNode]) -> None:
    """Check that blocks and nodes refer to each other, and that the tree is in order."""
    for block in pool.index.unwritten:
        assert block.node is not None, f"{block} is unwritten and has no identity"
        assert block.ref_cnt, f"{block} is unwritten and no sequence holds it"
    for block in pool.blocks:
        if block.node is not None:
            assert block.node in nodes, f"{block} has an identity that no lookup finds"
            holders: list[KVCacheBlock | None] = [block.node.block]
            holders += pool.copies.get(block.node, [])
            assert holders.count(block) == 1, f"{block} is not listed exactly once for its node"
    assert not (pool.copies and config.deduplicate), "a block was cached twice"
    for node, copies in pool.copies.items():
        assert copies, "`copies` has an entry without a block"
        for block in copies:
            assert block.node is node and block.ref_cnt, f"{block} is not a copy, or not held"
    pool.index.check(nodes)
    for node in nodes:
        if node.block is not None:
            assert node.block.node is node, f"{node.block} has another identity than its node"
        if node.parent is not None:
            _check_node(config, pool, node)


def _check_node(config: CacheConfig, pool: BlockPool, node: PrefixNode) -> None:
    assert node.parent is not None
    tokens = count_tokens(node.key)
    if isinstance(node, PartialNode):
        assert 0 < tokens < config.block_size, f"a partial block of {tokens} tokens"
        assert not node.children(), "a partial block has children"
        assert node.block is not None, "a partial block is empty"
        assert node.block.ref_cnt == 0, "a partial block is held"
    else:
        assert tokens == config.block_size, f"a block of {tokens} tokens has an identity"
    branches = node.parent.child
    if isinstance(branches, Branches):
        written = node.block is not None and node.block not in pool.index.unwritten
        assert branches.order.count(node.key) == written, "`order` differs from written children"
        assert branches.order == sorted(branches.order), "`order` is not sorted"
        assert branches.nodes.get(node.key) is node, "an identity is misplaced"


def _check_sequence(config: CacheConfig, sequence: TokenSequence) -> None:
    """Check that the block table covers the computed tokens with blocks of the right identity."""
    name, size = sequence.request_id, config.block_size
    # With states or windows, a sequence may hold cached blocks beyond its computed tokens.
    ahead = sequence.num_reused if config.num_states or config.num_window_blocks else 0
    used = max(-(-sequence.num_computed_tokens // size), ahead)
    assert len(sequence.blocks) == used, f"{name} holds {len(sequence.blocks)} blocks, uses {used}"
    assert sequence.capacity == used * size, f"{name} has a wrong capacity"
    num_tokens = len(sequence.token_ids)
    assert sequence.num_computed_tokens <= num_tokens, f"{name} computed too many tokens"
    full = sequence.num_computed_tokens // size if config.enable_prefix_caching else 0
    full = max(full, ahead) if sequence.is_stored else sequence.num_reused
    count = sequence.num_indexed
    assert count == full, f"{name} has {full} full blocks, and {count} are indexed"
    node = sequence.node
    for i in range(full - 1, -1, -1):
        assert node is not None and node.key == sequence.keys[i], f"{name}: wrong identity"
        assert sequence.blocks[i].node is node, f"{name}: block {i} has another identity"
        node = node.parent
    assert node is None or node.parent is None, f"{name}: the path ends before the root"
    for block in sequence.blocks[full:]:
        assert block.node is None, f"{name}: a block that is not full is indexed"
        assert block.ref_cnt == 1, f"{name}: another sequence holds a block that is not full"
    assert sequence.num_reused <= sequence.num_indexed, f"{name} reuses blocks that are not indexed"
    assert all(i < sequence.num_indexed for i in sequence.switched), (
        f"{name} switched a block that is not indexed"
    )
    table = [block.block_id for block in sequence.blocks]
    assert sequence.block_ids == table, f"{name}: the block table differs from the blocks"
