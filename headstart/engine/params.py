"""How a request wants its answer chosen, in vLLM's names and defaults."""

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.errors import RequestError
from headstart.validation import Number, check_fields, check_utf8, describe, option

MAX_LOGPROBS = 1000
MAX_ANSWERS = 64
_LEAST_TEMPERATURE = 1e-5


SEEDS = Number(int, -(2**63), 2**63 - 1)
"""Integers that a request or an engine may have as its seed."""

_TOKEN_IDS = Number(int, 0)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling. Raises RequestError for a value outside its range.

    stop and stop_token_ids end the answer; the text stops before a stop string unless
    include_stop_str_in_output. logprobs=k gives the k likeliest tokens and the chosen one for
    every token of the answer, prompt_logprobs=k the same for the prompt. Without a seed a
    request takes the engine's next one. With similar_images an image of an earlier request that
    looks like one of this prompt, has the same cache salt and asked for this too, stands in its
    place; the output's `images` say for which.
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
    logprobs: int | None = option(None, allowed=Number(int, 0, MAX_LOGPROBS))
    prompt_logprobs: int | None = option(None, allowed=Number(int, 0, MAX_LOGPROBS))
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    similar_images: bool = False

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {describe(self.min_tokens)}; allowed: from 0 to max_tokens, "
                f"which is {describe(self.max_tokens)}"
            )
        _check_stops(self.stop)
        _check_stop_ids(self.stop_token_ids)

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
