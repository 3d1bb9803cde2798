"""An exception at any line of a step that loads blocks, or offers them, leaves nothing wrong."""

from collections.abc import Callable, Iterator

import pytest

import headstart.attention.memory
import headstart.engine.engine
import headstart.engine.tiering
from headstart import LLM, SamplingParams
from headstart.engine.engine import Engine
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.interruptions import Interrupted, Interruption, points

NUM_BLOCKS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SHARED = list(range(3, 67))
PROMPTS = [SHARED + list(range(70, 90)), SHARED + list(range(90, 100)), list(range(20, 140))]
WITHIN = (headstart.engine.tiering, headstart.engine.engine, headstart.attention.memory)
ERRORS = (KeyboardInterrupt, MemoryError, RuntimeError)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine whose store has all prompts."""
    folder = save_smallest(tmp_path_factory.mktemp("model"), layers=1)
    kept = str(tmp_path_factory.mktemp("kept"))
    made = make_llm(folder, num_blocks=NUM_BLOCKS, cache_dir=kept, max_num_batched_tokens=256)
    for prompt in PROMPTS:
        answers(made.engine, submit(made.engine, [prompt]))
    assert made.engine.tiers is not None and made.engine.tiers.flush(30)
    yield made
    made.close()


def submit(engine: Engine, prompts: list[list[int]]) -> list[RequestGroup]:
    groups = [engine.prepare(prompt, PARAMS) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    return groups


def answers(engine: Engine, groups: list[RequestGroup]) -> list[list[int]]:
    while engine.has_unfinished:
        engine.step()
    return [group.output().outputs[0].token_ids for group in groups]


def begin(engine: Engine) -> list[RequestGroup]:
    """All prompts, with nothing in the pool, and what the store has of them read."""
    assert engine.tiers is not None and engine.tiers.flush(30)
    assert engine.reset_prefix_cache()
    groups = submit(engine, PROMPTS)
    while not all(load.job.done for load in engine.tiers.loads._waiting.values()):
        engine.tiers.wait()
    return groups


def begin_again(engine: Engine) -> list[RequestGroup]:
    """All prompts, preempted after some steps, with nothing in the pool."""
    groups = begin(engine)
    while not any(group.requests[0].num_read for group in groups):
        engine.step()
    assert engine.tiers is not None and engine.tiers.flush(30)
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.tiers.flush(30)
    return groups


def check(engine: Engine) -> None:
    assert engine.tiers is not None
    engine.manager.check()
    living = {request.sequence for group in engine._groups.values() for request in group.requests}
    loads = {load.sequence for load in engine.tiers.loads._waiting.values()}
    assert set(engine.manager.sequences) <= living | loads, "blocks are held for nobody"
    loader = engine.tiers._loader
    with loader._changed:
        jobs = {*loader._asked, *loader._found, *loader._current, *loader._holding}
        held = sum(block.payload.nbytes for job in jobs for block in job.arrived)
        assert loader._nbytes == held
    awaited = {load.job for load in engine.tiers.loads._waiting.values()}
    assert {job for job in jobs if not job.cancelled} <= awaited, "a job loads for nobody"


@pytest.mark.parametrize("begin", [begin, begin_again])
def test_an_exception_at_any_line_of_a_step_that_loads(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, begin: Callable[[Engine], list[RequestGroup]]
) -> None:
    monkeypatch.setattr("headstart.engine.tiering.tiers.is_worth_loading", lambda *_: True)
    engine = llm.engine
    assert engine.tiers is not None
    groups = begin(engine)
    with Interruption(-1, None, *WITHIN) as counted:
        engine.step()
    expected = answers(engine, groups)
    loaded = engine.tiers.stats.loaded_tokens["disk"]
    assert loaded, "nothing was loaded"
    places = points(counted.lines)
    assert len(places) > 100
    for turn, at in enumerate(places):
        kind = ERRORS[turn % len(ERRORS)]
        groups = begin(engine)
        errors: dict[str, EngineError] = {}
        try:
            with Interruption(at, kind("on purpose"), *WITHIN):
                results = engine.step()
        except kind as error:
            assert "on purpose" in str(error)
            results = []
        check(engine)
        while True:
            errors |= {group.request_id: error for group, error in results if error is not None}
            if not engine.has_unfinished:
                break
            results = engine.step()
            check(engine)
        for group, answer in zip(groups, expected, strict=True):
            assert group.finished
            if group.request_id not in errors:
                assert group.output().outputs[0].token_ids == answer
        assert not engine.tiers.loads.are_under_way
        assert engine.manager.num_free_blocks == NUM_BLOCKS
    assert answers(engine, begin(engine)) == expected


def test_an_interrupted_submission_leaves_no_bytes_that_nobody_takes(llm: LLM) -> None:
    """They counted for ever among those that wait to be taken, and later loads waited for room."""
    engine = llm.engine
    expected = answers(engine, begin(engine))
    assert engine.reset_prefix_cache()
    with Interruption(-1, None, headstart.engine.tiering) as counted:
        submit(engine, PROMPTS[:1])
    answers(engine, [])
    for at in points(counted.lines):
        assert engine.tiers is not None and engine.tiers.flush(30)
        assert engine.reset_prefix_cache()
        with pytest.raises(Interrupted), Interruption(at, Interrupted(), headstart.engine.tiering):
            submit(engine, PROMPTS[:1])
        engine.step()
        check(engine)
        answers(engine, [])
        check(engine)
    assert answers(engine, begin(engine)) == expected


def test_requests_that_are_aborted_while_their_prefix_is_loaded(llm: LLM) -> None:
    engine = llm.engine
    assert engine.tiers is not None
    expected = answers(engine, begin(engine))
    for steps in range(3):
        groups = begin(engine)
        for _ in range(steps):
            engine.step()
        engine.abort(groups[0].request_id)
        engine.abort(groups[2].request_id)
        assert answers(engine, [groups[1]]) == [expected[1]]
        assert not engine.has_unfinished
        engine.manager.check()
    groups = begin(engine)
    for group in groups:
        engine.abort(group.request_id)
    assert not engine.has_unfinished
    assert answers(engine, begin(engine)) == expected
    assert engine.manager.num_free_blocks == NUM_BLOCKS
