"""Bias, allowed tokens, bad words and custom functions follow their formulas in any batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart import SamplingParams
from headstart.engine.logits import LogitsProcessor, Vocabulary, apply_processors
from headstart.engine.sampling import SampledToken, Sampler, SamplingState
from headstart.errors import EngineError, NoTokenError, RequestError
from headstart.frontend.frontend import ProcessorFactory
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
VOCABULARY = len(TOKENIZER)
FACTORY = ProcessorFactory(Vocabulary(TOKENIZER, VOCABULARY, frozenset([382])))
SAMPLER = Sampler(VOCABULARY)
PROMPT = [3, 5]
IDS = st.integers(0, VOCABULARY - 1)


def make_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def make(output: list[int] | None = None, **options: Any) -> SamplingState:
    """Return a request whose answer has these tokens."""
    params = SamplingParams(**{"temperature": 0, **options})
    [processors] = FACTORY.make(params, PROMPT)
    generator = torch.Generator().manual_seed(params.seed or 0)
    state = SamplingState(params, PROMPT, [], generator, frozenset([382]), processors)
    for token_id in output or []:
        state.output_token_ids.append(token_id)
        state.accept(token_id)
    return state


def change(logits: Tensor, *states: SamplingState) -> Tensor:
    assert not apply_processors(logits, [state.processors for state in states])
    return logits


def spell(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return token_ids


# Each by its formula


@given(
    bias=st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=9), seed=st.integers(0, 9)
)
def test_a_bias_is_added(bias: dict[int, float], seed: int) -> None:
    logits = make_logits(1, seed)
    expected = logits.clone()
    for token_id, value in bias.items():
        expected[0, token_id] += value
    assert torch.equal(change(logits, make(logit_bias=bias)), expected)


@given(allowed=st.lists(IDS, min_size=1, max_size=9), seed=st.integers(0, 9))
def test_no_other_token_is_allowed(allowed: list[int], seed: int) -> None:
    logits = make_logits(1, seed)
    expected = torch.full_like(logits, float("-inf"))
    expected[0, allowed] = logits[0, allowed]
    assert torch.equal(change(logits, make(allowed_token_ids=allowed)), expected)


@given(
    words=st.lists(
        st.sampled_from(["a", "the", "other day", "xyz", " the", "ax", "xx"]), min_size=1
    ),
    text=st.text("athxyz odr", max_size=8),
)
def test_the_token_that_completes_a_bad_word_is_banned(words: list[str], text: str) -> None:
    """Each word is banned in the middle of a string and at its beginning, as in vLLM."""
    past = spell(text)
    spelled = [spell(word.lstrip()) for word in words]
    for word in words:
        plain, spaced = spell(word.lstrip()), spell(f" {word.lstrip()}")
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spelled.append(spaced)
    banned = {
        ids[-1] for ids in spelled if len(ids) == 1 or (past[1 - len(ids) :] == ids[:-1] and past)
    }
    logits = make_logits(1)
    expected = logits.clone()
    expected[0, sorted(banned)] = float("-inf")
    assert torch.equal(change(logits, make(past, bad_words=words)), expected)


def test_bad_words_are_not_in_an_answer_that_prefers_them() -> None:
    """Their tokens are by far the likeliest; none of the words is completed token by token."""
    words = ["other day", "the"]
    state = make(bad_words=words)
    forbidden = [tuple(spell(word)) for word in words] + [tuple(spell(" the"))]
    for _ in range(6):
        logits = torch.zeros(1, VOCABULARY)
        for word in forbidden:
            logits[0, list(word)] = 9.0
        [token] = SAMPLER.sample(logits, [state])
        assert isinstance(token, SampledToken)
        state.output_token_ids.append(token.token_id)
        state.accept(token.token_id)
    answer = state.output_token_ids
    for word in forbidden:
        places = range(len(answer))
        assert all(tuple(answer[at : at + len(word)]) != word for at in places)
    assert set(answer) & {token_id for word in forbidden for token_id in word}


def test_functions_are_called_one_after_the_other() -> None:
    seen: list[Any] = []

    def first(past: list[int], logits: Tensor) -> Tensor:
        seen.append(past)
        return logits * 2

    def second(prompt: list[int], past: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, past))
        logits[7] = 100.0
        return logits

    logits = make_logits(1)
    expected = logits * 2
    expected[0, 7] = 100.0
    state = make([4, 4], logits_processors=[first, second])
    assert torch.equal(change(logits, state), expected)
    assert seen == [[4, 4], (PROMPT, [4, 4])]
    [token] = SAMPLER.sample(make_logits(1), [state])
    assert token == SampledToken(7, None, ())


def test_a_bias_comes_before_penalties_and_temperature() -> None:
    """A bias of 100 on a token with a penalty of 2 still wins, as in vLLM."""
    logits = make_logits(1)
    state = make([9], logit_bias={9: 100.0}, presence_penalty=2.0)
    scores = SAMPLER.process(change(logits.clone(), state), state)
    assert scores[0, 9] == logits[0, 9] + 100 - 2


# Errors end only their row


def _breaks(past: list[int], logits: Tensor) -> Tensor:
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_processors": [_breaks]}, "a logits processor failed: KeyError: 'on purpose'"),
        (
            {"logits_processors": [lambda past, logits: logits[:3]]},
            r"its result is a tensor \[3\]",
        ),
        ({"logits_processors": [lambda past, logits: None]}, "its result is a NoneType; allowed"),
        ({"logits_processors": [lambda past, logits: logits - torch.inf]}, "every token is banned"),
        ({"logits_processors": [lambda past, logits: logits * torch.nan]}, "not finite"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"logprobs": 1}])
def test_a_processor_that_fails_ends_its_own_request(
    options: dict[str, Any], reason: str, more: dict[str, Any]
) -> None:
    assert spell("&") == [5]
    logits = make_logits(3)
    likeliest = logits.argmax(-1).tolist()
    results = SAMPLER.sample(logits, [make(), make(**options, **more), make()])
    assert isinstance(results[1], EngineError)
    with pytest.raises(EngineError, match=reason):
        raise results[1]
    assert [results[0], results[2]] == [SampledToken(likeliest[row], None, ()) for row in (0, 2)]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"logprobs": 1}])
def test_options_that_contradict_later_end_their_request(more: dict[str, Any]) -> None:
    [token] = spell("&")
    state = make([token], allowed_token_ids=[token], bad_words=["&&"], **more)
    logits = make_logits(2)
    likeliest = logits.argmax(-1).tolist()
    failed, other = SAMPLER.sample(logits, [state, make()])
    assert isinstance(failed, NoTokenError)
    assert other == SampledToken(likeliest[1], None, ())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"allowed_token_ids": [5], "bad_words": ["&"]}, "allowed_token_ids and bad_words "),
        ({"allowed_token_ids": [382], "min_tokens": 2}, "allowed_token_ids and min_tokens "),
    ],
)
def test_options_that_contradict_from_the_start_are_refused(
    options: dict[str, Any], names: str
) -> None:
    """Regression: they ended their request with an EngineError in its first step."""
    with pytest.raises(RequestError, match=names):
        make(**options)


# Batches


def any_state(kind: int) -> SamplingState:
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"logit_bias": {3: 5.0, 9: -5.0}, "logprobs": 2},
        {"logit_bias": {4: 3.5}, "allowed_token_ids": [3, 4, 9, 12], "temperature": 0.7},
        {"bad_words": ["other day", "a"], "temperature": 1.0, "seed": 8},
        {"allowed_token_ids": range(50), "repetition_penalty": 1.3, "min_tokens": 5},
        {"logits_processors": [lambda past, logits: -logits]},
    ]
    return make(spell("other"), **options[kind])


@given(kinds=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 50))
def test_a_row_is_the_same_alone_and_in_any_batch(kinds: list[int], seed: int) -> None:
    logits = make_logits(len(kinds), seed)
    alone = [
        SAMPLER.sample(row.clone().unsqueeze(0), [any_state(kind)])
        for row, kind in zip(logits, kinds, strict=True)
    ]
    together = SAMPLER.sample(logits, [any_state(kind) for kind in kinds])
    assert [[token] for token in together] == alone


def test_rows_without_processors_are_not_written() -> None:
    logits = make_logits(7)
    before = logits.clone()
    states = [any_state(kind) for kind in range(7)]
    SAMPLER.sample(logits, states)
    for row, state in enumerate(states):
        assert torch.equal(logits[row], before[row]) == (not state.processors)


def test_log_probabilities_are_of_the_raw_logits() -> None:
    logits = make_logits(2)
    raw = logits.log_softmax(-1)
    state = make(allowed_token_ids=[5], logprobs=3)
    token, _ = SAMPLER.sample(logits, [state, make()])
    assert isinstance(token, SampledToken)
    assert token.token_id == 5
    assert token.logprob == raw[0, 5]
    assert [entry.token_id for entry in token.top[1:]] == raw[0].topk(3).indices.tolist()


def test_a_kind_is_applied_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted(LogitsProcessor):
        rank = 0

        @classmethod
        def change(cls, logits: Tensor, rows: Any) -> dict[int, EngineError]:
            calls.append(len(rows))
            return {}

    apply_processors(make_logits(5), [(Counted(),), (), (Counted(),), (Counted(),), ()])
    assert calls == [3]


# Checks


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {5: 101}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: True}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"5": 1}},
        {"logit_bias": [5]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": "5"},
        {"allowed_token_ids": 5},
        {"allowed_token_ids": [5, -5]},
        {"allowed_token_ids": [True]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": ["  "]},
        {"bad_words": [5]},
        {"bad_words": ["\ud800"]},
        {"bad_words": ["a"] * 1025},
        {"logits_processors": [5]},
        {"logits_processors": print},
        {"structured_outputs": {"json": {}}},
    ],
)
def test_a_wrong_value_is_refused(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(RequestError, match=rf"^{name} (is|has) .*; allowed: "):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options", [{"logit_bias": {VOCABULARY: 1}}, {"allowed_token_ids": [1, VOCABULARY]}]
)
def test_a_token_outside_the_vocabulary_is_refused(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(RequestError, match=f"^{name} has the token id {VOCABULARY}; allowed: "):
        make(**options)


def test_words_need_a_tokenizer() -> None:
    factory = ProcessorFactory(Vocabulary(None, 9, frozenset()))
    with pytest.raises(RequestError, match="has no tokenizer"):
        factory.make(SamplingParams(bad_words=["a"]), PROMPT)


def test_answers_share_no_mutable_state() -> None:
    answers = FACTORY.make(SamplingParams(n=3, bad_words=["other day"], logit_bias={1: 1}), PROMPT)
    words = [one for own in answers for one in own if one.rank == 2]
    assert len({*map(id, words)}) == 3
    assert FACTORY.make(SamplingParams(n=3), PROMPT) == [(), (), ()]
