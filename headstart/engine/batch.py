"""One step's work: the one object that the scheduler hands the runner, built whole."""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.cache import RowCopy
from headstart.engine.request import Request


class ScheduledTokens(NamedTuple):
    """Tokens `start` to `stop - 1` of a request are computed in this step.

    `samples`: the last of them is the last token known, so its logits give the next one.
    """

    request: Request
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The step: rows to copy first, then who computes what, in order."""

    scheduled: tuple[ScheduledTokens, ...]
    copies: tuple[RowCopy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(part.stop - part.start for part in self.scheduled)
