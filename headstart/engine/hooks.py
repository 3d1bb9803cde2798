"""Hooks by which a pipeline of models takes part in an engine's steps. An engine alone has none.

In a pipeline an engine's requests may have to wait for what another stage is still making, may
use a cached prefix only as far as its outputs are known, and hand on more than tokens.
"""

from typing import Protocol

from headstart.cache import ComputedBlocks
from headstart.engine.batch import Batch
from headstart.engine.limits import Limit
from headstart.engine.request import Request
from headstart.engine.tiering.payload import BlockRows


class EngineHooks(Limit, Protocol):
    """Callbacks; the engine calls them in each step.

    As a limit, they have a request wait until the inputs of all tokens that it knows are there.
    kept_rows: what outlives the process beside K/V, where these do; asked before the first step.
    """

    @property
    def kept_rows(self) -> BlockRows | None: ...

    def usable_blocks(self, request: Request, found: ComputedBlocks) -> int:
        """How many of the cached blocks the request may skip. Changes nothing."""
        ...

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """The request runs from this token on, for the first time or again."""
        ...

    def computed(self, batch: Batch) -> None:
        """The model is through with a step; what is raised here fails it."""
        ...
