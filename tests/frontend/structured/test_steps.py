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
    llm = make_llm(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=48)
    yield llm
    llm.close()


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
    answers = [_run(llm.engine, group)[0] for group in _both(llm, bound)]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert re.fullmatch(REGEX, str(tokenizer.decode(answers[0])))
    return answers


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return _alone(llm, BOUND)


def test_a_preempted_request_repeats_no_token(
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


def test_answers_preempted_for_lack_of_blocks_are_valid(llm: LLM) -> None:
    """8 answers of some 100 tokens need more than 24 blocks of 16."""
    before = llm.engine.num_preemptions
    form = StructuredOutputsParams(regex="([a-c]{3}-){30}z")
    params = SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=form, n=8)
    [output] = llm.generate("the", params, use_tqdm=False)
    assert llm.engine.num_preemptions > before
    for completion in output.outputs:
        assert completion.finish_reason == "stop" and re.fullmatch(
            "([a-c]{3}-){30}z", completion.text
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_neighbors_of_a_constrained_request_are_unaffected(
    folder: Path, deterministic: bool
) -> None:
    """The tokens, log-probabilities and hits of greedy and sampled neighbors stay the same.

    The last bits of log-probabilities may depend on the rows of a step, unless deterministic.
    """
    llm = make_llm(folder, deterministic=deterministic, num_blocks=64)
    others = [
        PLAIN,
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=8, logprobs=3),
        SamplingParams(temperature=0, max_tokens=8, min_tokens=8, presence_penalty=1.0),
    ]
    prompts = [[*SHARED, 60 + i] for i in range(4)]

    def generate(first: SamplingParams) -> list[RequestOutput]:
        assert llm.reset_prefix_cache()
        return llm.generate(prompts, [first, *others], use_tqdm=False)[1:]

    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs=FORM)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for constrained, unconstrained in zip(generate(bound), generate(free), strict=True):
        left, right = constrained.outputs[0], unconstrained.outputs[0]
        assert constrained.num_cached_tokens == unconstrained.num_cached_tokens
        assert left.token_ids == right.token_ids
        assert not deterministic or left == right
        for row, other_row in zip(left.logprobs or [], right.logprobs or [], strict=True):
            assert row.keys() == other_row.keys()
            differences = [row[token].logprob - other_row[token].logprob for token in row]
            assert differences == pytest.approx([0.0] * len(row), abs=1e-3)
    llm.close()


def test_blocks_of_constrained_answers_are_hit_by_others(llm: LLM) -> None:
    """K/V depend only on tokens, not on their selection."""
    runs = llm.engine
    assert runs.reset_prefix_cache()
    [group, _] = _both(llm)
    [tokens] = _run(runs, group)
    again = llm.frontend.prepare(PROMPTS[0] + tokens[:-1], PLAIN)
    _run(runs, again)
    assert again.output().num_cached_tokens >= (len(PROMPTS[0]) + len(tokens) - 1) // 16 * 16


def test_a_failing_grammar_ends_only_its_answer(llm: LLM) -> None:
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
