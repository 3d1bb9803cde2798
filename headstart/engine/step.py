"""The parts of an engine step: its phase, its results, and the choice of tokens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from torch import Tensor

from headstart.engine.batch import Batch, ScheduledTokens
from headstart.engine.request import RequestGroup
from headstart.engine.runner import StepLogits
from headstart.engine.sampling.logprobs import token_logprobs
from headstart.engine.sampling.sampler import SampledToken, Sampler, SamplingState
from headstart.errors import EngineError, HeadstartError
from headstart.weights.greedy_head import greedy_tokens

__all__ = [
    "Choice",
    "OpenStep",
    "Phase",
    "StepResult",
    "Turns",
    "choose_tokens",
    "engine_error",
    "explain",
    "would_wait",
]

Answer = TypeVar("Answer")

Choice = SampledToken | EngineError | None
"""The next token of a part, or its error; None for one that ends before its last token."""


class StepResult(NamedTuple):
    """A request that a step moved, and the error that ended it, if one did.

    Its `group.output()` is what it has so far; read it before the next step.
    """

    group: RequestGroup
    error: EngineError | None = None


class Phase(Enum):
    """How far a step has come, and so what happens to its requests if it is rolled back.

    SCHEDULING   they wait again
    COMPUTING    they wait again, or end with the model's error
    CHANGING     some have their next token and some have not: they end with an error
    DELIVERED    each has its token or its end
    """

    SCHEDULING = auto()
    COMPUTING = auto()
    CHANGING = auto()
    DELIVERED = auto()


@dataclass(slots=True, eq=False)
class OpenStep:
    """The state that a rollback of a step needs.

    `results` are those that nobody has been given yet, `failed` the requests of the batch that end
    with an error.
    """

    results: list[StepResult] = field(default_factory=list)
    begun: bool = False
    phase: Phase = Phase.SCHEDULING
    batch: Batch | None = None
    failed: Mapping[object, EngineError] = field(default_factory=dict)

    def note_failure(self, error: BaseException) -> None:
        """Choose the requests that end with the error: those of the step, if the fault is there.

        An interruption is no fault; but of a request that was changing nobody knows how far.
        """
        changing = self.phase is Phase.CHANGING
        computing = self.phase is Phase.COMPUTING and isinstance(error, Exception)
        if self.batch is not None and (changing or computing):
            reason = engine_error("the step failed", error)
            self.failed = {part.request: reason for part in self.batch.scheduled}


_turn: ContextVar["_Turn | None"] = ContextVar("_turn", default=None)


class _Turn:
    """A piece of work, and what those that it called wait for now."""

    def __init__(self) -> None:
        self._awaited: list[Turns] = []

    @contextmanager
    def awaiting(self, turns: "Turns") -> Iterator[None]:
        self._awaited.append(turns)  # first: of two that begin to wait at once, one sees the other
        try:
            if self._is_awaited_by(turns):
                raise would_wait()
            yield
        finally:
            self._awaited.remove(turns)

    def _is_awaited_by(self, turns: "Turns") -> bool:
        """Whether the work under way there is this, or waits for it, be it through others."""
        seen: set[_Turn] = set()
        pending = [turns]
        while pending:
            turn = pending.pop().current
            if turn is self:
                return True
            if turn is not None and turn not in seen:
                seen.add(turn)
                pending += turn._awaited
        return False


class Turns:
    """Work that is done one after the other, and who is called from within it.

    A coroutine has the context of who starts it, in whatever thread it runs, and counts as waited
    for by the work even if it is not. A thread has no context: what it does is not known here.
    """

    def __init__(self) -> None:
        self.current: _Turn | None = None

    def take(self, work: Callable[[], Answer]) -> Answer:
        """Do the work; all that it calls is within until it is over."""
        self.current = turn = _Turn()
        _turn.set(turn)
        try:
            return work()
        finally:
            self.current = None

    def awaited(self) -> AbstractContextManager[None]:
        """Whoever enters this waits for the work in it.

        Raises EngineError on entering where neither would ever end: within the work, or within
        other work that this waits for, as where two engines' logits processors ask one another.
        """
        turn = _turn.get()
        return _NOBODY if turn is None else turn.awaiting(self)


_NOBODY = nullcontext()


def would_wait() -> EngineError:
    """The error of who waits for an engine that waits for it."""
    return EngineError(
        "the engine cannot be asked from within a step, such as by a logits processor or by what "
        "one began, that it waits for itself, be it by way of other engines: ask when the step is "
        "over"
    )


def engine_error(what: str, cause: BaseException) -> EngineError:
    """The error that a request ends with, and what caused it."""
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


def explain(error: BaseException) -> BaseException:
    """The error that callers get for one that left a step: Ctrl-C and its like as they are."""
    if not isinstance(error, Exception) or isinstance(error, HeadstartError):
        return error
    return engine_error("the engine broke", error)
