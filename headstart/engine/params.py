"""How a request wants its answer chosen, in vLLM's names and defaults."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import RequestError

MAX_LOGPROBS = 1000
MAX_ANSWERS = 64


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling. Raises RequestError for a value outside its range.

    stop and stop_token_ids end the answer; the text stops before a stop string unless
    include_stop_str_in_output. logprobs=k gives the k likeliest tokens and the chosen one for
    every token of the answer, prompt_logprobs=k the same for the prompt. Without a seed a
    request takes the engine's next one.
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

    def __post_init__(self) -> None:
        _check_range("n", self.n, 1, MAX_ANSWERS)
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0, None)
        _check_range("top_k", self.top_k, -1, None)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; allowed: above 0, up to 1")
        if not self.repetition_penalty > 0:
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}; it is above 0")
        if "" in self.stop_strings:
            raise RequestError("a stop string is empty; it must have a character")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with nothing drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before are avoided or favoured."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be a number")
    if not value >= low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}; allowed: {limits}")
