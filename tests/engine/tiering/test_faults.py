"""A fault in a step that loads or offers blocks leaves nothing wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.engine import EngineCore
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError
from tests.engine.internals import loader_of
from tests.engine.tiny_llm import make_llm, save_smallest

NUM_BLOCKS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SHARED = list(range(3, 67))
PROMPTS = [SHARED + list(range(70, 90)), SHARED + list(range(90, 100)), list(range(20, 140))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Return an engine whose store has all prompts."""
    folder = save_smallest(tmp_path_factory.mktemp("model"), layers=1)
    cache_dir = str(tmp_path_factory.mktemp("kept"))
    llm = make_llm(folder, num_blocks=NUM_BLOCKS, cache_dir=cache_dir, max_num_batched_tokens=256)
    for prompt in PROMPTS:
        answers(llm.engine, submit(llm, [prompt]))
    assert llm.engine.tiers is not None and llm.engine.tiers.flush(30)
    yield llm
    llm.close()


def submit(llm: LLM, prompts: list[list[int]]) -> list[RequestGroup]:
    groups = [llm.frontend.prepare(prompt, PARAMS) for prompt in prompts]
    for group in groups:
        llm.engine.submit(group)
    return groups


def answers(engine: EngineCore, groups: list[RequestGroup]) -> list[list[int]]:
    while engine.has_unfinished:
        engine.step()
    return [group.output().outputs[0].token_ids for group in groups]


def begin(llm: LLM) -> list[RequestGroup]:
    """Submit all prompts to an empty pool, after their stored blocks were read."""
    engine = llm.engine
    assert engine.tiers is not None and engine.tiers.flush(30)
    assert engine.reset_prefix_cache()
    groups = submit(llm, PROMPTS)
    while not all(load.job.done for load in engine.tiers.loads.waiting.values()):
        engine.tiers.wait()
    return groups


def begin_again(llm: LLM) -> list[RequestGroup]:
    """Submit all prompts, preempted after some steps, with an empty pool."""
    engine = llm.engine
    groups = begin(llm)
    while not any(group.requests[0].num_read for group in groups):
        engine.step()
    assert engine.tiers is not None and engine.tiers.flush(30)
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.tiers.flush(30)
    return groups


def check(engine: EngineCore) -> None:
    assert engine.tiers is not None
    engine.manager.check()
    living = {request.sequence for group in engine._groups.values() for request in group.requests}
    loads = {load.sequence for load in engine.tiers.loads.waiting.values()}
    assert set(engine.manager.sequences) <= living | loads, "blocks are held for no request"
    assert engine.tiers.loads.are_under_way or loader_of(engine.tiers).queued_bytes == 0


@pytest.mark.parametrize("begin", [begin, begin_again])
@pytest.mark.parametrize("place", ["model", "offering", "taking in", "writing", "committing"])
@pytest.mark.usefixtures("loads_always")
def test_a_fault_in_a_step_that_loads(
    monkeypatch: pytest.MonkeyPatch,
    llm: LLM,
    begin: Callable[[LLM], list[RequestGroup]],
    place: str,
) -> None:
    """Loads continue if the model fails, and end if the engine is reset."""
    engine = llm.engine
    tiers = engine.tiers
    assert tiers is not None
    expected = answers(engine, begin(llm))
    owner, name = {
        "model": (engine.model, "forward"),
        "offering": (tiers._offers, "note"),
        "taking in": (tiers.loads, "_insert"),
        "writing": (tiers.loads.payload, "write"),
        "committing": (tiers._offers, "commit"),
    }[place]
    groups = begin(llm)
    method = getattr(owner, name)

    def broken(*args: Any, **options: Any) -> Any:
        method(*args, **options)
        raise KeyError("on purpose")

    errors: dict[str, EngineError] = {}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        while engine.has_unfinished and not errors:
            results = engine.step()
            check(engine)
            errors = {group.request_id: error for group, error in results if error is not None}
    assert errors and all("on purpose" in str(error) for error in errors.values())
    ended = answers(engine, groups)
    check(engine)
    for group, tokens, answer in zip(groups, ended, expected, strict=True):
        assert group.finished
        assert group.request_id in errors or tokens == answer
    assert not tiers.loads.are_under_way
    assert engine.manager.num_free_blocks == NUM_BLOCKS
    assert answers(engine, begin(llm)) == expected


def test_requests_that_are_aborted_while_their_prefix_is_loaded(llm: LLM) -> None:
    engine = llm.engine
    assert engine.tiers is not None
    expected = answers(engine, begin(llm))
    for steps in range(3):
        groups = begin(llm)
        for _ in range(steps):
            engine.step()
        engine.abort(groups[0].request_id)
        engine.abort(groups[2].request_id)
        assert answers(engine, [groups[1]]) == [expected[1]]
        assert not engine.has_unfinished
        engine.manager.check()
    groups = begin(llm)
    for group in groups:
        engine.abort(group.request_id)
    assert not engine.has_unfinished
    assert answers(engine, begin(llm)) == expected
    assert engine.manager.num_free_blocks == NUM_BLOCKS
