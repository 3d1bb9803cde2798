"""Drafts change the number of tokens per step, and nothing else.

The oracle is the same engine without drafts. Random requests cover sampling with seeds, penalties,
grammars, stops, log-probabilities, several answers, preemption and prompts that repeat.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart import LLM, SamplingParams, StructuredOutputsParams, native
from headstart.cache import BlockHasher, CacheConfig, KVCacheManager, TokenSequence
from headstart.engine import metrics as engine_metrics
from headstart.engine.drafts.drafters import AnswerDrafter, DraftSource, RepetitionDrafter
from headstart.engine.drafts.drafting import RowCost
from headstart.errors import EngineError, RequestError
from headstart.models.demo import demo_model_path
from tests.engine.tiny_llm import draft_always, save_smallest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


def load(folder: str | Path, speculation: int | str, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "dtype": "float32"}
    llm = LLM(folder, speculation=speculation, debug=True, num_threads=1, **{**sizes, **options})
    return draft_always(llm)


def random_params(chance: random.Random) -> SamplingParams:
    stops: dict[str, Any] = chance.choice(
        [{}, {"stop_token_ids": [7, 8]}, {"min_tokens": 6, "stop_token_ids": [9]}]
    )
    return SamplingParams(
        max_tokens=chance.randrange(6, 24),
        ignore_eos=chance.random() < 0.8,
        temperature=chance.choice([0.0, 0.0, 0.3, 1.0]),
        seed=chance.randrange(100),
        top_k=chance.choice([0, 0, 3]),
        top_p=chance.choice([1.0, 0.8]),
        logprobs=chance.choice([None, None, 2]),
        presence_penalty=chance.choice([0.0, 0.0, 0.7]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        logit_bias=chance.choice([None, None, {5: 3.0}]),
        prediction=chance.choice([None, None, [*range(3, 60)]]),
        allowed_token_ids=chance.choice([None, None, [5, 6, 7, 8, 9]]),
        n=chance.choice([1, 1, 1, 2]),
        **stops,
    )


def requests(seed: int, count: int) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
    """Yield batches of prompts that repeat one another, and themselves."""
    chance = random.Random(seed)
    seen: list[list[int]] = []
    for _ in range(count):
        prompts = []
        for _ in range(chance.randrange(1, 5)):
            prompt = [chance.randrange(3, 60) for _ in range(chance.randrange(1, 20))]
            if seen and chance.random() < 0.6:
                prompt = chance.choice(seen)[: chance.randrange(1, 40)]
            if chance.random() < 0.3:
                prompt = prompt * 3
            seen.append(prompt[:60])
            prompts.append(prompt[:60])
        yield prompts, [random_params(chance) for _ in prompts]


def answers(llm: LLM, seed: int, count: int) -> list[Any]:
    entries = []
    for prompts, params in requests(seed, count):
        for output in llm.generate(prompts, params, use_tqdm=False):
            for answer in output.outputs:
                logprobs = [[*entry] for entry in answer.logprobs or ()]
                entries.append(
                    (answer.token_ids, answer.finish_reason, answer.stop_reason, logprobs)
                )
    return entries


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    """Return the answers of an engine without drafts, which depend on none of the options below."""
    with closing(load(folder, 0)) as llm:
        return answers(llm, 1, 15)


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"num_blocks": 40}, {"enable_prefix_caching": False}],
    ids=["", "deterministic", "few blocks", "no cache"],
)
def test_answers_are_those_without_drafts(
    folder: Path, plain: list[Any], options: dict[str, Any]
) -> None:
    drafting = load(folder, 8, **options)
    assert answers(drafting, 1, 15) == plain
    core = drafting.engine
    assert core.drafting is not None and core.drafting.num_accepted > 30
    assert core.drafting.num_drafted > core.drafting.num_accepted
    assert (core.num_preemptions > 0) == ("num_blocks" in options)
    assert core.manager.num_free_blocks == core.config.num_blocks
    drafting.close()


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_bits_of_logprobs_are_those_without_drafts_if_deterministic(
    folder: Path, block_size: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3)
    logprobs = []
    for speculation in (0, 8):
        llm = load(folder, speculation, deterministic=True, block_size=block_size)
        for _ in range(2):
            [output] = llm.generate([[5, 6, 7] * 6], params, use_tqdm=False)
            logprobs.append(output.outputs[0].logprobs)
        llm.close()
    assert logprobs[0] == logprobs[1] == logprobs[2] == logprobs[3]


def test_a_grammar_and_a_stop_string_hold_within_a_draft() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6}
    grammar = StructuredOutputsParams(json=schema)
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar),
        SamplingParams(temperature=0, max_tokens=40, stop=["a", "e"], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, min_tokens=20, stop=["an"]),
    ]
    texts = []
    for speculation in (0, 8):
        llm = load(demo_model_path(), speculation, num_blocks=200)
        for _ in range(3):
            outputs = llm.generate(["The numbers are 1 2 3"] * 3, params, use_tqdm=False)
            texts.append([(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs])
        llm.close()
    assert all(text == texts[0] for text in texts)


def test_aborts_between_drafts_change_nothing_else(folder: Path) -> None:
    chance = random.Random(3)
    plain, llm = load(folder, 0), load(folder, 4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[*range(start, start + 12)] for start in (3, 20, 40)]
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params, use_tqdm=False)]
    core, num_aborted = llm.engine, 0
    for _ in range(12):
        groups = [llm.frontend.prepare(prompt, params) for prompt in prompts]

        def run(groups: list[Any] = groups) -> Any:
            for group in groups:
                core.submit(group)
            for _ in range(chance.randrange(1, 6)):
                core.step()
            aborted = chance.choice(groups)
            core.abort(aborted.request_id)
            while core.has_unfinished:
                core.step()
            return aborted

        aborted = llm.driver.call(run)
        for group, tokens in zip(groups, expected, strict=True):
            answer = group.output().outputs[0]
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            assert group is aborted or answer.finish_reason == "length"
        # The sources of drafts stayed in memory for as long as the user held the outputs.
        assert not any(request.drafts for group in groups for request in group.requests)
        num_aborted += aborted.output().outputs[0].finish_reason == "abort"
        assert core.manager.num_free_blocks == core.config.num_blocks
    assert num_aborted > 6 and core.drafting is not None and core.drafting.num_accepted > 100
    plain.close()
    llm.close()


def test_drafts_do_not_change_the_distribution(folder: Path) -> None:
    """Chi-square of three sampled tokens of a small vocabulary against exact probabilities."""
    allowed, prompt, length = [5, 6, 7], [*range(3, 12)], 3
    llm = load(folder, 8)
    every = SamplingParams(max_tokens=1, logprobs=-1)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        heads = [*probabilities]
        outputs = llm.generate([[*prompt, *head] for head in heads], every, use_tqdm=False)
        longer = {}
        for head, output in zip(heads, outputs, strict=True):
            assert output.outputs[0].logprobs is not None
            [entry] = output.outputs[0].logprobs
            weights = [math.exp(entry[token].logprob) for token in allowed]
            for token, weight in zip(allowed, weights, strict=True):
                longer[*head, token] = probabilities[head] * weight / sum(weights)
        probabilities = longer
    params = SamplingParams(
        max_tokens=length + 2, n=4, allowed_token_ids=allowed, prediction=[5, 6, 7, 5, 6]
    )
    outputs = []
    for _ in range(150):  # among many requests, little is drafted
        outputs += llm.generate([prompt], params, use_tqdm=False)
    counts = Counter(tuple(a.token_ids[:length]) for o in outputs for a in o.outputs)
    total = counts.total()
    statistic = sum(
        (counts[tokens] - total * p) ** 2 / (total * p) for tokens, p in probabilities.items()
    )
    assert statistic < 54.05  # exceeded once in 1,000 for 26 degrees of freedom
    assert llm.engine.drafting is not None and llm.engine.drafting.num_accepted > 150
    llm.close()


def test_a_repeated_prompt_takes_few_steps(folder: Path) -> None:
    llm = load(folder, 15)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = [*range(3, 30)]
    [first] = llm.generate([prompt], params, use_tqdm=False)
    steps = []
    for output in llm.stream(prompt, params):
        steps.append(len(output.outputs[0].token_ids))
    assert output.outputs[0].token_ids == first.outputs[0].token_ids
    assert len(steps) <= 8
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    by_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(accepted, engine_metrics.Counter)
    assert isinstance(by_position, engine_metrics.Vector)
    in_requests = [o.metrics.num_accepted_tokens for o in (first, output) if o.metrics is not None]
    assert sum(by_position.values) == accepted.value == sum(in_requests)
    drafts = llm.speculative_config
    assert drafts is not None and len(by_position.values) == drafts.num_speculative_tokens == 15
    llm.close()


def run_steps(llm: LLM, prompts: list[list[int]], params: SamplingParams, **options: Any) -> Any:
    """Return the requests, and the number of those that got tokens in each step."""
    groups = [llm.frontend.prepare(prompt, params, **options) for prompt in prompts]

    def run() -> list[int]:
        for group in groups:
            llm.engine.submit(group)
        counts = []
        while llm.engine.has_unfinished:
            counts.append(len(llm.engine.step()))
        return counts

    return groups, llm.driver.call(run)


def test_drafts_leave_each_running_request_its_token(folder: Path) -> None:
    llm = load(folder, 8, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={5: 100.0})
    groups, counts = run_steps(llm, [[token, 5] for token in range(6, 10)], params)
    assert sum(group.output().metrics.num_accepted_tokens for group in groups) > 20
    assert counts[:10] == [4] * 10
    llm.close()


def test_an_owner_pays_for_accepted_tokens(folder: Path) -> None:
    turns = []
    for speculation in (0, 8):
        llm = load(folder, speculation, max_num_batched_tokens=16)
        for owner in ("a", "b"):
            llm.manager.shares.set(owner, 1.0)
        params = SamplingParams(max_tokens=200, ignore_eos=True, logit_bias={5: 100.0})
        run_steps(llm, [[5, 5, 5, 5]], params, salt="a")
        [group], _ = run_steps(llm, [[6]], SamplingParams(max_tokens=1), salt="a")
        turns.append(group.requests[0].turn)
        llm.close()
    assert turns == [204, 204]


def test_blocks_of_accepted_tokens_reach_the_disk(folder: Path, tmp_path: Path) -> None:
    prompt = [5, 6, 7] * 6
    for count in range(40, 49):
        options = {"cache_dir": str(tmp_path / str(count))}
        llm = load(folder, 8, **options)
        params = SamplingParams(max_tokens=count, ignore_eos=True, logit_bias={5: 100.0})
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.metrics is not None and output.metrics.num_accepted_tokens > 20
        llm.close()
        tokens = [*prompt, *output.outputs[0].token_ids]
        llm = load(folder, 0, **options)
        [output] = llm.generate([tokens], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.num_cached_tokens == (len(tokens) - 1) // 4 * 4  # the last was not computed
        llm.close()


def make_manager(**options: Any) -> KVCacheManager:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4}
    return KVCacheManager(CacheConfig(**{**sizes, **options}), BlockHasher(4))


def finish(manager: KVCacheManager, tokens: list[int], **options: Any) -> None:
    sequence = TokenSequence(f"r{len(tokens)}{options}", tokens, **options)
    computed = manager.get_computed_blocks(sequence)
    manager.allocate_slots(sequence, len(tokens) - computed.num_tokens, computed)
    manager.commit_step()
    manager.free(sequence)


def draft(manager: KVCacheManager, tokens: list[int], count: int = 8, **options: Any) -> list[int]:
    sequence = TokenSequence("draft", tokens, **options)
    manager.allocate_slots(sequence, len(tokens) - 1, None)
    manager.commit_step()
    drafted = manager.draft(sequence, count)
    manager.discard([sequence])
    manager.check()
    return drafted


def test_the_tree_drafts_the_tokens_that_followed() -> None:
    manager = make_manager()
    finish(manager, list(range(22)))
    for length in range(2, 22):
        expected = list(range(length, 22))[:8]
        assert draft(manager, list(range(length))) == expected
    assert draft(manager, [0, 1, 2, 9]) == []


def test_the_tree_drafts_nothing_of_other_tenants() -> None:
    manager = make_manager()
    finish(manager, list(range(22)), salt="a")
    finish(manager, list(range(22)), adapter="style")
    assert draft(manager, list(range(6)), salt="b") == []
    assert draft(manager, list(range(6))) == []
    assert draft(manager, list(range(6)), salt="a") == list(range(6, 14))


def test_the_branch_of_another_request_is_read_where_the_hit_ended() -> None:
    manager = make_manager()
    finish(manager, list(range(40)))
    finish(manager, list(range(40)), salt="a")
    edited = [*range(22), *range(100, 110)]
    for salt, expected in ((None, list(range(20, 40))), ("b", []), ("a", list(range(20, 40)))):
        sequence = TokenSequence("edited", edited, salt=salt)
        computed = manager.get_computed_blocks(sequence)
        manager.allocate_slots(sequence, len(edited) - computed.num_tokens, computed)
        manager.commit_step()
        assert manager.branch(sequence, 100) == expected
        manager.free(sequence)
        manager.check()


def test_a_branch_behind_a_public_prefix_does_not_depend_on_other_tenants() -> None:
    prefix, own = list(range(16)), [*range(16), *range(50, 70)]
    branches = []
    for count in (0, 1, 140):  # requests of the other tenant, some with the same tokens
        manager = make_manager(num_blocks=2048)
        manager.hasher.publish(prefix)
        public: dict[str, Any] = {"public": manager.hasher.public}
        finish(manager, own, salt="a", **public)
        for number in range(count):
            first = 50 if number % 2 else 100 + number
            finish(manager, [*prefix, *range(first, first + 20)], salt="b", **public)
            finish(manager, [*prefix[:12], *range(first, first + 20)], salt="b", **public)
        for length in (8, 16):
            edited = [*prefix[:length], *range(200, 220)]
            sequence = TokenSequence("edited", edited, salt="a", **public)
            computed = manager.get_computed_blocks(sequence)
            manager.allocate_slots(sequence, len(edited) - computed.num_tokens, computed)
            manager.commit_step()
            branches.append(manager.branch(sequence, 100))
            manager.free(sequence)
    assert branches == [own[8:], own[16:]] * 3


def test_tokens_of_another_request_are_drafted() -> None:
    drafter = RepetitionDrafter(range(10, 20))
    assert drafter.propose(TokenSequence("a", [1, 13, 14, 15]), 8) == [16, 17, 18, 19]
    assert drafter.propose(TokenSequence("a", [1, 13, 14, 15, 40]), 8) == [17, 18, 19]
    assert drafter.propose(TokenSequence("a", [1, 13, 14, 15, 40, 41]), 8) == []


def test_a_prediction_is_followed_across_differences() -> None:
    prediction = [*range(10, 30), 50000, *range(10, 16), 60]
    expected: list[int] = []
    sequence, drafter = TokenSequence("a", [1, 2, 3]), AnswerDrafter(expected, 3)

    def propose_after(*tokens: int) -> list[int]:
        for token in tokens:
            sequence.append(token)
        return list(drafter.propose(sequence, 4))

    assert propose_after(10) == []
    expected += prediction  # as when the tiers answer late
    assert propose_after() == [11, 12, 13, 14]
    assert propose_after(11) == [12, 13, 14, 15]
    assert propose_after(7) == propose_after(20, 21) == []
    assert propose_after(22) == [23, 24, 25, 26]  # after a replaced part
    assert propose_after(7, 7, 10, 11, 12) == [13, 14, 15, 60]  # the next of two places
    assert propose_after(13, 14, 15, 60) == []
    assert propose_after(27, 28, 29) == [50000, 10, 11, 12]  # an earlier place, the only one


def test_a_prediction_saves_steps_and_changes_nothing(folder: Path) -> None:
    llm = load(folder, 15, enable_prefix_caching=False)
    prompt = list(range(3, 30))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answer = output.outputs[0].token_ids
        edited = [*answer[:20], 5, 5, 5, *answer[22:]]
        for prediction, most in ((answer, 12), (edited, 20), (answer[::-1], 60), ([150] * 400, 60)):
            params.prediction = prediction
            outputs = list(llm.stream(prompt, params))
            assert outputs[-1].outputs[0].token_ids == answer
            assert len(outputs) <= most
            metrics = outputs[-1].metrics
            if prediction is answer:
                assert metrics.num_accepted_tokens == metrics.num_drafted_tokens > 40
    llm.close()


def test_a_drafted_token_that_is_not_finite_is_rejected(tmp_path: Path) -> None:
    """Regression: it ended the request, whose answer does not contain this token."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = load(save_smallest(tmp_path, poison=77), 8)
    [plain] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    answer = plain.outputs[0].token_ids
    params.prediction = [*answer[:5], 77, *answer[5:]]
    [output] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == answer
    llm.close()


def test_a_processor_that_fails_at_a_drafted_token_is_not_called_again(folder: Path) -> None:
    calls = []

    def fail_once(past: list[int], logits: Tensor) -> Tensor:
        calls.append(len(past))
        if calls == [0, 1, 2, 3]:
            raise ValueError("too late")
        return logits

    llm = load(folder, 8)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    [output] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    params.prediction = output.outputs[0].token_ids
    params.logits_processors = [fail_once]
    with pytest.raises(EngineError, match="a logits processor failed: ValueError: too late"):
        llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert llm.engine.manager.num_free_blocks == 64
    llm.close()


def test_a_prediction_is_checked(folder: Path) -> None:
    llm = load(folder, 0)
    wrong: dict[str, Any] = {
        "prediction is 3; allowed: a string, or a list of token ids": 3,
        "prediction has -1; allowed: a whole number of at least 0": [-1],
        "prediction has the token id 151; allowed: from 0 to 150": [151],
        "prediction is a string, and the model has no tokenizer; allowed: token ids": "text",
        "prediction has the lone surrogate": "\ud800",
    }
    for message, prediction in wrong.items():
        with pytest.raises(RequestError, match=f"^{message}"):
            llm.generate([[1]], SamplingParams(prediction=prediction), use_tqdm=False)
    llm.close()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_repetitions_are_followed_to_the_next_difference(tokens: list[int], count: int) -> None:
    sequence, drafter = TokenSequence("a", tokens[:1]), RepetitionDrafter()
    place, may_skip = 0, False  # 0: nothing is repeated
    for length, token in enumerate([*tokens[1:], 0], 1):
        last = tokens[length - 2 : length]
        starts = [i for i in range(2, length) if tokens[i - 2 : i] == last] if length > 2 else []
        if place and tokens[place] == last[-1]:
            place, may_skip = place + 1, True
        elif starts:
            place, may_skip = starts[-1], True
        else:
            place, may_skip = place + 1 if may_skip else 0, False
        text = tokens[:length]
        for _ in range(count if place else 0):
            text.append(text[len(text) - (length - place)])
        assert drafter.propose(sequence, count) == text[length:]
        sequence.append(token)


def test_the_acceptance_of_drafts_is_measured_without_verifying_them() -> None:
    sequence = TokenSequence("a", [1, 2, 3, 4, 1, 2, 3])
    source = DraftSource(RepetitionDrafter(), 0.6)
    assert list(source.propose(sequence, 2)) == [4, 1]
    assert source.acceptance == 0.6
    for token in (4, 1, 2, 3, 4):
        sequence.append(token)
        source.propose(sequence, 2)
    assert source.acceptance > 0.85
    for token in (5, 6, 1, 2, 3, 7, 8, 1, 2, 3, 9, 10):
        sequence.append(token)
        source.propose(sequence, 2)
    assert source.acceptance < 0.6


def test_costs_of_rows_are_those_of_measured_steps() -> None:
    cost = RowCost()
    assert cost.seconds(2) == pytest.approx(1.25 * cost.seconds(1))  # a guess
    cost.note(1, 0.1)
    assert [cost.seconds(rows) for rows in (1, 2, 4)] == pytest.approx([0.1, 0.125, 0.15625])
    for seconds in (9.0, 0.3, 0.16, 9.0):
        cost.note(4, seconds)
    assert [cost.seconds(rows) for rows in (3, 4, 8)] == pytest.approx([0.1425, 0.16, 0.2])
    for _ in range(3):  # fewer are not trusted, and two steps of four rows take less
        assert cost.seconds(8) == pytest.approx(0.2)
        cost.note(8, 9.0)
    assert cost.seconds(8) == pytest.approx(0.32)
    for _ in range(600):
        cost.note(1, 0.1)
    assert cost.seconds(8) == pytest.approx(0.1 * 1.25**3)  # it is tried again
    for seconds in (0.12, *[0.15] * 7):
        cost.note(2, seconds)
    assert cost.seconds(2) == pytest.approx(0.12)
    cost.note(2, 0.15)
    assert cost.seconds(2) == pytest.approx(0.15)


class LinearCost(RowCost):
    """Costs by which each row after the first takes `slope` times as long as the first."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self._slope = slope

    def seconds(self, rows: int) -> float:
        return 1 + self._slope * (rows - 1)


@pytest.mark.parametrize(("cost_of_row", "is_drafted"), [(0.0, True), (0.5, True), (1.0, False)])
def test_drafts_have_the_most_profitable_length(
    folder: Path, cost_of_row: float, is_drafted: bool
) -> None:
    llm = LLM(folder, num_threads=1, num_blocks=64)
    assert llm.engine.drafting is not None
    llm.engine.drafting.row_cost = LinearCost(cost_of_row)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={5: 100.0})
    [output] = llm.generate([[5, 6, 7] * 6], params, use_tqdm=False)
    llm.close()
    assert output.metrics is not None
    assert (output.metrics.num_drafted_tokens > 0) == is_drafted


def test_requests_learn_from_drafts_of_earlier_requests_of_their_tenant(folder: Path) -> None:
    llm = LLM(folder, num_threads=1, num_blocks=64)
    assert llm.engine.drafting is not None
    llm.engine.drafting.row_cost = LinearCost(0.5)  # helps if half of the tokens are right

    def count_drafted(first: int, salt: str) -> int:
        # The prompt repeats that 8 follows 9 and 5. The answer is 5 and 5, so the draft is wrong.
        params = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={5: 100.0})
        prompt = [first, *[9, 5, 8, 9] * 6]
        [output] = llm.generate([prompt], params, cache_salt=salt, use_tqdm=False)
        assert output.metrics is not None and output.metrics.num_accepted_tokens == 0
        return output.metrics.num_drafted_tokens

    drafted = [count_drafted(first, "a") for first in range(20, 40)]
    assert drafted[0] > 0 and drafted[-10:] == [0] * 10
    assert count_drafted(40, "b") == drafted[0]
    llm.close()


@pytest.mark.skipif(native.avx2_library() is None, reason="needs the compiled kernels")
def test_greedy_answers_have_the_bits_of_single_rows_by_default() -> None:
    """With the compiled kernels, neither drafts nor a hit of the whole prompt change a bit."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    answers = []
    for speculation in ("off", 15):
        llm = LLM("headstart-tiny", speculation=speculation, num_threads=1, num_blocks=64)
        draft_always(llm)
        for _ in range(2):
            [output] = llm.generate(["The numbers are 1 2 3" * 4], params, use_tqdm=False)
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
        llm.close()
    assert output.metrics is not None and output.metrics.num_accepted_tokens > 20
    assert all(answer == answers[0] for answer in answers)


def test_requests_that_share_attention_draft_only_with_a_number(folder: Path) -> None:
    prompt, params = list(range(3, 83)), SamplingParams(temperature=0, max_tokens=8)
    cases: list[tuple[int | str, bool]] = [("auto", False), (4, True)]
    for speculation, drafts_together in cases:
        llm = load(folder, speculation)
        llm.generate([[*prompt, 5]], params, use_tqdm=False)
        drafting = llm.engine.drafting
        assert drafting is not None
        llm.generate([[*prompt, 5], [*prompt, 5]], params, use_tqdm=False)
        assert (drafting.num_drafted > 0) is drafts_together
        llm.generate([[*prompt, 5]], params, use_tqdm=False)
        assert drafting.num_drafted > 0
        llm.close()
