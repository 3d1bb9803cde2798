"""One step: its batch, its results, and the protocols of its limits and hooks.

A limit may reduce the number of tokens that a step computes for a request. There are limits for
adapters (`adapter_store.py`), image embeddings (`image_cache.py`), fair shares (`fair_share.py`),
prefixes that are being loaded (`tiering/loads.py`), and, in a pipeline, inputs from another stage.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headstart.cache import ComputedBlocks, RowCopy
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tiering.loads import BlockRows
from headstart.errors import EngineError


class ScheduledTokens(NamedTuple):
    """A part of a batch: tokens `start` to `stop - 1` of a request, computed in this step.

    samples: True if these tokens include the request's last token; its logits give the next token.
    draft: drafted tokens after `stop`, computed in the same step.
    """

    request: Request
    start: int
    stop: int
    samples: bool
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's work: rows to copy first, then the tokens to compute, request by request."""

    scheduled: tuple[ScheduledTokens, ...]
    copies: tuple[RowCopy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(part.stop - part.start + len(part.draft) for part in self.scheduled)


class StepResult(NamedTuple):
    """A request that got a token or ended in a step, and the error that ended it, if any.

    `group.output()` returns its answers so far; call it before the next step.
    """

    group: RequestGroup
    error: EngineError | None = None


class Limit(Protocol):
    """A limit on the number of tokens that a step computes for a request. No method blocks."""

    def applies(self, request: Request) -> bool:
        """Return True if the limit may affect the request.

        Called when the request is queued or preempted. If False, the other methods are not called
        for this request.
        """

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return the position up to which the request can be computed; called before each step.

            start   no tokens: the request waits for resources that other requests hold, and they
                    may bypass it a limited number of times
            > start up to this position, at most `stop`
            None    no tokens: the request waits for its own inputs, and any number of other
                    requests may bypass it

        The limit may begin to fetch resources for the request, but reserves nothing yet.
        """

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Note that tokens `start` to `stop - 1` are in the step, as `reach` allowed."""

    def leave(self, request: Request) -> None:
        """Release what the limit holds for the request. Idempotent.

        Called when the request ends or is preempted. A preempted request waits again.
        """


class EngineHooks(Limit, Protocol):
    """Callbacks of a pipeline, called in each step. An engine outside a pipeline has none.

    They are also a limit: a request waits until the inputs of all its tokens have arrived.
    stored_rows: the stage's outputs that tiers store with K/V; read before the first step.
    """

    @property
    def stored_rows(self) -> BlockRows | None: ...

    def usable_blocks(self, request: Request, computed: ComputedBlocks) -> int:
        """Return the number of leading cached blocks that the request may hit. Changes nothing."""

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Note that the request was admitted, perhaps again, with this many cached tokens."""

    def computed(self, batch: Batch) -> None:
        """Note that the model has computed a step. An exception fails the step."""
