"""One step: the batch that the scheduler passes to the runner, and the results."""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.cache import RowCopy
from headstart.engine.request import Request, RequestGroup
from headstart.errors import EngineError


class ScheduledTokens(NamedTuple):
    """Tokens `start` to `stop - 1` of a request, computed in this step.

    samples: the last of them is the request's last token, so its logits give the next one.
    """

    request: Request
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's work: rows to copy first, then the tokens of each request, in order."""

    scheduled: tuple[ScheduledTokens, ...]
    copies: tuple[RowCopy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(part.stop - part.start for part in self.scheduled)


class StepResult(NamedTuple):
    """A request that a step moved, and the error that ended it, if any.

    Its `group.output()` has everything so far; read it before the next step.
    """

    group: RequestGroup
    error: EngineError | None = None


def engine_error(what: str, cause: BaseException) -> EngineError:
    """Return the error of a request that ends because of `cause`."""
    error = EngineError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
