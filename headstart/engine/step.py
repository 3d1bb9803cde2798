"""The parts of an engine step: its results, and the choice of tokens."""

from typing import NamedTuple

from torch import Tensor

from headstart.engine.batch import Batch, ScheduledTokens
from headstart.engine.request import RequestGroup
from headstart.engine.runner import StepLogits
from headstart.engine.sampling import SampledToken, Sampler, SamplingState, token_logprobs
from headstart.errors import EngineError
from headstart.weights.greedy_head import greedy_tokens

__all__ = ["Choice", "StepResult", "choose_tokens", "engine_error"]

Choice = SampledToken | EngineError | None
"""The next token of a part, or its error; None for one that ends before its last token."""


class StepResult(NamedTuple):
    """A request that a step moved, and the error that ended it, if one did.

    Its `group.output()` is what it has so far; read it before the next step.
    """

    group: RequestGroup
    error: EngineError | None = None


def engine_error(what: str, cause: BaseException) -> EngineError:
    """Return the error of a request that ends because of `cause`."""
    error = EngineError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def choose_tokens(sampler: Sampler, batch: Batch, logits: StepLogits) -> list[Choice]:
    """The choice of each part. One with rows in the cache that are not finite has an error."""
    if logits.values is None:
        tokens = (
            logits.failed.get(row) or sampler.accept(token)
            for row, token in enumerate(logits.greedy)
        )
        chosen: list[Choice] = [next(tokens) if p.samples else None for p in batch.scheduled]
    else:
        chosen = _choose_from(logits.values, sampler, batch, logits.counts)
    for at in logits.nonfinite:
        chosen[at] = EngineError(
            "K or V of the request's tokens are not finite: the model's weights are damaged, or "
            "overflow in this dtype"
        )
    return chosen


def _choose_from(values: Tensor, sampler: Sampler, batch: Batch, counts: list[int]) -> list[Choice]:
    """From logits `[rows, vocab]`, of which each part has the next few."""
    at = 0
    rows: list[int] = []
    states: list[SamplingState] = []
    failed: dict[int, EngineError] = {}
    for place, (part, count) in enumerate(zip(batch.scheduled, counts, strict=True)):
        if part.request.needs_prompt_logits:
            told = map(sampler.accept, greedy_tokens(values[at : at + count]))
            error = next((one for one in told if isinstance(one, EngineError)), None)
            if error is None:
                _add_prompt_logprobs(part, values[at : at + count])
            else:
                failed[place] = error
        at += count
        if part.samples:
            rows.append(at - 1)
            states.append(part.request.sampling)
    tokens = iter(sampler.sample(values if len(rows) == len(values) else values[rows], states))
    chosen: list[Choice] = [next(tokens) if part.samples else None for part in batch.scheduled]
    for place, error in failed.items():
        chosen[place] = error
    return chosen


def _add_prompt_logprobs(part: ScheduledTokens, logits: Tensor) -> None:
    """Row i of the logits tells of the token after position start + i."""
    group = part.request.group
    following = group.prompt_token_ids[part.start + 1 : part.stop + 1]
    top = group.params.prompt_logprobs or 0
    entries = token_logprobs(logits[: len(following)], following, top)
    group.add_prompt_logprobs(part.start + 1, entries)
