"""A request under way, its attempts at replicas, and whom its outputs are told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headstart.cluster.serving.received import take_part
from headstart.errors import EngineError, HeadstartError

if TYPE_CHECKING:
    from headstart.cluster.serving.messages import Part
    from headstart.engine.driver import Receiver, Update
    from headstart.engine.request import RequestGroup

__all__ = ["Attempt", "Running"]

_ABORT = "abort"


@dataclass(eq=False, slots=True)
class Running:
    """A request under way and who wants its updates: after every step, or only the last.

    The result of `task` is the last update, which nobody was told. is_aborted, error: how the
    request ends if its task is cancelled. name: what it goes by here and in replicas: its id, or
    another while an earlier request of that id, which was forgotten, has not ended everywhere.
    """

    group: RequestGroup
    receive: Receiver
    every_step: bool
    name: str = ""
    task: asyncio.Task[Update] | None = None
    is_aborted: bool = False
    error: HeadstartError | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a client may have been told tokens of it."""
        return any(one.last_token_time is not None for one in self.group.requests)

    def abort(self) -> None:
        """Have it end with what it has."""
        self.is_aborted = True
        self.cancel()

    def fail(self, error: HeadstartError) -> None:
        """Have it end with this error."""
        self.error = error
        self.cancel()

    def forget(self) -> None:
        """Have it end; nobody is told."""
        self.receive = lambda update: None
        self.cancel()

    def cancel(self) -> None:
        """Cancel its task, whatever for."""
        assert self.task is not None
        self.task.cancel()

    def tell(self, update: Update) -> None:
        """Tell the last update."""
        with suppress(Exception):  # nobody is there to be told
            self.receive(update)

    def last_update(self) -> Update:
        """What its receiver is to be told when its task has ended, however it did."""
        assert self.task is not None
        if not self.task.cancelled():
            return self.task.result()
        if self.error is not None:
            return self.error
        if not self.is_aborted:
            return EngineError("the request was cancelled")
        try:
            for one in self.group.requests:
                one.finish_reason = one.finish_reason or _ABORT
            return self.group.output()
        except Exception as error:
            return _explain(error)


@dataclass(eq=False, slots=True)
class Attempt:
    """A request that was sent to a replica.

    parts: those that came and are not taken in yet. is_lost: its replica does not answer.
    """

    running: Running
    sent: float
    is_begun: bool = False
    parts: list[Part] = field(default_factory=list)
    is_lost: bool = False

    def give_up(self) -> None:
        """End the attempt: its replica does not answer."""
        self.is_lost = True
        self.running.cancel()

    def was_given_up(self) -> bool:
        """Return True if the request's task, which was cancelled, is to go on; called in it."""
        task = self.running.task
        return self.is_lost and task is not None and task.uncancel() == 0

    def take(self, *, tell: bool) -> None:
        """Take the parts in, and tell whoever asked for the request.

        Raises EngineError if an output cannot be made or told.
        """
        try:
            for part in self.parts:
                take_part(self.running.group, part, self.sent)
            self.parts.clear()
            if tell:
                self.running.receive(self.running.group.output())
        except Exception as error:  # such as an event loop that was closed without a word
            raise _explain(error) from error


def _explain(error: Exception) -> EngineError:
    return EngineError(f"the answer cannot be told: {type(error).__name__}: {error}")
