"""Runs of the scenario in which one call of the manager breaks off, and what must hold after it."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from headstart.cache import KVCacheManager, TokenSequence
from tests.cache.interruption.scenario import PROMPTS, Scenario, goes_on
from tests.cache.watched_policy import watch_policy

OPERATIONS = {
    "get_computed_blocks",
    "allocate_slots",
    "append_slots",
    "commit_step",
    "fail_step",
    "free",
    "discard",
    "reset_prefix_cache",
}
Call = Callable[[], object]


class BrokenOff(BaseException):
    """A call raised what the test had it raise."""


class CountedManager:
    """A manager whose operations are counted; `around` makes the one with number `at`."""

    def __init__(self, manager: KVCacheManager, at: int, around: Callable[[Call], object]) -> None:
        self._manager = manager
        self._at = at
        self._around = around
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._manager, name)
        return partial(self._operate, value) if name in OPERATIONS else value

    def _operate(self, operation: Callable[..., object], *given: object) -> object:
        self.count += 1
        if self.count - 1 != self._at:
            return operation(*given)
        return self._around(partial(operation, *given))


def count_operations(options: dict[str, Any]) -> int:
    """How many operations the scenario has."""
    return _run(Scenario(options), -1, lambda call: call()).count


def break_off(options: dict[str, Any], at: int, around: Callable[[Call], object]) -> bool:
    """Run the scenario up to the operation with this number, which `around` makes.

    True if it raised `BrokenOff`; the manager is then mended and works like a new one.
    """
    scenario = Scenario(options)
    watch_policy(scenario.engine.manager)  # in Python, where compiled code can be interrupted, too
    manager = scenario.engine.manager
    try:
        _run(scenario, at, around)
    except BrokenOff:
        pass
    else:
        return False
    scenario.engine.manager = manager
    scenario.engine.scribble()
    manager.fail_step()
    scenario.verify()
    assert manager.fail_step() == []
    goes_on(scenario)
    assert manager.reset_prefix_cache()
    fresh = KVCacheManager(manager.config, manager.names)
    for owner in manager.shares.names():
        fresh.shares.set(owner, 1.0)
    assert hits(manager) == hits(fresh)
    return True


def _run(scenario: Scenario, at: int, around: Callable[[Call], object]) -> CountedManager:
    counted = CountedManager(scenario.engine.manager, at, around)
    scenario.engine.manager = cast(KVCacheManager, counted)
    for part in Scenario.PARTS:
        part(scenario)
    return counted


def hits(manager: KVCacheManager) -> list[int]:
    """The tokens that each prompt hits, one after another."""
    found = []
    for at, tokens in enumerate([*PROMPTS, *PROMPTS]):
        sequence = TokenSequence(f"hits {at}", tokens)
        computed = manager.get_computed_blocks(sequence)
        new = len(tokens) - computed.num_tokens
        assert manager.allocate_slots(sequence, new, computed) is not None
        manager.commit_step()
        manager.free(sequence)
        manager.check()
        found.append(computed.num_tokens)
    return found
