"""An exception at any line of the manager: `fail_step` then restores all that is certain."""

import pickle
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

import headstart.cache
from headstart.cache import TokenSequence
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
    {"events": True, "num_blocks": 16},
    {"deduplicate": False, "events": True},
    {"eviction": "lru", "partial_hits": False, "ghost_entries": 1},
]


class Scenario:
    """Shared prefixes, hits within a step, copies, partial blocks, eviction, failure, discard."""

    def __init__(self, options: dict[str, object]) -> None:
        self.engine = TinyEngine(make_manager(**({"num_blocks": 12} | options)))
        self.sequences = [TokenSequence(f"{at}", tokens) for at, tokens in enumerate(PROMPTS)]
        self.twin = TokenSequence("twin", PROMPTS[0])

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
        salted = TokenSequence("salted", PROMPTS[6], salt="s", adapter="l")
        self.engine.admit(salted, 5)
        self.engine.commit()
        self.engine.manager.free(salted)
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

    def __init__(self, options: dict[str, object]) -> None:
        scenario = Scenario(options)
        self.lines: list[Line] = []
        self._starts: list[int] = []
        self._states: list[bytes] = []
        for part in Scenario.PARTS:
            self._starts.append(len(self.lines))
            self._states.append(pickle.dumps(scenario))
            self.lines += count_lines(partial(part, scenario))

    def interrupted(self, at: int) -> TinyEngine:
        """The engine after an exception at the line with this number."""
        part = bisect_right(self._starts, at) - 1
        scenario: Scenario = pickle.loads(self._states[part])
        error = KeyboardInterrupt() if at % 2 else MemoryError()
        within = Interruption(at - self._starts[part], error, headstart.cache)
        with pytest.raises(type(error)), within:
            Scenario.PARTS[part](scenario)
        scenario.engine.scribble()
        return scenario.engine


def probes() -> list[TokenSequence]:
    prompts = [(tokens, {}) for tokens in PROMPTS] + [(PROMPTS[6], {"salt": "s", "adapter": "l"})]
    return [
        TokenSequence("probe", [*tokens, 0, 1, 2, 3, 4], **namespace)
        for tokens, namespace in prompts
    ]


def count_lines(action: Callable[[], object]) -> list[Line]:
    # Only the cache's own lines: what another test left to the garbage collector may run here.
    with Interruption(-1, None, headstart.cache) as counted:
        action()
    return counted.lines


def goes_on(engine: TinyEngine) -> None:
    """After all of it the manager works like any other."""
    for sequence in engine.manager.sequences:
        engine.manager.free(sequence)
    engine.end_step()
    sequence = TokenSequence("after", [*PROMPTS[1], 5, 5])
    engine.admit(sequence)
    engine.commit()
    engine.append(sequence, 1, 2, 3)
    engine.commit()
    engine.manager.free(sequence)
    engine.verify(probes())


@pytest.mark.parametrize("options", CONFIGS)
def test_an_exception_at_any_line_loses_nothing_and_finds_nothing_wrong(
    options: dict[str, object],
) -> None:
    recording = Recording(options)
    for at in points(recording.lines, stride=75):
        engine = recording.interrupted(at)
        engine.manager.fail_step()
        engine.verify(probes())
        assert engine.manager.fail_step() == []
        goes_on(engine)


@pytest.mark.parametrize("options", CONFIGS)
def test_a_recovery_that_is_interrupted_is_run_again(options: dict[str, object]) -> None:
    recording = Recording(options)
    for first in points(recording.lines)[::60]:
        engine = recording.interrupted(first)
        repair = count_lines(engine.manager.fail_step)
        for second in points(repair)[first % 9 :: 9]:
            engine = recording.interrupted(first)
            with (
                pytest.raises(KeyboardInterrupt),
                Interruption(second, KeyboardInterrupt(), headstart.cache),
            ):
                engine.manager.fail_step()
            engine.manager.fail_step()
            engine.verify(probes())


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
