"""The ghost entries and ancestors that the index retains of evicted prefixes."""

import pytest

from headstart.cache import KVCacheManager, MissReason, Namespace, TokenSequence
from headstart.cache.block import PrefixNode
from headstart.cache.index import OLD_GHOSTS
from tests.cache.steps import admit, finish, hits, make_manager, start


def all_nodes(manager: KVCacheManager) -> list[PrefixNode]:
    """Return every node but the roots."""
    nodes: list[PrefixNode] = []
    todo = [child for root in manager.pool.index.roots() for child in root.children()]
    while todo:
        nodes.append(todo.pop())
        todo += nodes[-1].children()
    return nodes


def evicted_nodes(manager: KVCacheManager) -> int:
    return sum(node.block is None for node in all_nodes(manager))


def numbered(at: int, blocks: int = 4) -> list[int]:
    """Return a prompt that shares nothing with those of other numbers."""
    return [1000 * at + token for token in range(4 * blocks)]


@pytest.mark.parametrize("ghosts", [0, 1, 3, 7])
@pytest.mark.parametrize("eviction", ["lru", "empty-first-lru", "adaptive-lru"])
def test_the_number_of_ghosts_is_limited(ghosts: int, eviction: str) -> None:
    manager = make_manager(
        num_blocks=4, partial_hits=False, ghost_entries=ghosts, eviction=eviction
    )
    for at in range(6):
        finish(manager, f"request {at}", numbered(at))
        manager.check()
        first_blocks = max(0, (4 * at - ghosts) // 4)  # of prefixes that are no ghosts any more
        assert evicted_nodes(manager) == min(ghosts, 4 * at) + min(
            OLD_GHOSTS * ghosts, first_blocks
        )


def test_there_is_a_ghost_for_every_ten_blocks_by_default() -> None:
    manager = make_manager(num_blocks=20, partial_hits=False)
    for at in range(12):  # evict 28 blocks, 6 of them a prompt's first that is no ghost any more
        finish(manager, f"request {at}", numbered(at))
    assert evicted_nodes(manager) == 2 + 6


def test_a_prefix_cached_again_does_not_expire_at_its_old_time() -> None:
    manager = make_manager(num_blocks=4, partial_hits=False, ghost_entries=4)
    for at in (0, 1, 0):  # the first is evicted, a ghost, and then cached again
        finish(manager, f"request {at}", numbered(at))
    assert hits(manager, [*numbered(0), 1]) == 16
    finish(manager, "request 2", numbered(2))
    manager.check()
    assert hits(manager, [*numbered(0), 1]) == 0
    assert manager.explain(TokenSequence("probe", numbered(0))).reason is MissReason.EVICTED


def test_siblings_are_removed_one_by_one() -> None:
    manager = make_manager(num_blocks=6, partial_hits=False, ghost_entries=1)
    head = [7] * 4
    for at in range(5):
        finish(manager, f"request {at}", [*head, at, at, at, at])
    assert len(all_nodes(manager)) == 6
    for at in range(30):
        finish(manager, f"other {at}", numbered(at + 1))
        manager.check()
    assert len(all_nodes(manager)) <= 6 + 1 + OLD_GHOSTS
    assert manager.explain(TokenSequence("probe", [*head, 9])).reason is MissReason.UNSEEN


def test_a_branch_grows_again_after_its_removal() -> None:
    manager = make_manager(num_blocks=4, partial_hits=False, ghost_entries=0)
    for _ in range(2):
        for at in range(3):
            finish(manager, f"request {at}", [*[7] * 4, at, at, at, at])
        finish(manager, "other", numbered(1))
        manager.check()
        assert len(all_nodes(manager)) == 4


def test_a_node_outlives_its_time_for_a_descendant_and_is_removed_with_it() -> None:
    """A failed step forgets its blocks first to last, so the time of a parent ends first."""
    manager = make_manager(num_blocks=4, ghost_entries=1)
    admit(manager, TokenSequence("fails", numbered(1, blocks=3)))
    manager.fail_step()
    manager.check()
    assert evicted_nodes(manager) == 3  # one ghost and its ancestors
    admit(manager, TokenSequence("fails, too", [5, 5, 5, 5]))
    manager.fail_step()
    manager.check()
    assert evicted_nodes(manager) == 1


def test_an_ancestor_may_be_cached_again() -> None:
    manager = make_manager(num_blocks=4, ghost_entries=1)
    prompt = numbered(1, blocks=3)
    admit(manager, TokenSequence("fails", prompt))
    manager.fail_step()
    sequence = start(manager, "again", prompt[:8])
    manager.check()
    assert evicted_nodes(manager) == 1
    manager.free(sequence)
    assert hits(manager, [*prompt[:8], 0]) == 8


def test_a_node_that_is_a_ghost_twice_is_removed_once() -> None:
    """Its second time ends when its namespace has another root, which must stay."""
    manager = make_manager(num_blocks=1, ghost_entries=2)
    twice, salted = [1] * 4, {"salt": "s"}
    finish(manager, "first time", twice, **salted)
    finish(manager, "evicts it", [2] * 4)
    finish(manager, "second time", twice, **salted)
    finish(manager, "evicts it again", [3] * 4)
    finish(manager, "another of that salt", [4] * 4, **salted)
    finish(manager, "evicts that one", [5] * 4)
    manager.check()
    probe = TokenSequence("probe", [4] * 4, salt="s")
    assert manager.explain(probe).reason is MissReason.EVICTED
    for at in range(6, 6 + (1 + OLD_GHOSTS) * 2 + 1):
        finish(manager, f"request {at}", [at] * 4)
        manager.check()
    assert manager.pool.index.root(Namespace(None, "s")) is None


def test_a_node_that_outlives_its_time_does_not_retain_others() -> None:
    manager = make_manager(num_blocks=8, partial_hits=False, ghost_entries=1)
    finish(manager, "gap", numbered(1, blocks=2))
    gap, child = manager.pool.blocks[:2]
    manager.pool.touch([gap, child])
    manager.pool.forget([gap])  # as if it had been taken, its child not
    manager.pool.release([gap])
    for at in range(2, 6):
        sequence = TokenSequence(f"request {at}", numbered(at, blocks=3))
        assert manager.allocate_slots(sequence, 12) is not None
        manager.commit_step()
        manager.free(sequence)
    manager.pool.release([child])
    manager.check()
    assert manager.pool.index._ancestors == {child.node.parent}  # type: ignore[union-attr]
    assert evicted_nodes(manager) == 3  # a ghost, a prompt's first block, and the gap
    manager.free(start(manager, "closes the gap", [*numbered(1, blocks=2), 0]))
    manager.check()
    assert manager.pool.index._ancestors == set()
    assert hits(manager, [*numbered(1, blocks=2), 0]) == 8


def test_partial_blocks_are_not_ghosts() -> None:
    manager = make_manager(num_blocks=1, ghost_entries=1)
    finish(manager, "whole", [1, 2, 3, 4])
    for at in range(3):
        finish(manager, f"tail {at}", [at + 5] * 2)
        manager.check()
    assert manager.explain(TokenSequence("probe", [1, 2, 3, 4])).reason is MissReason.EVICTED


def test_a_namespace_is_removed_with_its_last_prefix() -> None:
    manager = make_manager(num_blocks=2, ghost_entries=0)
    for adapter, salt in [("a", "s"), ("b", "s"), ("a", None), (None, None)]:
        finish(manager, f"{adapter} {salt}", numbered(1, blocks=2), adapter=adapter, salt=salt)
        assert [root.namespace for root in manager.pool.index.roots()] == [Namespace(adapter, salt)]
        assert list(manager.pool.index._roots) == [salt]
        manager.check()


def test_a_partial_block_is_removed_with_its_namespace() -> None:
    manager = make_manager(num_blocks=1, ghost_entries=3)
    finish(manager, "tail", [1, 2], salt="s")
    assert len(manager.pool.index.roots()) == 1
    finish(manager, "other", [3, 4])
    assert [root.namespace.salt for root in manager.pool.index.roots()] == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_reset_forgets_ghosts(fails: bool) -> None:
    manager = make_manager(num_blocks=4, partial_hits=False, ghost_entries=2)
    finish(manager, "evicted", numbered(1))
    finish(manager, "other", numbered(2), salt="s")
    if fails:
        admit(manager, TokenSequence("fails", numbered(3)))
        manager.fail_step()
    assert manager.reset_prefix_cache()
    manager.check()
    assert all_nodes(manager) == []
    for at in (4, 5, 6):
        finish(manager, f"request {at}", numbered(at))
        manager.check()
        assert hits(manager, [*numbered(at), 0]) == 16
        before = manager.explain(TokenSequence("probe", numbered(at - 1))).reason
        assert before is (MissReason.UNSEEN if at == 4 else MissReason.EVICTED)
