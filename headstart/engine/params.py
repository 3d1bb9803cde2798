"""Sampling parameters of a request, with vLLM's names and defaults."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import Any, Self

from headstart.engine.structured_outputs import Accepting, StructuredOutputsParams
from headstart.errors import RequestError
from headstart.validation import (
    Allowed,
    Number,
    check_absent,
    check_fields,
    check_utf8,
    describe,
    option,
)

MAX_BIAS = 100
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 1000
MAX_ANSWERS = 64
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 2**14  # of all stop strings, which are searched for at each token
_MIN_TEMPERATURE = 1e-5

SEEDS = Number(int, -(2**63), 2**63 - 1)
"""Integers that a request or an engine may have as its seed."""


_TOKEN_IDS = Number(int, 0)
_SHARES = Number(float, 0, 1, above_low=True)
_FACTORS = Number(float, 0, above_low=True)
_PENALTIES = Number(float, -2, 2)
_BIASES = Number(float, -MAX_BIAS, MAX_BIAS)
_STOPS = Accepting(lambda s: isinstance(s, str) and s != "", "strings of at least one character")
_WORDS = Accepting(
    lambda word: isinstance(word, str) and word.strip() != "", "strings that are not blank"
)
_FUNCTIONS = Accepting(callable, "functions of token ids and logits")


def _check_list(
    name: str, values: Any, items: Allowed, allowed: str, least: int = 0, most: float = inf
) -> None:
    """Raise RequestError unless `values` is None or a list of `least` to `most` valid items."""
    if values is None:
        return
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if not is_list or not least <= len(values) <= most:
        raise RequestError(f"{name} is {describe(values)}; allowed: {allowed}")
    _check_items(name, values, items)


def _check_items(name: str, values: Iterable[Any], items: Allowed) -> None:
    for value in values:
        if value not in items:
            raise RequestError(f"{name} has {describe(value)}; allowed: {items}")
        if isinstance(value, str):
            check_utf8(name, value)


def _read_bias(bias: object) -> object:
    """Return a JSON bias with its keys as integers and its values limited to the allowed range.

    Invalid keys and values stay, so that `check` refuses them.
    """
    if not isinstance(bias, Mapping):
        return bias
    limited_bias: dict[Any, Any] = {}
    for key, value in bias.items():
        is_text = isinstance(key, str) and key.isdecimal() and len(key) < 20
        is_number = type(value) in (int, float) and value == value  # not NaN
        limited = min(MAX_BIAS, max(-MAX_BIAS, value)) if is_number else value
        limited_bias[int(key) if is_text else key] = limited
    return limited_bias


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for a token id beyond the model's vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        text = describe(max(token_ids))
        raise RequestError(f"{name} has the token id {text}; allowed: from 0 to {vocab_size - 1}")


class RequestOutputKind(Enum):
    """The content of a stream's outputs: all so far, the new part, or only the last output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """Ways to choose tokens, with vLLM's names."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


_ABSENT = (
    *("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
    *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
)


@dataclass(kw_only=True)
class SamplingParams:
    """The sampling of one request. Raises RequestError for a value outside its range.

    Fields and lists may be changed until a request is created with them; they are checked again
    then. stop, stop_token_ids and bad_words become lists, empty by default.

    stop and stop_token_ids end the answer; the text ends before a stop string unless
    include_stop_str_in_output is set. For each token of the answer, logprobs=k returns the
    log-probabilities of the chosen token and of the k likeliest; prompt_logprobs=k does the same
    for the prompt. Without a seed, a request takes the engine's next seed. With
    skip_storing_prefix_cache, a request reads the cache, and no other request hits its blocks. With
    similar_images, an image may be replaced by a similar image of an earlier request. Both requests
    must set the field and have the same cache salt. The output's `images` reports the replacement.
    prediction, a string or token ids, is the answer that the caller expects. Drafts are taken from
    it, and the answer is the same without it.

    The other fields change logits. logit_bias adds a number from -100 to 100 to the logits of token
    ids. allowed_token_ids bans all other tokens. bad_words bans words. logits_processors are
    functions; see `headstart.engine.logits.CustomProcessors`. structured_outputs constrains the
    answer to a format.
    """

    n: int = option(1, "answers to one prompt", Number(int, 1, MAX_ANSWERS))
    max_tokens: int | None = option(16, "maximum number of tokens in an answer", Number(int, 1))
    min_tokens: int = option(0, "tokens before the answer may end", Number(int, 0))
    temperature: float = option(1.0, "0: likeliest token; higher: more random", Number(float, 0))
    top_p: float = option(1.0, "total probability of the tokens to draw from", _SHARES)
    top_k: int = option(0, "number of likeliest tokens to draw from; 0: all", Number(int, -1))
    min_p: float = option(
        0.0, "minimum probability, as a share of the highest", Number(float, 0, 1)
    )
    seed: int | None = option(None, "makes the answer repeatable", SEEDS)
    stop: str | Sequence[str] | None = option(None, "end the answer before this text")
    stop_token_ids: Sequence[int] | None = option(None, "end the answer after one of these tokens")
    ignore_eos: bool = option(False, "continue after the end of the text")
    repetition_penalty: float = option(1.0, "above 1 avoids tokens of prompt and answer", _FACTORS)
    presence_penalty: float = option(0.0, "above 0 avoids tokens of the answer", _PENALTIES)
    frequency_penalty: float = option(0.0, "above 0 avoids frequent answer tokens", _PENALTIES)
    logprobs: int | None = option(None, allowed=Number(int, -1, MAX_LOGPROBS))
    prompt_logprobs: int | None = option(None, allowed=Number(int, -1, MAX_LOGPROBS))
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None
    skip_storing_prefix_cache: bool | None = None
    similar_images: bool = False
    prediction: str | Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    # Fields of vLLM that have no effect.
    skip_clone: object = False
    extra_args: object = None
    spaces_between_special_tokens: object = True
    output_text_buffer_length: object = 0
    flat_logprobs: object = False
    routed_experts_prompt_start: object = 0
    watermarking: object = None
    # Fields of vLLM that must be empty.
    prompt_logprob_token_ids: object = None
    prompt_logprob_start: object = None
    logprob_token_ids: object = None
    stream_interval: object = None
    thinking_token_budget: object = None
    repetition_detection: object = None
    trace_decode_token_ids: object = None

    def __post_init__(self) -> None:
        self.check()
        self._copy_lists()

    @classmethod
    def from_optional(cls, **kwargs: Any) -> Self:
        """Return parameters with these values; None means the default.

        The keys of a logit_bias may be strings, and its values are limited to -100 to 100.
        """
        # max_tokens=None is not the default: with it, only the model limits the answer.
        values = {n: v for n, v in kwargs.items() if v is not None or n == "max_tokens"}
        if "logit_bias" in values:
            values["logit_bias"] = _read_bias(values["logit_bias"])
        return cls(**values)

    def clone(self) -> Self:
        """Return a copy that shares no list with this object."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._copy_lists()
        return copied

    def _copy_lists(self) -> None:
        values = self.__dict__
        values["stop"] = list(self.stop_strings)
        for name in ("stop_token_ids", "bad_words"):
            values[name] = list(dict.fromkeys(values[name] or ()))
        if not isinstance(self.prediction, str) and self.prediction is not None:
            values["prediction"] = list(self.prediction)
        for name, kind in (("allowed_token_ids", list), ("logit_bias", dict)):
            if values[name] is not None:
                values[name] = kind(values[name])

    @property
    def is_stored(self) -> bool:
        """True if other requests may hit the blocks of this request."""
        return not self.skip_storing_prefix_cache

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy or random, with or without a seed."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def check(self) -> None:
        """Raise RequestError for a value outside its range. As in vLLM, a seed of -1 means none."""
        if isinstance(self.seed, int) and self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        check_fields(self, RequestError)
        absent = {name: getattr(self, name) for name in _ABSENT}
        absent["prompt_logprob_start"] = self.prompt_logprob_start or None
        absent["stream_interval"] = None if self.stream_interval == 1 else self.stream_interval
        check_absent(absent)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        _check_list("stop", stops, _STOPS, f"a string, or a list of {_STOPS}")
        length = sum(map(len, stops or ()))
        if len(stops or ()) > MAX_STOPS or length > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has {len(stops or ()):,} strings of {length:,} characters in total; "
                f"allowed: at most {MAX_STOPS:,} strings of {MAX_STOP_CHARACTERS:,} characters in "
                "total"
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                f"stop is {describe(self.stop)} and detokenize is False; allowed: stop with "
                "detokenize, or stop_token_ids"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {describe(self.min_tokens)}; allowed: from 0 to max_tokens, "
                f"which is {describe(self.max_tokens)}"
            )
        _check_list("stop_token_ids", self.stop_token_ids, _TOKEN_IDS, "a list of token ids")
        allowed = "a list of at least one token id"
        _check_list("allowed_token_ids", self.allowed_token_ids, _TOKEN_IDS, allowed, 1)
        allowed = f"a list of at most {MAX_BAD_WORDS} strings"
        _check_list("bad_words", self.bad_words, _WORDS, allowed, most=MAX_BAD_WORDS)
        if isinstance(self.prediction, str):
            check_utf8("prediction", self.prediction)
        else:
            allowed = "a string, or a list of token ids"
            _check_list("prediction", self.prediction, _TOKEN_IDS, allowed)
        _check_list("logits_processors", self.logits_processors, _FUNCTIONS, "a list of functions")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias is {describe(self.logit_bias)}; allowed: a dict of token ids"
                )
            _check_items("logit_bias", self.logit_bias, _TOKEN_IDS)
            _check_items("logit_bias", self.logit_bias.values(), _BIASES)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True for greedy sampling, which takes the argmax.

        As in vLLM, this includes temperatures so low that logits divided by them may overflow.
        """
        return self.temperature < _MIN_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """True if a logits processor is needed."""
        return self.allowed_token_ids is not None or bool(
            self.logit_bias or self.bad_words or self.logits_processors or self.structured_outputs
        )

    @property
    def has_penalties(self) -> bool:
        """True if a penalty for earlier tokens is set."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)
