"""Sampling parameters have vLLM's names and defaults, and errors name each value and its range."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import SamplingParams
from headstart.engine.params import RequestOutputKind
from headstart.errors import RequestError

VLLM_DEFAULTS = {
    "n": 1,
    "max_tokens": 16,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
}
OURS = {
    "similar_images": False,
    "prediction": None,
    "logits_processors": None,
    "skip_storing_prefix_cache": None,
}
WITHOUT_EFFECT = {
    "skip_clone": False,
    "extra_args": None,
    "spaces_between_special_tokens": True,
    "output_text_buffer_length": 0,
    "flat_logprobs": False,
    "routed_experts_prompt_start": 0,
    "watermarking": None,
}
UNSUPPORTED = [
    *("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
    *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
]
WHOLE = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]
REAL = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
OPTIONAL = [
    *("max_tokens", "seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs"),
    *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words"),
]


def make(**options: Any) -> SamplingParams:
    return SamplingParams(**options)


def test_names_and_defaults_are_vllm_s() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        **VLLM_DEFAULTS,
        "detokenize": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "skip_reading_prefix_cache": None,
        **OURS,
        **WITHOUT_EFFECT,
        **dict.fromkeys(UNSUPPORTED),
    }


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_takes_any_value(name: str) -> None:
    value = object()
    assert getattr(make(**{name: value}), name) is value


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_field_takes_no_value(name: str) -> None:
    make(**{name: None})
    with pytest.raises(RequestError, match=f"^{name} is 2; not an option of headstart; see docs/"):
        make(**{name: 2})


def test_values_without_effect_are_accepted() -> None:
    SamplingParams(prompt_logprob_start=0, stream_interval=1, logprob_token_ids=[])


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [
        ("n", 1, 64),
        ("max_tokens", 1, 10**9),
        ("min_tokens", 0, 16),
        ("temperature", 0, 1e6),
        ("top_p", 1e-9, 1),
        ("top_k", -1, 10**9),
        ("min_p", 0, 1),
        ("seed", -(2**63), 2**63 - 1),
        ("repetition_penalty", 1e-9, 1e6),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("logprobs", -1, 1000),
        ("prompt_logprobs", -1, 1000),
    ],
)
def test_both_ends_of_a_range_are_allowed(option: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(make(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("n", 0, "from 1 to 64"),
        ("n", 65, "from 1 to 64"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "which is 16"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("top_p", 0, "above 0, up to 1"),
        ("top_p", 1.01, "above 0, up to 1"),
        ("top_p", math.nan, "above 0, up to 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("seed", 2**63, "from "),
        ("seed", 2**64, "from "),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("logprobs", -2, "from -1 to 1000"),
        ("logprobs", 1001, "from -1 to 1000"),
        ("prompt_logprobs", -2, "from -1 to 1000"),
        ("stop", "", "stop"),
        ("stop", ["a", ""], "stop"),
        ("stop", [3], "stop"),
        ("stop", 3, "stop"),
        ("stop_token_ids", 3, "stop_token_ids"),
        ("stop_token_ids", ["a"], "stop_token_ids"),
        ("stop_token_ids", [1.0], "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", [True], "stop_token_ids"),
    ],
)
def test_an_error_names_the_value_and_its_range(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(**{option: value})
    text = str(caught.value)
    assert option in text and allowed in text
    assert isinstance(value, (str, list)) or str(value) in text


@pytest.mark.parametrize("option", WHOLE + REAL)
@pytest.mark.parametrize("value", ["1", True, [1]])
def test_other_types_are_not_numbers(option: str, value: Any) -> None:
    if value is True and option in ("logprobs", "prompt_logprobs"):
        assert getattr(make(**{option: value}), option) == 1  # as in vLLM
        return
    with pytest.raises(RequestError, match=option):
        make(**{option: value})


@pytest.mark.parametrize("option", WHOLE)
def test_a_whole_number_has_no_fraction(option: str) -> None:
    """max_tokens=3.5 would never be reached."""
    with pytest.raises(RequestError, match=option):
        make(**{option: 3.5})


@pytest.mark.parametrize("option", [name for name in VLLM_DEFAULTS if name not in OPTIONAL])
def test_none_is_refused_for_fields_with_a_default(option: str) -> None:
    with pytest.raises(RequestError, match=option):
        make(**{option: None})


def test_none_is_allowed_where_it_has_a_meaning() -> None:
    assert make(**dict.fromkeys(OPTIONAL)).max_tokens is None


def test_min_tokens_needs_no_max_tokens() -> None:
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_parameters_may_be_changed() -> None:
    params = SamplingParams(max_tokens=8)
    copied = params.clone()
    copied.temperature = 0.5
    assert (params.temperature, copied.temperature) == (1.0, 0.5)
    assert copied == SamplingParams(max_tokens=8, temperature=0.5)
    assert copy.deepcopy(copied) == pickle.loads(pickle.dumps(copied)) == copied
    for name, value in (("temperature", -1), ("min_tokens", 9), ("stop", [""])):
        wrong = copied.clone()
        setattr(wrong, name, value)
        with pytest.raises(RequestError):
            wrong.check()


def test_optional_parameters_have_their_defaults() -> None:
    options = {"n": None, "temperature": None, "top_p": 0.5, "max_tokens": None}
    assert SamplingParams.from_optional(**options) == SamplingParams(top_p=0.5, max_tokens=None)


def test_a_bias_of_an_api_is_read() -> None:
    """Keys are strings in JSON; like vLLM, biases are clamped to their range."""
    params = SamplingParams.from_optional(logit_bias={"5": 400, 6: -101.0, 7: 2})
    assert params.logit_bias == {5: 100, 6: -100, 7: 2}
    for wrong in ({"x": 1}, {"5": math.nan}, {"5": "1"}, [5], {"-5": 1}):
        with pytest.raises(RequestError, match=r"logit_bias (has|is) "):
            SamplingParams.from_optional(logit_bias=wrong)


def test_lists_can_be_changed_like_vllm_s() -> None:
    """Regression: `params.stop.append("x")` raised AttributeError since `stop` was None."""
    params = SamplingParams(stop="a", bad_words=("b", "b"), stop_token_ids=[3, 3], seed=-1)
    assert (params.stop, params.bad_words, params.stop_token_ids) == (["a"], ["b"], [3])
    assert params.seed is None
    before = params.clone()
    params.stop.append("x")  # type: ignore[union-attr]
    params.stop_token_ids = params.stop_token_ids + [4]  # type: ignore[operator]  # noqa: RUF005
    params.bad_words += ["c"]  # type: ignore[operator]
    assert (params.stop_strings, params.stop_token_ids) == (("a", "x"), [3, 4])
    assert params.bad_words == ["b", "c"]
    assert before == SamplingParams(stop="a", bad_words=["b"], stop_token_ids=[3])
    params.stop = None
    assert params.clone().stop == []


def test_lists_are_copied() -> None:
    words, ids, bias = ["a"], [3], {3: 1.0}
    params = SamplingParams(stop=words, allowed_token_ids=ids, logit_bias=bias)
    copied = params.clone()
    words.append("b")
    ids.append(4)
    bias[4] = 2.0
    params.logit_bias[5] = 1.0  # type: ignore[index]
    assert copied == SamplingParams(stop=["a"], allowed_token_ids=[3], logit_bias={3: 1.0})


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(RequestError, match="detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_one_or_several_stop_strings() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


@given(st.floats(1e-5, 10))
def test_only_temperature_0_is_greedy(temperature: float) -> None:
    """Temperatures close to 0 are greedy too, as in vLLM."""
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("option", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_counts(option: str) -> None:
    assert not SamplingParams().has_penalties
    assert make(**{option: 1.5}).has_penalties


@pytest.mark.parametrize("stop", [["a"] * 1024, ["a" * 2**14], "a" * 2**14])
def test_stop_strings_are_bounded(stop: str | list[str]) -> None:
    """Every step searches each of them:

    100,000 made the tokens of other requests 80 times slower.
    """
    assert SamplingParams(stop=stop).stop_strings
    with pytest.raises(RequestError, match=r"^stop has .* at most 1,024 strings of 16,384 "):
        SamplingParams(stop=[*stop, "a"] if isinstance(stop, list) else stop + "a")
