"""One step: its batch, its results, and the protocols of what takes part in it.

A limit may reduce the tokens of a request that a step computes: adapters (`adapter_store.py`), the
encoder budget of images (`image_cache.py`), the turns of owners (`fair_share.py`), prefixes that
are being loaded (`tiering/loads.py`), and in a pipeline the inputs from another stage.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headstart.cache import ComputedBlocks, RowCopy
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tiering.loads import BlockRows
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


class Limit(Protocol):
    """A decision how far a request may be computed in a step. No method waits."""

    def applies(self, request: Request) -> bool:
        """Return True if the request can be limited; called when it is queued or preempted.

        The other methods are not called for other requests.
        """
        ...

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return how far the request's tokens can be computed now; called before each step.

            start    not now: it waits for something that others hold, and may be bypassed
            between  up to there, at most to `stop`
            None     it waits for its own inputs, and no other request waits for it

        The limit may fetch what the request will need, but holds nothing for it yet.
        """
        ...

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Note that tokens `start` to `stop - 1` are in the step, as `reach` allowed."""
        ...

    def leave(self, request: Request) -> None:
        """Note that the request no longer runs or waits. Idempotent."""
        ...


class EngineHooks(Limit, Protocol):
    """Callbacks of a pipeline, called in each step. An engine alone has none.

    As a limit, they make a request wait until the inputs of all its tokens are there. kept_rows:
    the rows that tiers store with K/V; read before the first step.
    """

    @property
    def kept_rows(self) -> BlockRows | None: ...

    def usable_blocks(self, request: Request, found: ComputedBlocks) -> int:
        """Return how many of the cached blocks the request may skip. Changes nothing."""
        ...

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Note that the request runs from this token on, for the first time or again."""
        ...

    def computed(self, batch: Batch) -> None:
        """Note that the model has computed a step; an exception fails the step."""
        ...
