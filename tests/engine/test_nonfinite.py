"""Numbers that are not finite: their request ends with an error, others are not affected.

A token whose embedding is infinite stands for one that overflows. Regression: its K and V made rows
before it in the same chunk NaN, these were cached, and the next clean prompt was answered `[0, 0,
0, ...]`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.engine.sampling import SampledToken, Sampler, SamplingState
from headstart.errors import EngineError
from tests.engine.internals import runner_of
from tests.engine.tiny_llm import VOCABULARY, make_llm, save_smallest

POISON = 77
CLEAN = list(range(3, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"kv_cache_dtype": "int8"},
    "deterministic": {"deterministic": True},
    "chunks": {"max_num_batched_tokens": 20},
    "no partial hits": {"partial_hits": False, "deduplicate": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"), poison=POISON)


@pytest.fixture(params=WAYS)
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder, debug=True, **WAYS[request.param])
    yield llm
    llm.close()


def _tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(n=3, seed=1, max_tokens=4), SamplingParams(prompt_logprobs=1)],
    ids=["greedy", "three answers", "prompt logits"],
)
def test_a_poisoned_prompt_leaves_nothing_behind(llm: LLM, params: SamplingParams) -> None:
    """A later clean prompt with the same prefix is answered as if it had not run."""
    expected = _tokens(llm, [*CLEAN, 100, 101])
    assert llm.reset_prefix_cache()
    with pytest.raises(EngineError, match="not finite"):
        llm.generate([*CLEAN, POISON, 100], params)
    manager = llm.engine.manager
    assert manager.num_free_blocks == 24 and not llm.engine.has_unfinished
    [again] = llm.generate([*CLEAN, 100, 101], GREEDY)
    assert again.outputs[0].token_ids == expected
    assert again.num_cached_tokens == 0


def test_neighbors_of_a_poisoned_prompt_continue(llm: LLM) -> None:
    """One neighbor shares its clean prefix in the same step; one has its poison too, and ends."""
    engine = llm.engine
    prompts = [[*CLEAN, POISON, 5, 6], [*CLEAN, 8, 9], [*CLEAN, POISON, 5, 6, 7], [90, 91, 92]]
    expected = [_tokens(llm, prompt) for prompt in (prompts[1], prompts[3])]
    assert llm.reset_prefix_cache()
    groups = [llm.frontend.prepare(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    errors = {}
    while engine.has_unfinished:
        for group, error in engine.step():
            if error is not None:
                errors[group.request_id] = error
        engine.manager.check()
    assert errors.keys() == {groups[0].request_id, groups[2].request_id}
    assert all("not finite" in str(error) for error in errors.values())
    assert [groups[at].output().outputs[0].token_ids for at in (1, 3)] == expected
    assert [_tokens(llm, prompt) for prompt in (prompts[1], prompts[3])] == expected
    with pytest.raises(EngineError, match="not finite"):
        llm.generate(prompts[0], GREEDY)


def test_a_bad_row_in_a_block_that_a_neighbor_hit_is_never_hit_again(folder: Path) -> None:
    """Regression: the block stayed indexed for the neighbor, and later prompts hit the bad row.

    The fault is in one step, in the last layer, where the neighbor's rows have no logits yet.
    """
    llm = make_llm(folder, max_num_batched_tokens=80, partial_hits=False)
    engine = llm.engine
    prompts = [[*CLEAN, 100], [*CLEAN[:50], *range(100, 130)], [*CLEAN[:20], 140, 141]]
    expected = [_tokens(llm, prompt) for prompt in prompts]
    assert llm.reset_prefix_cache()
    groups = [llm.frontend.prepare(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    backend = runner_of(engine)._backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "nonfinite_rows", lambda: [40])  # of the first prompt
        results = engine.step()
    failed = {result.group for result in results if result.error is not None}
    shared = {group for group in groups if group.requests[0].num_cached_tokens == 48}
    assert shared == {groups[1]}
    assert failed == {groups[0], groups[1]}
    engine.manager.check()
    while engine.has_unfinished:
        assert all(result.error is None for result in engine.step())
    for prompt, answer in zip(prompts, expected, strict=True):
        [output] = llm.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == answer
    llm.close()


def test_log_probabilities_of_a_prompt_are_finite_or_refused(folder: Path) -> None:
    """Regression: a row that overflowed after its K and V was returned as `logprob=nan, rank=1`."""
    llm = make_llm(folder)
    forward = llm.engine.model.forward

    def overflowing(*args: Any) -> torch.Tensor:
        logits = forward(*args).clone()
        logits[4] = torch.nan
        return logits

    llm.engine.model.forward = overflowing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not finite"):
        llm.generate(CLEAN, SamplingParams(max_tokens=1, prompt_logprobs=1))
    llm.engine.model.forward = forward  # type: ignore[method-assign]
    [output] = llm.generate(CLEAN, GREEDY)
    assert output.num_cached_tokens == 0
    llm.close()


def _state(seed: int) -> SamplingState:
    params = SamplingParams(temperature=1.0, seed=seed)
    return SamplingState(params, [1], [], torch.Generator().manual_seed(seed), frozenset())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_draw_next_to_a_row_that_cannot_be_sampled(bad: float) -> None:
    """Regression: the row was drawn again with an advanced generator: 38 became 80."""
    sampler = Sampler(VOCABULARY)
    rows = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    [alone] = sampler.sample(rows, [_state(1)])
    spoilt = torch.full((1, VOCABULARY), bad)
    first, second, third = sampler.sample(
        torch.cat([rows, spoilt, rows]), [_state(1), _state(1), _state(1)]
    )
    assert isinstance(second, EngineError) and "not finite" in str(second)
    assert isinstance(alone, SampledToken) and first == third == alone


def test_no_two_answers_without_a_seed_are_drawn_alike(llm: LLM) -> None:
    """Regression: 8 prompts of 8 answers had 15 generators, so only 36 of 64 answers differed."""
    params = SamplingParams(n=8, temperature=1.5, max_tokens=2)
    groups = [llm.frontend.prepare(CLEAN, params) for _ in range(8)]
    seeds = [
        request.sampling.generator.initial_seed()
        for group in groups
        for request in group.requests
        if request.sampling.generator is not None
    ]
    assert len(set(seeds)) == 64
