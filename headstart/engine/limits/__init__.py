"""Limits of a step beside tokens, requests and blocks: the protocol that the scheduler asks.

    applies   asked when a request is queued, and again when it was preempted
    reach     asked before each step that the request could be in
    enter     told of each step that it is in
    leave     told when it runs no longer, or waits no longer

Limits there are: the places for adapters (`adapters/store.py`), the encoder budget of images
(`images/budget.py`), the turns of owners (`fair_share.py`), and in a pipeline the inputs that
another stage is still making (`hooks.py`).
"""

from typing import Protocol

from headstart.engine.request import Request


class Limit(Protocol):
    """Decides how far a request may be computed in a step. None of its methods waits."""

    def applies(self, request: Request) -> bool:
        """True if the request can be limited. The limit is not called for other requests."""
        ...

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """How far the request's tokens can be computed now.

            start    not now: it waits for what others hold, and may be bypassed a few times
            between  up to there, at most to `stop`
            None     it waits for inputs of its own, and no other request waits for it

        The limit may fetch what the request will need, but holds nothing for it yet.
        """
        ...

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Tokens `start` to `stop - 1` are in the step; `reach` has allowed them."""
        ...

    def leave(self, request: Request) -> None:
        """The request runs no longer, or is gone. Again, or of one that never ran, is no error."""
        ...
