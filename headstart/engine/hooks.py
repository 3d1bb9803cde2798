"""What a pipeline of models adds to the steps of one of its engines. An engine alone has none.

In a pipeline an engine's requests may have to wait for what another stage is still making, may
use a cached prefix only as far as its outputs are known, and hand on more than tokens.
"""

from typing import Protocol

from headstart.cache import ComputedBlocks
from headstart.engine.batch import Batch
from headstart.engine.request import Request


class EngineHooks(Protocol):
    """Asked and told in each step, in the order of its methods."""

    def is_ready(self, request: Request) -> bool:
        """Whether the inputs of all tokens the request knows are there.

        Until then it is left as it is, with the blocks it holds.
        """
        ...

    def usable_blocks(self, request: Request, found: ComputedBlocks) -> int:
        """How many of the cached blocks the request may skip. Changes nothing."""
        ...

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """The request runs from this token on, for the first time or again."""
        ...

    def computed(self, batch: Batch) -> None:
        """The model is through with a step; what is raised here fails it."""
        ...
