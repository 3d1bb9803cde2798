"""An exception at any line of the manager: `fail_step` then restores all that is certain."""

import pickle
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import headstart.cache.eviction
from headstart.cache import (
    BlockNames,
    CacheConfig,
    KVCacheManager,
    Mark,
    PublicBlocks,
    TokenSequence,
)
from headstart.errors import CacheError
from tests.cache.steps import admit, finish, make_manager, start
from tests.cache.tiny_engine import TinyEngine
from tests.interruptions import Interruption, Line, points

HEAD = list(range(100, 112))
PROMPTS = [
    HEAD,
    [*HEAD[:6], 1, 2, 3, 4, 5, 6],
    [*HEAD[:8], 7, 7, 7],
    [*HEAD[:4], 8, 8],
    [*HEAD[:4], 8, 9, 9, 9, 1],
    list(range(200, 218)),
    list(range(300, 316)),
]
CONFIGS = [
    {},
    {"events": True, "num_blocks": 16, "marks": True},
    {"deduplicate": False, "events": True},
    {"eviction": "lru", "partial_hits": False, "ghost_entries": 1},
    {"eviction": "fair-lru", "salts": ("a", "b/x"), "marks": True, "num_blocks": 15},
]
"""salts: those of the prompts in turn, whose first block is public then. marks: set some."""


def sequences(salts: Sequence[str | None]) -> list[TokenSequence]:
    """Each prompt with the next of the salts, the first once more, and one with a salt of its own.

    The first block of `HEAD` is public.
    """
    public = PublicBlocks()
    public.publish(HEAD[:4], 4)
    made = [
        TokenSequence(f"{at}", tokens, salt=salts[at % len(salts)], public=public)
        for at, tokens in enumerate([*PROMPTS, PROMPTS[0]])
    ]
    return [*made, TokenSequence("salted", PROMPTS[6], salt="s", adapter="l")]


def still() -> float:
    """A clock: with one that goes, another run might execute other lines."""
    return 0.0


OWNERS = str(Path(headstart.cache.eviction.__file__).parent)


class Scenario:
    """Shared prefixes, hits within a step, copies, partial blocks, eviction, failure, discard."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {"num_blocks": 12, "block_size": 4} | options
        self.salts: tuple[str | None, ...] = options.pop("salts", (None,))
        marks = options.pop("marks", False)
        config = CacheConfig(**options)
        self.engine = TinyEngine(KVCacheManager(config, BlockNames(4), still))
        *self.sequences, self.twin, self.salted = sequences(self.salts)
        self.all = [*self.sequences, self.twin, self.salted]
        for sequence in self.all[::2] if marks else ():
            sequence.marks = [Mark(8, 600.0)]

    def verify(self) -> None:
        """Nothing is lost or wrong, and each sequence counts once if it was admitted."""
        manager = self.engine.manager
        self.engine.verify(probes(self.salts))
        for sequence in self.all:
            is_running = any(sequence is one for one in manager.sequences)
            assert manager.is_known(sequence) == bool(sequence.blocks) == is_running
        assert manager.stats.requests == sum(one.step >= 0 for one in self.all), "counted wrong"

    def share(self) -> None:
        a, b, c, *_ = self.sequences
        self.engine.admit(a)
        self.engine.admit(b)  # hits what the step fills
        self.engine.commit()
        self.engine.append(a, 1, 2, 3)
        self.engine.admit(c)  # a copy
        self.engine.commit()

    def compute_twice(self) -> None:
        _, b, _, d, *_ = self.sequences
        self.engine.manager.shares.set("a", 1.0)  # whose blocks are nobody's until now
        self.engine.admit(self.twin, reads=False)
        self.engine.commit()
        self.engine.manager.free(b)
        self.engine.manager.free(self.twin)
        self.engine.admit(d)
        self.engine.commit()

    def outgrow(self) -> None:
        a, _, _, d, e, *_ = self.sequences
        self.engine.append(a, 4, 5)
        self.engine.manager.free(d)  # leaves a partial block
        self.engine.commit()
        self.engine.admit(e, 2)  # outgrows it
        self.engine.commit()

    def discard(self) -> None:
        a, _, c, _, e, *_ = self.sequences
        self.engine.append(e, count=1)
        self.engine.append(a, 6, 6, 6, 6)
        self.engine.may_forget = True
        self.engine.manager.discard([a])
        self.engine.commit()
        self.engine.may_forget = False
        self.engine.manager.free(c)
        self.engine.replay()

    def evict(self) -> None:
        *_, e, f, _ = self.sequences
        self.engine.admit(self.salted, 5)
        self.engine.commit()
        self.engine.manager.free(self.salted)
        self.engine.admit(f)  # evicts
        self.engine.commit()
        self.engine.manager.free(f)
        self.engine.manager.free(e)

    def fail(self) -> None:
        g = self.sequences[-1]
        self.engine.admit(g)
        self.engine.scribble()
        self.engine.manager.fail_step()
        self.engine.end_step()
        self.engine.admit(g)
        self.engine.commit()
        self.engine.manager.free(g)

    def reset(self) -> None:
        self.engine.may_forget = True
        assert self.engine.manager.reset_prefix_cache()
        self.engine.end_step()
        self.engine.may_forget = False

    PARTS = (share, compute_twice, outgrow, discard, evict, fail, reset)


class Recording:
    """The lines of a scenario, and all that there was before each part, to begin there again."""

    def __init__(self, options: dict[str, Any]) -> None:
        scenario = Scenario(options)
        self.lines: list[Line] = []
        self._has_salts = "salts" in options
        self._starts: list[int] = []
        self._states: list[bytes] = []
        for part in Scenario.PARTS:
            self._starts.append(len(self.lines))
            self._states.append(pickle.dumps(scenario))
            self.lines += count_lines(partial(part, scenario))

    def points(self, stride: int | None = None) -> list[int]:
        """As `points`; with salts, of lines that say nothing of owners only each third."""
        chosen = points(self.lines, stride)
        if self._has_salts:
            owners = [at for at in chosen if self.lines[at][0].startswith(OWNERS)]
            chosen = sorted({*owners, *chosen[::3]})
        return chosen

    def interrupted(self, at: int) -> Scenario:
        """The scenario after an exception at the line with this number."""
        part = bisect_right(self._starts, at) - 1
        scenario: Scenario = pickle.loads(self._states[part])
        error = KeyboardInterrupt() if at % 2 else MemoryError()
        within = Interruption(at - self._starts[part], error, headstart.cache)
        with pytest.raises(type(error)), within:
            Scenario.PARTS[part](scenario)
        scenario.engine.scribble()
        return scenario


@cache
def probes(salts: tuple[str | None, ...]) -> list[TokenSequence]:
    """What would hit all that is cached, and goes on. A lookup changes its keys alone."""
    made = [one for one in sequences(salts) if one.token_ids != HEAD or one.request_id == "0"]
    for sequence in made:
        for token in range(5):
            sequence.append(token)
    return made


def count_lines(action: Callable[[], object]) -> list[Line]:
    # Only the cache's own lines: what another test left to the garbage collector may run here.
    with Interruption(-1, None, headstart.cache) as counted:
        action()
    return counted.lines


def goes_on(scenario: Scenario) -> None:
    """After all of it the manager works like any other."""
    engine = scenario.engine
    for sequence in engine.manager.sequences:
        engine.manager.free(sequence)
    engine.end_step()
    sequence = TokenSequence("after", [*PROMPTS[1], 5, 5])
    engine.admit(sequence)
    engine.commit()
    engine.append(sequence, 1, 2, 3)
    engine.commit()
    engine.manager.free(sequence)
    engine.verify(probes(scenario.salts))


@pytest.mark.parametrize("options", CONFIGS)
def test_an_exception_at_any_line_loses_nothing_and_finds_nothing_wrong(
    options: dict[str, Any],
) -> None:
    recording = Recording(options)
    for at in recording.points(stride=75):
        scenario = recording.interrupted(at)
        scenario.engine.manager.fail_step()
        scenario.verify()
        assert scenario.engine.manager.fail_step() == []
        goes_on(scenario)


@pytest.mark.parametrize("options", CONFIGS)
def test_a_recovery_that_is_interrupted_is_run_again(options: dict[str, Any]) -> None:
    recording = Recording(options)
    for first in recording.points()[::60]:
        repair = count_lines(recording.interrupted(first).engine.manager.fail_step)
        for second in points(repair)[first % 9 :: 9]:
            scenario = recording.interrupted(first)
            with (
                pytest.raises(KeyboardInterrupt),
                Interruption(second, KeyboardInterrupt(), headstart.cache),
            ):
                scenario.engine.manager.fail_step()
            scenario.engine.manager.fail_step()
            scenario.verify()


def break_off(call: Callable[[], object]) -> None:
    """Interrupt the call as the pool takes blocks."""

    class InTake(Interruption):
        def line(self, frame: FrameType, event: str, arg: object) -> object:
            if frame.f_code.co_qualname == "BlockPool.take" and frame.f_locals.get("taken"):
                raise KeyboardInterrupt
            return self.line

    with pytest.raises(KeyboardInterrupt), InTake():
        call()


def test_until_it_is_repaired_a_manager_that_was_interrupted_is_refused() -> None:
    manager = make_manager()
    finish(manager, "before", HEAD[:8])
    running = start(manager, "running", [1, 2, 3, 4])
    sequence = TokenSequence("one", HEAD)
    found = manager.get_computed_blocks(sequence)
    break_off(lambda: manager.allocate_slots(sequence, 4, found))
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
    break_off(lambda: admit(manager, TokenSequence("next", [4] * 4)))
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
