"""The state of a grammar agrees with its answer after interruptions and preemptions."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.engine.engine import EngineCore
from headstart.engine.outputs import RequestOutput
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError
from tests.engine.internals import preempt_last
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

REGEX = "(ab|ba)[0-9]{2}x"
FORM = StructuredOutputsParams(regex=REGEX)
SHARED = list(range(3, 37))
PROMPTS = [SHARED + list(range(50, 61)), SHARED + list(range(70, 76))]
BOUND = SamplingParams(
    temperature=1,
    seed=5,
    max_tokens=12,
    structured_outputs=FORM,
    bad_words=["ab7"],
    logit_bias={9: 3.0},
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, structured_outputs=FORM, bad_words=["ab7"])
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(
        tmp_path_factory.mktemp("model"), layers=1, tokenizer=TINY_TOKENIZERS["byte_level"]()
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = make_llm(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=48)
    yield made
    made.close()


def _run(runs: EngineCore, *groups: RequestGroup) -> list[list[int]]:
    for group in groups:
        runs.submit(group)
    while runs.has_unfinished:
        runs.step()
    return [group.output().outputs[0].token_ids for group in groups]


def _both(llm: LLM, bound: SamplingParams = BOUND) -> list[RequestGroup]:
    return [
        llm.frontend.prepare(prompt, params)
        for prompt, params in zip(PROMPTS, (bound, PLAIN), strict=True)
    ]


def _alone(llm: LLM, bound: SamplingParams) -> list[list[int]]:
    """Return the answer of each request alone, with an empty cache."""
    found = [_run(llm.engine, group)[0] for group in _both(llm, bound)]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert re.fullmatch(REGEX, str(tokenizer.decode(found[0])))
    return found


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return _alone(llm, BOUND)


def test_a_preempted_request_is_told_nothing_twice(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is preempted after each of its tokens."""
    runs = llm.engine
    for after in range(1, len(expected[0])):
        assert runs.reset_prefix_cache()
        [group, _] = _both(llm)
        runs.submit(group)
        [own] = group.requests
        while len(own.sampling.output_token_ids) < after:
            runs.step()
        preempt_last(runs)
        runs.manager.check()
        while runs.has_unfinished:
            runs.step()
        assert own.num_preemptions == 1
        assert own.sampling.output_token_ids == expected[0]


def test_preempted_by_a_lack_of_blocks_all_answers_are_valid(llm: LLM) -> None:
    """8 answers of some 100 tokens need more than 24 blocks of 16."""
    before = llm.engine.num_preemptions
    form = StructuredOutputsParams(regex="([a-c]{3}-){30}z")
    params = SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=form, n=8)
    [output] = llm.generate("the", params, use_tqdm=False)
    assert llm.engine.num_preemptions > before
    for one in output.outputs:
        assert one.finish_reason == "stop" and re.fullmatch("([a-c]{3}-){30}z", one.text)


@pytest.mark.parametrize("deterministic", [False, True])
def test_neighbors_are_answered_as_without(folder: Path, deterministic: bool) -> None:
    """Greedy and drawn ones, their log-probabilities, and what they hit.

    The last bits of a log-probability may depend on how many rows a step has, unless deterministic.
    """
    made = make_llm(folder, deterministic=deterministic, num_blocks=64)
    others = [
        PLAIN,
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=8, logprobs=3),
        SamplingParams(temperature=0, max_tokens=8, min_tokens=8, presence_penalty=1.0),
    ]
    prompts = [[*SHARED, 60 + at] for at in range(4)]

    def ask(first: SamplingParams) -> list[RequestOutput]:
        assert made.reset_prefix_cache()
        return made.generate(prompts, [first, *others], use_tqdm=False)[1:]

    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs=FORM)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for beside_bound, beside_free in zip(ask(bound), ask(free), strict=True):
        one, other = beside_bound.outputs[0], beside_free.outputs[0]
        assert beside_bound.num_cached_tokens == beside_free.num_cached_tokens
        assert one.token_ids == other.token_ids
        assert not deterministic or one == other
        for row, beside in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert row.keys() == beside.keys()
            found = [row[token].logprob - beside[token].logprob for token in row]
            assert found == pytest.approx([0.0] * len(row), abs=1e-3)
    made.close()


def test_what_a_form_made_is_hit_by_others(llm: LLM) -> None:
    """K/V depend only on tokens, not on their selection."""
    runs = llm.engine
    assert runs.reset_prefix_cache()
    [group, _] = _both(llm)
    [tokens] = _run(runs, group)
    again = llm.frontend.prepare(PROMPTS[0] + tokens[:-1], PLAIN)
    _run(runs, again)
    assert again.output().num_cached_tokens >= (len(PROMPTS[0]) + len(tokens) - 1) // 16 * 16


def test_an_answer_whose_grammar_fails_ends_alone(llm: LLM) -> None:
    """The test breaks its matcher."""
    runs = llm.engine
    groups = _both(llm)
    for group in groups:
        runs.submit(group)
    runs.step()
    broken = groups[0].requests[0].sampling.processors[-1]
    broken._matcher.consume_token(0)  # type: ignore[attr-defined]
    errors: dict[str, EngineError | None] = {}
    while runs.has_unfinished:
        errors |= {group.request_id: error for group, error in runs.step()}
    assert "structured_outputs could not be followed" in str(errors[groups[0].request_id])
    assert errors[groups[1].request_id] is None
