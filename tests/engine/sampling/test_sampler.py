"""The sampler compared with `generate` of transformers, with formulas, and in any batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from headstart import SamplingParams
from headstart.engine.sampling import (
    SampledToken,
    Sampler,
    SamplingState,
    TokenLogprob,
    token_logprobs,
)
from headstart.weights.greedy_head import greedy_tokens
from tests.tiny_models import TINY
from tests.tiny_models import VOCABULARY as MODEL_VOCABULARY

VOCABULARY = 40
EOS = frozenset([2, 7])
SAMPLER = Sampler(VOCABULARY)
PROMPT = [3, 5, 5, 11]


def make_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def make_state(output: list[int] | None = None, **options: Any) -> SamplingState:
    """Return a request in the middle of its answer."""
    params = SamplingParams(**{"max_tokens": None, **options})
    generator = torch.Generator()
    if params.seed is not None:
        generator.manual_seed(params.seed)
    return SamplingState(params, PROMPT, [] if output is None else output, generator, EOS)


def sample_one(logits: Tensor, state: SamplingState) -> SampledToken:
    [token] = SAMPLER.sample(logits, [state])
    return token


# The distribution to draw from


@pytest.fixture(scope="module")
def model() -> Any:
    return TINY["llama"]()


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {"top_k": 0}),
        ({"temperature": 0.6}, {"temperature": 0.6, "top_k": 0}),
        ({"temperature": 1.8, "top_k": 5}, {"temperature": 1.8, "top_k": 5}),
        ({"top_k": 1}, {"top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 1000}, {"top_k": 1000}),
        ({"top_p": 0.7}, {"top_p": 0.7, "top_k": 0}),
        ({"top_p": 0.7, "top_k": 9}, {"top_p": 0.7, "top_k": 9}),
        ({"min_p": 0.1}, {"min_p": 0.1, "top_k": 0}),
        (
            {"temperature": 0.5, "min_p": 0.1, "top_k": 4},
            {"temperature": 0.5, "min_p": 0.1, "top_k": 4},
        ),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7, "top_k": 0}),
        ({"repetition_penalty": 0.6, "top_k": 9}, {"repetition_penalty": 0.6, "top_k": 9}),
        ({"min_tokens": 4}, {"min_new_tokens": 4, "top_k": 0}),
        (
            {"temperature": 0, "repetition_penalty": 1.7},
            {"do_sample": False, "repetition_penalty": 1.7},
        ),
        ({"temperature": 0, "min_tokens": 4}, {"do_sample": False, "min_new_tokens": 4}),
    ],
)
def test_scores_are_those_of_transformers_generate(
    model: Any, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """All bits are equal in every step, for the same raw logits."""
    prompt = torch.tensor([[5, 9, 9, 40, 77]])
    torch.manual_seed(1)
    generated: Any = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        eos_token_id=[2, 7],
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{"do_sample": True, **theirs},
    )
    answer = generated.sequences[0, prompt.shape[1] :].tolist()
    assert len(answer) >= options.get("min_tokens", 1)
    sampler = Sampler(MODEL_VOCABULARY)
    for step, (raw, scores) in enumerate(zip(generated.logits, generated.scores, strict=True)):
        params = SamplingParams(**options)
        state = SamplingState(params, prompt[0].tolist(), answer[:step], None, EOS)
        assert torch.equal(sampler.process(raw, state), scores)


@given(
    temperature=st.floats(0.2, 3),
    top_k=st.integers(-1, VOCABULARY + 2),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_probabilities_follow_vllm_s_formulas(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Compare with plain floats: temperature, then min-p, then top-k, then top-p of the rest."""
    logits = make_logits(seed=seed)
    candidates = sorted(enumerate((logits[0].double() / temperature).tolist()), key=lambda e: -e[1])
    largest = candidates[0][1]
    ratios = [math.exp(score - largest) for _, score in candidates]
    assume(all(abs(ratio - min_p) > 1e-5 for ratio in ratios[1:]))
    candidates = [
        entry for entry, ratio in zip(candidates, ratios, strict=True) if ratio >= min_p
    ] or candidates[:1]
    if top_k > 0:
        candidates = candidates[:top_k]
    total = sum(math.exp(score - largest) for _, score in candidates)
    nucleus, mass = [], 0.0
    for token_id, score in candidates:
        assume(abs(mass - top_p) > 1e-5)
        if mass < top_p or top_p == 1:
            nucleus.append((token_id, math.exp(score - largest)))
        mass += math.exp(score - largest) / total
    total = sum(weight for _, weight in nucleus)
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    for token_id, weight in nucleus:
        expected[token_id] = weight / total
    state = make_state(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = SAMPLER.process(logits, state).softmax(-1)[0].double()
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(probabilities > 0, expected > 0)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    """A chi-squared test over 4,000 draws with a fixed seed, so that it always or never passes."""
    logits = make_logits(seed=3)
    state = make_state(temperature=0.8, top_k=6, seed=1)
    weights = SAMPLER.process(logits, state).softmax(-1)[0]
    draws = [sample_one(logits, state).token_id for _ in range(4000)]
    counts = torch.bincount(torch.tensor(draws), minlength=VOCABULARY)
    assert counts[weights == 0].sum() == 0
    expected = weights[weights > 0] * 4000
    chi_squared = float(((counts[weights > 0] - expected) ** 2 / expected).sum())
    assert chi_squared < 20.5  # 5 degrees of freedom: a fair sampler exceeds this once in 1,000


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-40, 1e6])
def test_extreme_temperatures_still_draw(temperature: float) -> None:
    """No NaN: a tiny one takes the likeliest token, a huge one any token."""
    logits = make_logits() * 10
    token = sample_one(logits, make_state(temperature=temperature, seed=0))
    assert 0 <= token.token_id < VOCABULARY
    if temperature < 1:
        assert token.token_id == int(logits.argmax())


# Penalties


@given(
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
    repetition=st.sampled_from([0.5, 1.0, 1.5]),
    presence=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency=st.sampled_from([-1.0, 0.0, 0.25]),
)
def test_penalties_are_openai_s_and_ctrl_s(
    output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    """Repetition counts prompt and answer; presence and frequency count the answer alone."""
    logits = make_logits(seed=len(output))
    expected = logits[0].tolist()
    for token_id in {*PROMPT, *output}:
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id in set(output):
        expected[token_id] -= presence + frequency * output.count(token_id)
    state = make_state(
        output,
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    torch.testing.assert_close(SAMPLER.process(logits, state)[0], torch.tensor(expected))
    assert sample_one(logits, state).token_id == max(
        range(VOCABULARY), key=lambda token_id: SAMPLER.process(logits, state)[0, token_id]
    )


def test_a_penalty_follows_the_answer_as_it_grows() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :3] = torch.tensor([3.0, 2.0, 1.0])
    state = make_state(temperature=0, presence_penalty=2)
    for _ in range(4):
        state.output_token_ids.append(sample_one(logits, state).token_id)
    assert state.output_token_ids == [0, 1, 0, 0]


def test_the_logits_are_not_changed() -> None:
    logits = make_logits()
    before = logits.clone()
    state = make_state(
        [2, 2],
        min_tokens=5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=2,
        presence_penalty=1,
        frequency_penalty=1,
        logprobs=3,
    )
    sample_one(logits, state)
    assert torch.equal(logits, before)


# The end of an answer


def test_no_answer_ends_before_min_tokens() -> None:
    """Neither the model's stop ids nor the request's end it."""
    logits = make_logits()
    logits[0, [2, 7, 9]] = torch.tensor([30.0, 29.0, 28.0])
    options: dict[str, Any] = {"temperature": 0, "min_tokens": 3, "stop_token_ids": [9]}
    assert sample_one(logits, make_state([4, 4], **options)).token_id not in {2, 7, 9}
    assert sample_one(logits, make_state([4, 4, 4], **options)).token_id == 2
    ignoring = make_state([4, 4], ignore_eos=True, **options)
    assert sample_one(logits, ignoring).token_id == 2
    weights = SAMPLER.process(logits, make_state(**{**options, "temperature": 1})).softmax(-1)
    assert weights[0, [2, 7, 9]].tolist() == [0, 0, 0]


def test_a_stop_id_outside_the_vocabulary_bans_nothing() -> None:
    """It can never be sampled, and it must not fail the step of all other requests."""
    logits = make_logits()
    state = make_state(temperature=0, min_tokens=3, stop_token_ids=[VOCABULARY, 10**12])
    assert sample_one(logits, state).token_id == int(logits.argmax())


# One row, whatever the others


def any_state(kind: int) -> SamplingState:
    """Return requests of all kinds, each with a separate generator."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.1, "seed": 5},
        {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "seed": 6},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0, "seed": 7, "logprobs": 0},
        {"temperature": 0, "repetition_penalty": 1.4, "min_tokens": 9},
    ]
    return make_state([kind, 2], **options[kind])


@given(kinds=st.lists(st.integers(0, 5), min_size=1, max_size=8), seed=st.integers(0, 50))
def test_a_row_is_the_same_alone_and_in_any_batch(kinds: list[int], seed: int) -> None:
    logits = make_logits(len(kinds), seed)
    together = SAMPLER.sample(logits, [any_state(kind) for kind in kinds])
    alone = [
        sample_one(row.clone().unsqueeze(0), any_state(kind))
        for row, kind in zip(logits, kinds, strict=True)
    ]
    assert together == alone


def test_a_seed_repeats_an_answer_and_another_seed_gives_another() -> None:
    logits = make_logits() / 3

    def answer(seed: int) -> list[int]:
        state = make_state(seed=seed)
        return [sample_one(logits, state).token_id for _ in range(20)]

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_sampling_does_not_use_torch_s_global_generator() -> None:
    before = torch.get_rng_state()
    SAMPLER.sample(make_logits(6), [any_state(kind) for kind in range(6)])
    assert torch.equal(torch.get_rng_state(), before)


@given(
    ties=st.sets(st.integers(0, VOCABULARY - 1), min_size=1),
    row=st.integers(0, 6),
    options=st.sampled_from([{}, {"logprobs": 1}, {"min_tokens": 3}]),
)
def test_the_first_of_equally_likely_tokens_is_taken(
    ties: set[int], row: int, options: dict[str, Any]
) -> None:
    """Results are equal in any row and on any path."""
    logits = make_logits(7).clamp(max=9)
    logits[row, sorted(ties)] = 50.0
    allowed = ties - EOS if "min_tokens" in options else ties
    assume(allowed)
    states = [make_state(temperature=0, **options) for _ in range(7)]
    assert SAMPLER.sample(logits, states)[row].token_id == min(allowed)


def test_a_batch_of_plain_greedy_requests_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "_choose", None)  # not callable: any other path would fail
    logits = make_logits(5)
    tokens = SAMPLER.sample(logits, [make_state(temperature=0, seed=3) for _ in range(5)])
    assert tokens == [SampledToken(token_id, None, ()) for token_id in logits.argmax(-1).tolist()]


# Log-probabilities


@pytest.mark.parametrize("top", [0, 1, 3, VOCABULARY, 1000])
def test_logprobs_are_of_the_raw_logits(top: int) -> None:
    """Before temperature, penalties and top-k; the chosen token first, then the likeliest."""
    logits = make_logits(seed=4)
    raw = logits.log_softmax(-1)[0]
    order = raw.argsort(descending=True).tolist()
    state = make_state(order[:1], temperature=3.0, seed=2, presence_penalty=2.0, logprobs=top)
    token = sample_one(logits, state)
    own = TokenLogprob(token.token_id, raw[token.token_id].item(), order.index(token.token_id) + 1)
    others = [
        TokenLogprob(token_id, raw[token_id].item(), rank)
        for rank, token_id in enumerate(order[:top], 1)
        if token_id != token.token_id
    ]
    assert token.logprob == own.logprob
    assert token.top == (own, *others)


def test_logprobs_do_not_change_the_chosen_token() -> None:
    logits = make_logits(seed=5)
    for seed in range(10):
        plain = sample_one(logits, make_state(seed=seed))
        with_logprobs = sample_one(logits, make_state(seed=seed, logprobs=5))
        assert plain.token_id == with_logprobs.token_id
        assert plain.logprob is None and plain.top == ()


def test_prompt_logprobs_are_those_of_each_row() -> None:
    logits = make_logits(3)
    rows = token_logprobs(logits, [4, 9, 0], 2)
    raw = logits.log_softmax(-1)
    for entries, token_id, row in zip(rows, [4, 9, 0], raw, strict=True):
        assert entries[0].token_id == token_id
        assert entries[0].logprob == row[token_id].item()
        assert entries[0].rank == int((row > row[token_id]).sum()) + 1
        assert {entry.token_id for entry in entries} == {token_id, *row.topk(2).indices.tolist()}


@given(
    st.lists(
        st.sampled_from([-1.5, -0.0, 0.0, 2.0, float("inf"), -float("inf"), float("nan")]),
        min_size=1,
    )
)
def test_the_first_of_the_likeliest_is_taken_as_torch_does(values: list[float]) -> None:
    logits = torch.tensor([values, values[::-1]])
    finite = logits.amax(-1).isfinite()
    assert greedy_tokens(logits) == torch.where(finite, logits.argmax(-1), -1).tolist()
