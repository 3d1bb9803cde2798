"""`check()` detects every kind of broken invariant."""

from collections.abc import Callable

import pytest

from headstart.cache import KVCacheManager, TokenSequence
from headstart.cache.block import Branches, PartialNode, PrefixNode, make_node
from headstart.cache.free_queue import FreeBlockQueue
from headstart.cache.identity import BlockKey
from tests.cache.steps import admit, finish, make_manager, start

LONG = list(range(100, 112))


def busy_manager(**options: object) -> KVCacheManager:
    """Two cached prefixes that part, a partial block, a running request, and one in its step."""
    manager = make_manager(num_blocks=14, ghost_entries=2, **options)
    finish(manager, "first", LONG)
    finish(manager, "branch", [*LONG[:4], 1, 2, 3, 4, 5])
    start(manager, "running", [*LONG[:8], 9, 9])
    admit(manager, TokenSequence("half", [*range(200, 211)]), 5)
    manager.check()
    return manager


def running(manager: KVCacheManager) -> TokenSequence:
    return manager.sequences[0]


def partial_block(manager: KVCacheManager) -> TokenSequence:
    return manager.sequences[1]


def first_node(manager: KVCacheManager) -> PrefixNode:
    node = manager.pool.blocks[0].node
    assert node is not None
    return node


def lose_a_free_block(manager: KVCacheManager) -> None:
    manager.pool.free.take(1)


def free_a_held_block(manager: KVCacheManager) -> None:
    manager.pool.free.release([running(manager).blocks[-1]])


def break_a_link(manager: KVCacheManager) -> None:
    blocks = list(manager.pool.free)
    blocks[1].prev_free_block = blocks[1]


def miscount_the_queue(manager: KVCacheManager) -> None:
    queue = manager.pool.free._queue  # type: ignore[attr-defined]
    assert isinstance(queue, FreeBlockQueue)
    queue.length += 1


def miscount_references(manager: KVCacheManager) -> None:
    running(manager).blocks[0].ref_cnt += 1


def renumber_a_block(manager: KVCacheManager) -> None:
    running(manager).blocks[-1]._block_id = 99


def fill_without_a_name(manager: KVCacheManager) -> None:
    manager.pool.index.unwritten.add(partial_block(manager).blocks[-1])


def fill_an_unheld_block(manager: KVCacheManager) -> None:
    manager.pool.index.unwritten.add(list(manager.pool.free)[-1])


def name_a_block_outside_the_index(manager: KVCacheManager) -> None:
    next(iter(manager.pool.free)).node = make_node(first_node(manager), BlockKey(bytes(16)))


def name_a_block_twice(manager: KVCacheManager) -> None:
    next(iter(manager.pool.free)).node = first_node(manager)


def index_a_copy_that_does_not_exist(manager: KVCacheManager) -> None:
    manager.pool.copies[first_node(manager)] = {}


def omit_a_copy_from_the_index(manager: KVCacheManager) -> None:
    object.__setattr__(manager.config, "deduplicate", False)
    manager.pool.copies[first_node(manager)] = {}


def index_a_wrong_copy(manager: KVCacheManager) -> None:
    object.__setattr__(manager.config, "deduplicate", False)
    manager.pool.copies[first_node(manager)] = {next(iter(manager.pool.free)): None}


def hold_another_s_block(manager: KVCacheManager) -> None:
    first_node(manager).block = next(iter(manager.pool.free))


def cut_a_key_short(manager: KVCacheManager) -> None:
    first_node(manager).key = BlockKey(bytes(12))


def name_a_partial_block(manager: KVCacheManager) -> None:
    tail = next(b.node for b in manager.pool.blocks if isinstance(b.node, PartialNode))
    tail.key = BlockKey(bytes(16))


def hold_a_partial_block(manager: KVCacheManager) -> None:
    manager.pool.touch([b for b in manager.pool.blocks if isinstance(b.node, PartialNode)])


def mix_up_children(manager: KVCacheManager) -> None:
    branches = first_node(manager).child
    assert isinstance(branches, Branches)
    branches.nodes[BlockKey(bytes(16))] = branches.nodes.pop(branches.order[0])


def lose_the_order(manager: KVCacheManager) -> None:
    branches = first_node(manager).child
    assert isinstance(branches, Branches)
    branches.order.reverse()


def lose_one_in_the_order(manager: KVCacheManager) -> None:
    branches = first_node(manager).child
    assert isinstance(branches, Branches)
    branches.order.pop()


def retain_a_useless_node(manager: KVCacheManager) -> None:
    node = running(manager).node
    assert node is not None
    manager.pool.index.child(node, BlockKey(bytes(16)))


def keep_too_many_ghosts(manager: KVCacheManager) -> None:
    manager.pool.index._ghosts.extend([first_node(manager)] * 3)


def make_a_partial_block_a_ghost(manager: KVCacheManager) -> None:
    manager.pool.index._ghosts.append(make_node(None, BlockKey(b""), PartialNode))


def be_an_ancestor_while_cached(manager: KVCacheManager) -> None:
    manager.pool.index._ancestors.add(first_node(manager))


def outlive_beyond_the_index(manager: KVCacheManager) -> None:
    manager.pool.index._ancestors.add(make_node(None, BlockKey(b"")))


def use_no_block(manager: KVCacheManager) -> None:
    running(manager).blocks.append(manager.pool.take(1, None)[0])


def miscount_slots(manager: KVCacheManager) -> None:
    running(manager).capacity += 1


def compute_unknown_tokens(manager: KVCacheManager) -> None:
    running(manager).num_computed_tokens += 1


def name_too_few(manager: KVCacheManager) -> None:
    running(manager).num_indexed -= 1


def forget_the_path(manager: KVCacheManager) -> None:
    running(manager).node = None


def break_the_path(manager: KVCacheManager) -> None:
    running(manager).keys[0] = BlockKey(bytes(16))


def hold_another_identity(manager: KVCacheManager) -> None:
    blocks = running(manager).blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def list_another_block(manager: KVCacheManager) -> None:
    running(manager).block_ids[-1] += 1


def share_a_block_that_is_not_full(manager: KVCacheManager) -> None:
    manager.pool.touch(running(manager).blocks[-1:])
    partial_block(manager).blocks[-1] = running(manager).blocks[-1]


def reuse_too_much(manager: KVCacheManager) -> None:
    running(manager).num_reused = 3


def switch_too_far(manager: KVCacheManager) -> None:
    running(manager).switched.add(2)


def announce_something_else(manager: KVCacheManager) -> None:
    partial_block(manager).in_progress = (partial_block(manager).namespace, BlockKey(b""))


def announce_a_removed_sequence(manager: KVCacheManager) -> None:
    sequence = TokenSequence("gone", [1, 2, 3, 4])
    sequence.cut(4)
    manager._in_progress[(sequence.root, sequence.keys[0])] = sequence
    sequence.in_progress = (sequence.root, sequence.keys[0])


BROKEN: list[tuple[Callable[[KVCacheManager], None], str]] = [
    (lose_a_free_block, "a block is neither free nor held"),
    (free_a_held_block, "a held block is on the free queue"),
    (break_a_link, "broken link"),
    (miscount_the_queue, "the free queue has a block twice"),
    (miscount_references, "is in 1 block tables"),
    (renumber_a_block, "has another id"),
    (fill_without_a_name, "is unwritten and has no identity"),
    (fill_an_unheld_block, "is unwritten and no sequence holds it"),
    (name_a_block_outside_the_index, "has an identity that no lookup finds"),
    (name_a_block_twice, "is not listed exactly once for its node"),
    (index_a_copy_that_does_not_exist, "a block was cached twice"),
    (omit_a_copy_from_the_index, "an entry without a block"),
    (index_a_wrong_copy, "is not a copy, or not held"),
    (hold_another_s_block, "is not listed exactly once for its node"),
    (cut_a_key_short, "a block of 3 tokens has an identity"),
    (name_a_partial_block, "a partial block of 4 tokens"),
    (hold_a_partial_block, "a block is neither free nor held"),
    (mix_up_children, "an identity is misplaced|differs from written children"),
    (lose_the_order, "`order` is not sorted"),
    (lose_one_in_the_order, "`order` differs from written children"),
    (retain_a_useless_node, "an unused node is left"),
    (keep_too_many_ghosts, "there are too many ghosts"),
    (make_a_partial_block_a_ghost, "a partial block is a ghost"),
    (be_an_ancestor_while_cached, "neither a ghost nor an ancestor"),
    (outlive_beyond_the_index, "a removed node is still an ancestor"),
    (use_no_block, "is in 1 block tables|uses 3"),
    (miscount_slots, "running has a wrong capacity"),
    (compute_unknown_tokens, "running computed too many tokens"),
    (name_too_few, "running has 2 full blocks, and 1 are indexed"),
    (forget_the_path, "running: wrong identity"),
    (break_the_path, "running: wrong identity"),
    (hold_another_identity, "another identity"),
    (list_another_block, "running: the block table differs from the blocks"),
    (share_a_block_that_is_not_full, "neither free nor held|another sequence holds"),
    (reuse_too_much, "running reuses blocks that are not indexed"),
    (switch_too_far, "running switched a block that is not indexed"),
    (announce_something_else, "half announces another block"),
    (announce_a_removed_sequence, "gone announces a block after its end"),
]


@pytest.mark.parametrize(("damage", "complaint"), BROKEN)
def test_a_broken_invariant_is_detected(
    damage: Callable[[KVCacheManager], None], complaint: str
) -> None:
    manager = busy_manager()
    damage(manager)
    with pytest.raises(AssertionError, match=complaint):
        manager.check()
