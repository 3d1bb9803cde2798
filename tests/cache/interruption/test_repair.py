"""A manager that was interrupted is refused until `fail_step` has made it whole."""

from collections.abc import Callable

import pytest

from headstart.cache import KVCacheBlock, KVCacheManager, TokenSequence
from headstart.errors import CacheError
from tests.cache.steps import admit, finish, make_manager, start
from tests.cache.watched_policy import WatchedPolicy, watch_policy

HEAD = list(range(100, 112))


def break_off(manager: KVCacheManager, call: Callable[[], object]) -> None:
    """Interrupt the call as the pool takes blocks."""

    class Interrupted(WatchedPolicy):
        def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
            super().take(count, salt)
            raise KeyboardInterrupt

    watch_policy(manager, Interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()


def test_until_it_is_repaired_a_manager_that_was_interrupted_is_refused() -> None:
    manager = make_manager()
    finish(manager, "before", HEAD[:8])
    running = start(manager, "running", [1, 2, 3, 4])
    sequence = TokenSequence("one", HEAD)
    found = manager.get_computed_blocks(sequence)
    break_off(manager, lambda: manager.allocate_slots(sequence, 4, found))
    running.append(5)
    for call in (
        lambda: manager.allocate_slots(sequence, 4, found),
        lambda: manager.append_slots(running),
        lambda: manager.free(running),
        lambda: manager.discard([running]),
        manager.commit_step,
        manager.reset_prefix_cache,
        manager.take_events,
        manager.check,  # which went round for ever where links were half moved
    ):
        with pytest.raises(CacheError, match="was interrupted: fail_step comes first"):
            call()
    assert set(manager.fail_step()) == {running, sequence}
    assert admit(manager, TokenSequence("after", HEAD)) == 8


def test_a_repair_keeps_the_order_of_reuse() -> None:
    manager = make_manager(num_blocks=8, partial_hits=False)
    for name, token in (("old", 1), ("middle", 2), ("new", 3)):
        finish(manager, name, [token] * 8)
    finish(manager, "old again", [1] * 9)
    break_off(manager, lambda: admit(manager, TokenSequence("next", [4] * 4)))
    manager.fail_step()
    manager.check()
    finish(manager, "pressure", [5] * 16)  # two blocks are empty, two are taken
    kept = [manager.get_computed_blocks(TokenSequence("p", [t] * 9)).num_tokens for t in (1, 2, 3)]
    assert kept == [8, 0, 8]


def test_fail_step_without_a_step_is_harmless() -> None:
    manager = make_manager()
    sequence = start(manager, "one", HEAD)
    assert manager.fail_step() == manager.fail_step() == []
    assert manager.sequences == (sequence,)
    manager.check()
