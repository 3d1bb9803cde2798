"""An exception at any line of the manager: `fail_step` then restores all that is certain."""

from collections.abc import Callable
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


def run(engine: TinyEngine) -> None:
    """Shared prefixes, hits within a step, copies, partial blocks, eviction, failure, discard."""
    manager = engine.manager
    a, b, c, d, e, f, g = (TokenSequence(f"{at}", tokens) for at, tokens in enumerate(PROMPTS))
    engine.admit(a)
    engine.admit(b)  # hits what the step fills
    engine.commit()
    engine.append(a, 1, 2, 3)
    engine.admit(c)  # a copy
    engine.commit()
    twin = TokenSequence("twin", PROMPTS[0])
    engine.admit(twin, reads=False)
    engine.commit()
    manager.free(b)
    manager.free(twin)
    engine.admit(d)
    engine.commit()
    engine.append(a, 4, 5)
    manager.free(d)  # leaves a partial block
    engine.commit()
    engine.admit(e, 2)  # outgrows it
    engine.commit()
    engine.append(e, count=1)
    engine.append(a, 6, 6, 6, 6)
    engine.may_forget = True
    manager.discard([a])
    engine.commit()
    engine.may_forget = False
    manager.free(c)
    engine.replay()
    salted = TokenSequence("salted", PROMPTS[6], salt="s", adapter="l")
    engine.admit(salted, 5)
    engine.commit()
    manager.free(salted)
    engine.admit(f)  # evicts
    engine.commit()
    manager.free(f)
    manager.free(e)
    engine.admit(g)
    engine.scribble()
    manager.fail_step()
    engine.end_step()
    engine.admit(g)
    engine.commit()
    manager.free(g)
    engine.may_forget = True
    assert manager.reset_prefix_cache()
    engine.end_step()
    engine.may_forget = False


def probes() -> list[TokenSequence]:
    prompts = [(tokens, {}) for tokens in PROMPTS] + [(PROMPTS[6], {"salt": "s", "adapter": "l"})]
    return [
        TokenSequence("probe", [*tokens, 0, 1, 2, 3, 4], **namespace)
        for tokens, namespace in prompts
    ]


def make_engine(options: dict[str, object]) -> TinyEngine:
    return TinyEngine(make_manager(**({"num_blocks": 12} | options)))


def count_lines(action: Callable[[], object]) -> list[Line]:
    # Only the cache's own lines: what another test left to the garbage collector may run here.
    with Interruption(-1, None, headstart.cache) as counted:
        action()
    return counted.lines


def interrupt(engine: TinyEngine, at: int) -> None:
    error = KeyboardInterrupt() if at % 2 else MemoryError()
    with pytest.raises(type(error)), Interruption(at, error, headstart.cache):
        run(engine)
    engine.scribble()


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
    engine = make_engine(options)
    lines = count_lines(lambda: run(engine))
    for at in points(lines, stride=75):
        engine = make_engine(options)
        interrupt(engine, at)
        engine.manager.fail_step()
        engine.verify(probes())
        assert engine.manager.fail_step() == []
        goes_on(engine)


@pytest.mark.parametrize("options", CONFIGS)
def test_a_recovery_that_is_interrupted_is_run_again(options: dict[str, object]) -> None:
    engine = make_engine(options)
    lines = count_lines(lambda: run(engine))
    for first in points(lines)[::60]:
        engine = make_engine(options)
        interrupt(engine, first)
        repair = count_lines(engine.manager.fail_step)
        for second in points(repair)[first % 9 :: 9]:
            engine = make_engine(options)
            interrupt(engine, first)
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
