"""`reset` after an exception in the middle of a method leaves an empty, whole manager."""

from collections.abc import Sequence

import pytest

from headstart.cache import AllBlocksCleared, KVCacheBlock, TokenSequence
from headstart.cache.eviction import POLICIES
from tests.cache.snapshot import snapshot
from tests.cache.steps import admit, finish, hits, make_manager, start
from tests.cache.watched_policy import WatchedPolicy, watch_policy

PROMPT = list(range(100, 112))


class Broken(WatchedPolicy):
    """A policy that raises in the middle of each method that moves blocks."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        super().take(count, salt)
        raise MemoryError

    def claim(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._policy.claim(blocks)
        raise MemoryError

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        raise MemoryError


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("method", ["allocate_slots", "append_slots", "free", "hit"])
def test_a_manager_that_an_exception_left_half_changed_is_empty_after_reset(
    eviction: str, method: str
) -> None:
    manager = make_manager(eviction=eviction, events=True)
    finish(manager, "before", PROMPT[:8])
    running = start(manager, "running", [1, 2, 3, 4])
    running.append(5)
    new = TokenSequence("new", PROMPT if method == "hit" else [7] * 9)
    match = manager.get_computed_blocks(new)
    watch_policy(manager, Broken)
    with pytest.raises(MemoryError):
        if method == "append_slots":
            manager.append_slots(running)
        elif method == "free":
            manager.free(running)
        else:
            manager.allocate_slots(new, 1, match)
    manager.reset()
    manager.check()
    assert manager.sequences == () and manager.num_free_blocks == 10
    assert running.blocks == [] and new.blocks == []
    assert hits(manager, PROMPT) == 0
    assert isinstance(manager.take_events()[-1], AllBlocksCleared)
    finish(manager, "after", PROMPT)
    assert hits(manager, PROMPT) == 11
    assert admit(manager, new) == (11 if method == "hit" else 0)


def test_a_reset_removes_all_nodes_of_the_failed_step() -> None:
    manager = make_manager()
    for number in range(3):
        admit(manager, TokenSequence(f"{number}", [1, 2, 3, 4, number, 6, 7, 8, 9]))
    in_tree = slice(3, 9)  # of a snapshot: copies, roots, ghosts, sequences, unwritten siblings
    empty = snapshot(make_manager())[in_tree]
    assert all(a != b for a, b in zip(snapshot(manager)[4:9:4], empty[1:6:4], strict=True))
    manager.reset()
    assert snapshot(manager)[in_tree] == empty


def test_admissions_of_the_failed_step_do_not_count() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("one", PROMPT))
    manager.reset()
    manager.commit_step()
    assert manager.stats.requests == 0


def test_a_lookup_from_before_a_reset_is_refused() -> None:
    manager = make_manager()
    finish(manager, "before", PROMPT)
    sequence = TokenSequence("late", PROMPT)
    match = manager.get_computed_blocks(sequence)
    manager.reset()
    with pytest.raises(Exception, match="older than an eviction"):
        manager.allocate_slots(sequence, 1, match)
