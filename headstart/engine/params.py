"""How a request wants its answer chosen, in vLLM's names and defaults."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headstart.engine.validation import check_text, describe
from headstart.errors import RequestError

MAX_LOGPROBS = 1000
MAX_ANSWERS = 64
_LEAST_TEMPERATURE = 1e-5


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


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

    n: int = _option(1, "answers to one prompt")
    max_tokens: int | None = _option(16, "tokens of an answer at the most")
    min_tokens: int = _option(0, "tokens before the answer may end")
    temperature: float = _option(1.0, "0 takes the likeliest token; higher is more random")
    top_p: float = _option(1.0, "choose among the likeliest tokens that have this probability")
    top_k: int = _option(0, "choose among this many likeliest tokens; 0 is all")
    min_p: float = _option(0.0, "leave out tokens this much less likely than the likeliest")
    seed: int | None = _option(None, "makes the answer repeatable")
    stop: str | Sequence[str] | None = _option(None, "end the answer before this text")
    stop_token_ids: Sequence[int] | None = _option(None, "end the answer after one of these")
    ignore_eos: bool = _option(False, "go on after the end of the text")
    repetition_penalty: float = _option(1.0, "above 1 avoids tokens of prompt and answer")
    presence_penalty: float = _option(0.0, "above 0 avoids tokens that the answer has")
    frequency_penalty: float = _option(0.0, "the same, for each time that it has them")
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    similar_images: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _NUMBERS.items():
            _check_number(name, getattr(self, name), allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {describe(self.min_tokens)}; allowed: from 0 to max_tokens, "
                f"which is {describe(self.max_tokens)}"
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} is {describe(getattr(self, name))}; allowed: True or False"
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
        """Whether the likeliest token is taken, with nothing drawn.

        As in vLLM that begins a little above 0: logits divided by less are infinite.
        """
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before are avoided or favoured."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


_MAX_FLOAT = sys.float_info.max


class _Number(NamedTuple):
    """What a number may be: one of a kind, finite, from `low` (or just above it) to `high`."""

    kind: type[int] | type[float]
    low: float
    high: float = math.inf
    above_low: bool = False
    or_none: bool = False

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.or_none
        kinds = (int,) if self.kind is int else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or value == math.inf:
            return False
        if self.kind is float and not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            return False  # an integer that no float can hold
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        if self.above_low:
            limits = f"above {self.low}"
            return f"{kind} {limits}" + ("" if self.high == math.inf else f", up to {self.high}")
        if self.high == math.inf:
            return f"{kind} of at least {self.low}"
        return f"{kind} from {self.low} to {self.high}"


SEEDS = _Number(int, -(2**63), 2**63 - 1)
"""Integers that a request or an engine may have as its seed."""

_NUMBERS = {
    "n": _Number(int, 1, MAX_ANSWERS),
    "max_tokens": _Number(int, 1, or_none=True),
    "min_tokens": _Number(int, 0),
    "temperature": _Number(float, 0),
    "top_p": _Number(float, 0, 1, above_low=True),
    "top_k": _Number(int, -1),
    "min_p": _Number(float, 0, 1),
    "seed": SEEDS._replace(or_none=True),
    "repetition_penalty": _Number(float, 0, above_low=True),
    "presence_penalty": _Number(float, -2, 2),
    "frequency_penalty": _Number(float, -2, 2),
    "logprobs": _Number(int, 0, MAX_LOGPROBS, or_none=True),
    "prompt_logprobs": _Number(int, 0, MAX_LOGPROBS, or_none=True),
}
_SWITCHES = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "similar_images",
)


def _check_number(name: str, value: object, allowed: _Number) -> None:
    if value not in allowed:
        raise RequestError(f"{name} is {describe(value)}; allowed: {allowed}")


def _check_stops(stop: object) -> None:
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    if stop is not None and not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop is {describe(stop)}; allowed: texts of at least one character")
    for text in stops:
        if isinstance(text, str):
            check_text("stop", text)


def _check_stop_ids(token_ids: object) -> None:
    if token_ids is None:
        return
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise RequestError(f"stop_token_ids is {describe(token_ids)}; allowed: a list of token ids")
    wrong = [entry for entry in token_ids if entry not in _Number(int, 0)]
    if wrong:
        raise RequestError(f"stop_token_ids has {describe(wrong[0])}; allowed: {_Number(int, 0)}")
