"""Preempted requests: blocks that the pool evicted meanwhile are loaded from the tiers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.request import RequestGroup
from tests.engine.tiny_llm import make_llm, save_smallest

pytestmark = pytest.mark.usefixtures("loads_always")

NUM_BLOCKS = 20
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
PROMPTS = [[3 + (7 * at + 11 * turn) % 140 for at in range(100)] for turn in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


def submit(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = LONG) -> Any:
    groups = [llm.frontend.prepare({"prompt_token_ids": one}, params) for one in prompts]
    for group in groups:
        llm.engine.submit(group)
    return groups


def finish(llm: LLM, groups: list[RequestGroup]) -> list[list[list[int]]]:
    """Return all answers; filled blocks reach the store by the next step."""
    for _ in range(4000):
        llm.engine.step()
        if llm.engine.tiers is not None:
            assert llm.engine.tiers.flush(10)
        if not llm.engine.has_unfinished:
            return [[list(one.token_ids) for one in group.output().outputs] for group in groups]
    raise AssertionError("requests wait for ever")


def loaded(llm: LLM) -> int:
    assert llm.engine.tiers is not None
    return llm.engine.tiers.stats.loaded_tokens["disk"]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"kv_cache_dtype": "int8"}])
def test_a_preempted_request_is_loaded_and_not_computed_again(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    alone = make_llm(model, speculation="off", num_blocks=200, **options)
    oracle = [finish(alone, submit(alone, [prompt]))[0] for prompt in PROMPTS]
    llm = make_llm(
        model,
        speculation="off",
        num_blocks=NUM_BLOCKS,
        cache_dir=str(tmp_path),
        debug=True,
        **options,
    )
    groups = submit(llm, PROMPTS)
    assert finish(llm, groups) == oracle
    assert llm.engine.num_preemptions > 0
    assert loaded(llm) > 0, "lost blocks were computed again"
    assert [group.output().num_loaded_tokens for group in groups] == [0, 0, 0], "at the first time"
    assert llm.engine.tiers is not None and not llm.engine.tiers.loads.are_under_way
    assert llm.engine.manager.num_free_blocks == NUM_BLOCKS
    llm.close()


def test_answers_of_one_prompt_are_loaded_separately(model: Path, tmp_path: Path) -> None:
    """One of several answers waits for its load; the others of its prompt continue."""
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=100, ignore_eos=True)
    alone = make_llm(model, speculation="off", num_blocks=200)
    oracle = finish(alone, submit(alone, PROMPTS[:1], params))
    llm = make_llm(model, speculation="off", num_blocks=16, cache_dir=str(tmp_path), debug=True)
    assert finish(llm, submit(llm, PROMPTS[:1], params)) == oracle
    assert llm.engine.num_preemptions > 0
    assert loaded(llm) > 0
    llm.close()


def test_missing_blocks_are_computed(
    model: Path, tmp_path: Path, disk_loads: Callable[..., None]
) -> None:
    """A preempted request looks them up once, and does not wait for blocks that never come."""
    alone = make_llm(model, speculation="off", num_blocks=200)
    oracle = [finish(alone, submit(alone, [prompt]))[0] for prompt in PROMPTS]
    llm = make_llm(
        model, speculation="off", num_blocks=NUM_BLOCKS, cache_dir=str(tmp_path), debug=True
    )
    assert llm.engine.tiers is not None
    disk_loads(lambda store, blocks: iter(()))
    assert finish(llm, submit(llm, PROMPTS)) == oracle
    assert llm.engine.num_preemptions > 0 and loaded(llm) == 0
    llm.close()


def test_a_preempted_request_that_is_aborted_while_it_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    llm = make_llm(
        model, speculation="off", num_blocks=NUM_BLOCKS, cache_dir=str(tmp_path), debug=True
    )
    engine = llm.engine
    assert engine.tiers is not None
    groups = submit(llm, PROMPTS)
    for _ in range(2000):
        engine.step()
        assert engine.tiers.flush(10)
        if engine.tiers.is_loading:
            break
    waiting = [group for group in groups if group.requests[0] in engine.tiers.loads.waiting]
    assert waiting
    for group in waiting:
        engine.abort(group.request_id)
    finish(llm, groups)
    assert not engine.tiers.loads.are_under_way
    assert engine.manager.num_free_blocks == NUM_BLOCKS
    llm.close()


def test_a_preempted_request_is_loaded_after_all_loads_were_ended(
    model: Path, tmp_path: Path
) -> None:
    llm = make_llm(
        model, speculation="off", num_blocks=NUM_BLOCKS, cache_dir=str(tmp_path), debug=True
    )
    engine = llm.engine
    assert engine.tiers is not None
    loads = engine.tiers.loads
    groups = submit(llm, PROMPTS)
    for _ in range(2000):
        engine.step()
        assert engine.tiers.flush(10)
        if loads._tried:
            break
    [request] = loads._tried
    assert request in loads.waiting
    loads.end_all()
    assert not loads.are_under_way
    assert not loads._tried, "it would be computed, though the store has it"
    assert loads.reach(request, 0, 1) is None
    assert request in loads.waiting
    finish(llm, groups)
    llm.close()


def test_all_running_requests_are_loaded_after_a_reset(model: Path, tmp_path: Path) -> None:
    alone = make_llm(model, speculation="off", num_blocks=200)
    oracle = [finish(alone, submit(alone, [prompt]))[0] for prompt in PROMPTS[:1]]
    llm = make_llm(model, speculation="off", cache_dir=str(tmp_path), debug=True)
    groups = submit(llm, PROMPTS[:1])
    for _ in range(30):
        llm.engine.step()
    assert llm.engine.tiers is not None and llm.engine.tiers.flush(10)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert finish(llm, groups) == oracle
    assert loaded(llm) == 128, "the prompt's whole blocks, and those of the answer"
    llm.close()
