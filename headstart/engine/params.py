"""Sampling parameters of a request, in vLLM's names and defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Self, TypeGuard

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.validation import Number, check_absent, check_fields, check_utf8, describe, option

MAX_BIAS = 100
MAX_BAD_WORDS = 1024


def check_bias(bias: object) -> None:
    """A mapping of token ids to numbers from -100 to 100, or None."""
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {describe(bias)}; allowed: a dict of token ids")
    _check_entries("logit_bias", bias)
    for value in bias.values():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestError(
                f"logit_bias has {describe(value)}; allowed: a number from -{MAX_BIAS} to "
                f"{MAX_BIAS}"
            )


def read_bias(bias: object) -> object:
    """A bias whose keys may be texts, as JSON has them, brought within its range.

    What is no such thing is left to `check_bias`.
    """
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(token_id) if _is_digits(token_id) else token_id: _within_range(value)
        for token_id, value in bias.items()
    }


def _is_digits(text: object) -> bool:
    return isinstance(text, str) and text.isdecimal() and len(text) < 20


def _within_range(value: Any) -> Any:
    is_number = type(value) in (int, float) and value == value  # which NaN is not
    return min(MAX_BIAS, max(-MAX_BIAS, value)) if is_number else value


def check_ids(token_ids: object) -> None:
    """A list of at least one token id, or None."""
    if token_ids is None:
        return
    if not _is_list(token_ids) or not token_ids:
        raise RequestError(
            f"allowed_token_ids is {describe(token_ids)}; allowed: a list of at least one token id"
        )
    _check_entries("allowed_token_ids", token_ids)


def check_words(words: object) -> None:
    """A list of texts that are not blank, or None."""
    if words is None:
        return
    if not _is_list(words) or len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words is {describe(words)}; allowed: a list of at most {MAX_BAD_WORDS} texts"
        )
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words has {describe(word)}; allowed: texts that are not blank")
        check_utf8("bad_words", word)


def check_callbacks(functions: object) -> None:
    """A list of functions, or None."""
    if functions is None:
        return
    if not _is_list(functions) or not all(map(callable, functions)):
        raise RequestError(
            f"logits_processors is {describe(functions)}; allowed: a list of functions of token "
            "ids and logits"
        )


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have. Raises RequestError."""
    if token_ids and max(token_ids) >= vocab_size:
        raise RequestError(
            f"{name} has the token id {describe(max(token_ids))}; allowed: from 0 to "
            f"{vocab_size - 1}"
        )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_entries(name: str, token_ids: Any) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"{name} has {describe(token_id)}; allowed: a whole number of at least 0"
            )


MAX_LOGPROBS = 1000
MAX_ANSWERS = 64
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 2**14  # of all stop strings: each is looked for at every token
_LEAST_TEMPERATURE = 1e-5


SEEDS = Number(int, -(2**63), 2**63 - 1)
"""Integers that a request or an engine may have as its seed."""

_TOKEN_IDS = Number(int, 0)


class RequestOutputKind(Enum):
    """Contents of the outputs of a stream: all so far, the new part, or the last output only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """Ways to choose tokens, in vLLM's names."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass(kw_only=True)
class SamplingParams:
    """The sampling of one request. Raises RequestError for a value outside its range.

    Fields may be set and lists changed; a request uses the values that it was made with, which are
    checked then. stop, stop_token_ids and bad_words are lists, empty where none were given.

    stop and stop_token_ids end the answer; the text stops before a stop string unless
    include_stop_str_in_output. logprobs=k gives the k likeliest tokens and the chosen one for
    every token of the answer, prompt_logprobs=k the same for the prompt. Without a seed a
    request takes the engine's next one. With skip_storing_prefix_cache a request reads the cache,
    and no other request finds what is computed for it. With similar_images an image of an earlier
    request that looks like one of this prompt, has the same cache salt and set this field too, is
    used in its place; `images` of the output reports it.

    These fields change logits: logit_bias adds a number from -100 to 100 to the logits of token
    ids; allowed_token_ids bans all others; bad_words bans the last token of each word after the
    others; logits_processors are functions of the answer's token ids so far, or of the prompt's
    and those, and of its logits `[vocab]`, which return logits and must not wait for a thread that
    calls the engine; structured_outputs gives the answer a form.
    """

    n: int = option(1, "answers to one prompt", Number(int, 1, MAX_ANSWERS))
    max_tokens: int | None = option(16, "tokens of an answer at the most", Number(int, 1))
    min_tokens: int = option(0, "tokens before the answer may end", Number(int, 0))
    temperature: float = option(
        1.0, "0 takes the likeliest token; higher is more random", Number(float, 0)
    )
    top_p: float = option(
        1.0,
        "choose among the likeliest tokens that have this probability",
        Number(float, 0, 1, above_low=True),
    )
    top_k: int = option(0, "choose among this many likeliest tokens; 0 is all", Number(int, -1))
    min_p: float = option(
        0.0, "leave out tokens this much less likely than the likeliest", Number(float, 0, 1)
    )
    seed: int | None = option(None, "makes the answer repeatable", SEEDS)
    stop: str | Sequence[str] | None = option(None, "end the answer before this text")
    stop_token_ids: Sequence[int] | None = option(None, "end the answer after one of these")
    ignore_eos: bool = option(False, "go on after the end of the text")
    repetition_penalty: float = option(
        1.0, "above 1 avoids tokens of prompt and answer", Number(float, 0, above_low=True)
    )
    presence_penalty: float = option(
        0.0, "above 0 avoids tokens that the answer has", Number(float, -2, 2)
    )
    frequency_penalty: float = option(
        0.0, "the same, for each time that it has them", Number(float, -2, 2)
    )
    logprobs: int | None = option(None, allowed=Number(int, -1, MAX_LOGPROBS))
    prompt_logprobs: int | None = option(None, allowed=Number(int, -1, MAX_LOGPROBS))
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None
    skip_storing_prefix_cache: bool | None = None
    similar_images: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    # Fields of vLLM's that have no effect.
    skip_clone: object = False
    extra_args: object = None
    spaces_between_special_tokens: object = True
    output_text_buffer_length: object = 0
    flat_logprobs: object = False
    routed_experts_prompt_start: object = 0
    watermarking: object = None
    # Fields of vLLM's that must ask for nothing.
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
    def from_optional(cls, **given: Any) -> Self:
        """Make parameters of those that are not None; the others have their defaults.

        The keys of a logit_bias may be texts, and its values beyond -100 and 100 become these.
        """
        # For max_tokens None is a value: no limit but the model's.
        chosen = {n: v for n, v in given.items() if v is not None or n == "max_tokens"}
        if "logit_bias" in chosen:
            chosen["logit_bias"] = read_bias(chosen["logit_bias"])
        return cls(**chosen)

    def clone(self) -> Self:
        """Return a copy that may be changed, lists and all."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._copy_lists()
        return copied

    def _copy_lists(self) -> None:
        values = self.__dict__
        values["stop"] = list(self.stop_strings)
        for name in ("stop_token_ids", "bad_words"):
            values[name] = list(dict.fromkeys(values[name] or ()))
        for name, kind in (("allowed_token_ids", list), ("logit_bias", dict)):
            if values[name] is not None:
                values[name] = kind(values[name])

    @property
    def is_stored(self) -> bool:
        """True if other requests may find what is computed for this one."""
        return not self.skip_storing_prefix_cache

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`."""
        return self.logprobs

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy or random, with or without a seed."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def check(self) -> None:
        """Raise RequestError for a value outside its range. As in vLLM, -1 is no seed."""
        if isinstance(self.seed, int) and self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        check_fields(self, RequestError)
        check_absent(
            {
                "prompt_logprob_token_ids": self.prompt_logprob_token_ids,
                "prompt_logprob_start": self.prompt_logprob_start or None,
                "logprob_token_ids": self.logprob_token_ids,
                "stream_interval": None if self.stream_interval == 1 else self.stream_interval,
                "thinking_token_budget": self.thinking_token_budget,
                "repetition_detection": self.repetition_detection,
                "trace_decode_token_ids": self.trace_decode_token_ids,
            }
        )
        _check_stops(self.stop)
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                f"stop is {describe(self.stop)} and detokenize False; allowed: stop strings with "
                "detokenize, or stop_token_ids"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {describe(self.min_tokens)}; allowed: from 0 to max_tokens, "
                f"which is {describe(self.max_tokens)}"
            )
        _check_stop_ids(self.stop_token_ids)
        check_bias(self.logit_bias)
        check_ids(self.allowed_token_ids)
        check_words(self.bad_words)
        check_callbacks(self.logits_processors)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True for greedy sampling: the argmax is taken, nothing is drawn.

        As in vLLM that begins a little above 0: logits divided by less are infinite.
        """
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """True if a logits processor is needed."""
        return self.allowed_token_ids is not None or bool(
            self.logit_bias or self.bad_words or self.logits_processors or self.structured_outputs
        )

    @property
    def has_penalties(self) -> bool:
        """True if a penalty depends on the tokens seen before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _check_stops(stop: object) -> None:
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    if stop is not None and not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop is {describe(stop)}; allowed: texts of at least one character")
    length = sum(len(text) for text in stops if isinstance(text, str))
    if len(stops) > MAX_STOPS or length > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop has {len(stops):,} texts of {length:,} characters; allowed: at most "
            f"{MAX_STOPS:,} of {MAX_STOP_CHARACTERS:,} together"
        )
    for text in stops:
        if isinstance(text, str):
            check_utf8("stop", text)


def _check_stop_ids(token_ids: object) -> None:
    if token_ids is None:
        return
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise RequestError(f"stop_token_ids is {describe(token_ids)}; allowed: a list of token ids")
    wrong = [entry for entry in token_ids if entry not in _TOKEN_IDS]
    if wrong:
        raise RequestError(f"stop_token_ids has {describe(wrong[0])}; allowed: {_TOKEN_IDS}")
