"""A step is a transaction: an exception at any of its lines leaves nothing wrong behind.

At every line that a step executes, in prefill and in decode, with two requests that share a
prefix, an exception is raised. Afterwards every invariant holds, every request ends or goes on,
no block is lost, and the same prompts are answered as by a fresh engine.
"""

import os
from collections.abc import Iterator, Sequence

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.engine import Engine
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.interruptions import Interruption, points

NUM_BLOCKS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=3, ignore_eos=True, logprobs=1)
SHARED = list(range(3, 37))
# The last token of the first request fills a block.
PROMPTS = [SHARED + list(range(50, 62)), SHARED + list(range(70, 76))]
ERRORS = (KeyboardInterrupt, MemoryError, RuntimeError)
SHARES = 4
"""Tests among which the lines of a step are divided: all in one take minutes on a busy machine."""
EVERY_KIND = os.environ.get("HEADSTART_EVERY_KIND") == "1"
"""Raise every kind at every line, each in a run of its own: three times as long."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_smallest(tmp_path_factory.mktemp("model"), layers=1)
    made = make_llm(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=48)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """What an engine answers that was never interrupted, and nothing cached."""
    engine = llm.engine
    answers = []
    for at in range(len(PROMPTS)):
        group = _submit(engine, at)
        while engine.has_unfinished:
            engine.step()
        answers.append(group.output().outputs[0].token_ids)
        assert engine.reset_prefix_cache()
    return answers


def _submit(engine: Engine, at: int) -> RequestGroup:
    group = engine.prepare(PROMPTS[at], DRAWN if at else PARAMS)
    engine.submit(group)
    return group


def _begin(engine: Engine, steps: int) -> list[RequestGroup]:
    """Both requests, after so many steps, with nothing in the cache before."""
    assert engine.reset_prefix_cache()
    groups = [_submit(engine, at) for at in range(len(PROMPTS))]
    for _ in range(steps):
        engine.step()
    return groups


def _finish(engine: Engine, groups: list[RequestGroup], expected: list[list[int]]) -> None:
    """All that must hold after an interruption, also for those who ask the same from now on."""
    errors: dict[str, EngineError] = {}
    _check(engine)
    again = [_submit(engine, at) for at in range(len(PROMPTS))]
    while engine.has_unfinished:
        results = engine.step()
        assert len({group.request_id for group, _ in results}) == len(results), "told twice"
        for group, error in results:
            if error is not None:
                errors[group.request_id] = error
        _check(engine)
    for group in groups:
        assert group.finished
        if group.request_id not in errors:
            assert (
                group.output().outputs[0].token_ids
                == expected[PROMPTS.index(group.prompt_token_ids)]
            )
    assert [group.output().outputs[0].token_ids for group in again] == expected
    assert engine.manager.num_free_blocks == NUM_BLOCKS


def _check(engine: Engine) -> None:
    engine.manager.check()
    living = {request.sequence for group in engine._groups.values() for request in group.requests}
    assert set(engine.manager.sequences) <= living, "blocks are held for a request that is gone"


def _names_it(error: BaseException | None, kind: type[BaseException]) -> bool:
    return isinstance(error, EngineError) and kind.__name__ in str(error)


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("kinds", [(kind,) for kind in ERRORS] if EVERY_KIND else [ERRORS])
@pytest.mark.parametrize("steps", [0, 1, 2], ids=["prefill", "mixed", "decode"])
def test_an_exception_at_any_line_of_a_step(
    llm: LLM,
    expected: list[list[int]],
    steps: int,
    kinds: Sequence[type[BaseException]],
    share: int,
) -> None:
    """The kinds of exceptions take turns over the lines, unless HEADSTART_EVERY_KIND is 1."""
    engine = llm.engine
    groups = _begin(engine, steps)
    with Interruption() as counted:
        engine.step()
    _finish(engine, groups, expected)
    places = points(counted.lines)
    assert len(places) > 300
    for turn, at in list(enumerate(places))[share::SHARES]:
        kind = kinds[turn % len(kinds)]
        groups = _begin(engine, steps)
        results = []
        try:
            with Interruption(at, kind("on purpose")):
                results = engine.step()
        except kind as error:
            assert "on purpose" in str(error)
        told = [result.error for result in results if result.error is not None]
        assert all(_names_it(error, kind) for error in told)
        ended = [group for group, error in results if error is not None]
        _finish(engine, [group for group in groups if group not in ended], expected)


@pytest.mark.parametrize("change", ["submit", "abort", "reset"])
def test_an_exception_at_any_line_between_two_steps(
    llm: LLM, expected: list[list[int]], change: str
) -> None:
    """The next call completes what was interrupted; whoever was not meant goes on."""
    engine = llm.engine

    def run(interruption: Interruption) -> None:
        groups = _begin(engine, steps=1)
        late = engine.prepare(PROMPTS[0], PARAMS)
        meant = {"submit": late, "abort": groups[0], "reset": None}[change]
        try:
            with interruption:
                if change == "submit":
                    engine.submit(late)
                elif change == "abort":
                    engine.abort(groups[0].request_id)
                else:
                    assert engine.reset_prefix_cache(reset_running_requests=True)
        except ERRORS as error:
            assert "on purpose" in str(error)
        engine.abort("nobody")
        _finish(engine, [group for group in groups if group is not meant], expected)

    counted = Interruption()
    run(counted)
    places = points(counted.lines)
    assert len(places) > 20
    for turn, at in enumerate(places[:: 1 + len(places) // 60]):  # each costs a whole run
        interruption = Interruption(at, ERRORS[turn % len(ERRORS)]("on purpose"))
        run(interruption)
        assert interruption.raised
