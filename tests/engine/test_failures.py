"""A step that fails in its computation ends its requests; other exceptions reset the engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.engine import EngineCore
from headstart.engine.request import RequestGroup
from headstart.engine.step import StepResult
from tests.engine.tiny_llm import make_llm, save_smallest

NUM_BLOCKS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=3, ignore_eos=True, logprobs=1)
SHARED = list(range(3, 37))
# The last token of the first request fills a block.
PROMPTS = [SHARED + list(range(50, 62)), SHARED + list(range(70, 76))]
ERRORS = [MemoryError("on purpose"), RuntimeError("on purpose"), SystemExit("on purpose")]

COMPUTING = {
    "copy": ("_runner._memory", "copy_rows"),
    "plan": ("_runner._backend", "begin_step"),
    "adapters": ("_runner._adapters", "begin_step"),
    "model": ("model", "forward"),
    "sampler": ("_sampler", "accept"),
}
ELSEWHERE = {
    "scheduling": ("_scheduler", "_schedule_running"),
    "allocating": ("manager.pool.free", "take"),
    "committing": ("manager.pool.index", "commit"),
    "delivering": ("_scheduler", "committed"),
    "ending": ("_scheduler", "remove"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_smallest(tmp_path_factory.mktemp("model"), layers=1)
    llm = make_llm(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=48)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """Return the answers of an engine without failures and with an empty cache."""
    answers = []
    for at in range(len(PROMPTS)):
        [answer] = _finish(llm.engine, [_submit(llm, at)])
        answers.append(answer)
        assert llm.engine.reset_prefix_cache()
    return answers


def _submit(llm: LLM, at: int) -> RequestGroup:
    group = llm.frontend.prepare(PROMPTS[at], DRAWN if at else PARAMS)
    llm.engine.submit(group)
    return group


def _begin(llm: LLM, steps: int) -> list[RequestGroup]:
    """Start both requests with an empty cache, and run this many steps."""
    engine = llm.engine
    assert engine.reset_prefix_cache()
    groups = [_submit(llm, at) for at in range(len(PROMPTS))]
    for _ in range(steps):
        engine.step()
    return groups


def _finish(engine: EngineCore, groups: list[RequestGroup]) -> list[list[int]]:
    while engine.has_unfinished:
        engine.step()
        engine.manager.check()
    assert engine.manager.num_free_blocks == NUM_BLOCKS
    return [group.output().outputs[0].token_ids for group in groups]


def _step_with(
    patch: pytest.MonkeyPatch, engine: EngineCore, place: tuple[str, str], error: BaseException
) -> list[StepResult]:
    """Run one step in which a method raises after its work was done."""
    owner: Any = engine
    for name in place[0].split("."):
        owner = getattr(owner, name)
    method = getattr(owner, place[1])

    def broken(*args: Any, **options: Any) -> Any:
        method(*args, **options)
        raise error

    with patch.context() as context:
        context.setattr(owner, place[1], broken)
        return engine.step()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("steps", [0, 1, 2], ids=["prefill", "mixed", "decode"])
@pytest.mark.parametrize("place", COMPUTING)
def test_a_failed_computation_ends_only_the_requests_of_its_step(
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    steps: int,
    error: BaseException,
) -> None:
    engine = llm.engine
    groups = _begin(llm, steps)
    cached = engine.manager.explain(groups[0].requests[0].sequence)
    results = _step_with(monkeypatch, engine, COMPUTING[place], error)
    engine.manager.check()
    ended = {group: failure for group, failure in results if failure is not None}
    assert ended, cached
    for failure in ended.values():
        assert failure.__cause__ is error and f"{type(error).__name__}: on purpose" in str(failure)
    for group, answer in zip(groups, expected, strict=True):
        _finish(engine, [])
        assert group.finished
        if group not in ended:
            assert group.output().outputs[0].token_ids == answer
    assert _finish(engine, [_submit(llm, at) for at in range(2)]) == expected


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ELSEWHERE)
def test_an_exception_elsewhere_ends_all_requests_and_empties_the_cache(
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException,
) -> None:
    engine = llm.engine
    groups = _begin(llm, 0 if place == "allocating" else 1)
    ended: dict[RequestGroup, Any] = {}
    while engine.has_unfinished:
        results = _step_with(monkeypatch, engine, ELSEWHERE[place], error)
        assert len({group.request_id for group, _ in results}) == len(results), "twice"
        ended |= {group: failure for group, failure in results if failure is not None}
        engine.manager.check()
    assert all(group.finished for group in groups)
    failures = [ended[group] for group in groups if group in ended]
    assert failures and all(failure.__cause__ is error for failure in failures)
    assert engine.manager.num_free_blocks == NUM_BLOCKS
    again = [_submit(llm, at) for at in range(2)]
    assert _finish(engine, again) == expected
    assert again[0].requests[0].num_cached_tokens == 0, "the cache was not emptied"
