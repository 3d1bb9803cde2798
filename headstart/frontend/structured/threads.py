"""Threads in which requests with forms are prepared.

Compiling a form may take long and cannot be stopped. So nothing waits for these threads: neither
`close` nor the end of the process, which joins the threads of `concurrent.futures`.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from headstart.engine.turns import Turns
from headstart.errors import EngineError

__all__ = ["FormThreads"]

Made = TypeVar("Made")


class FormThreads:
    """At most `count` threads, which start with what is asked of them; tenants have them in turns.

    One tenant has all of them but one at the most.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._turns: Turns[tuple[Future[Any], Callable[[], Any]]] = Turns(max(1, count - 1))
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # for a thread; False: to end
        self._threads: list[threading.Thread] = []
        self._asked: set[Future[Any]] = set()
        self._is_closed = False

    def submit(self, make: Callable[[], Made]) -> "Future[Made]":
        """What `make` returns in one of the threads. Raises EngineError when closed."""
        made: Future[Made] = Future()
        self._asked.add(made)
        made.add_done_callback(self._asked.discard)
        if len(self._threads) < self._count:
            name = f"headstart-forms_{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._turns.add((made, make), lambda: self._calls.put(True))
        if self._is_closed:
            self.close()
            raise EngineError("the engine is closed")
        return made

    def close(self) -> None:
        """Tell all who wait that the engine is closed; a thread ends when its form is done."""
        self._is_closed = True
        for made in list(self._asked):
            with suppress(InvalidStateError):  # it is done, or nobody waits for it
                made.set_exception(EngineError("the engine is closed"))
        for _ in self._threads:
            self._calls.put(False)

    def _run(self) -> None:
        while self._calls.get():
            while (found := self._turns.next()) is not None:
                tenant, job = found
                _do(*job)
                del job, found  # which hold the engine, and may be the last for long
                self._turns.ended(tenant)


def _do(made: "Future[Any]", make: Callable[[], Any]) -> None:
    try:
        if made.done() or not made.set_running_or_notify_cancel():
            return
    except InvalidStateError:  # closed at this moment
        return
    try:
        found = make()
    except BaseException as error:  # the caller's to handle
        with suppress(InvalidStateError):  # closed meanwhile
            made.set_exception(error)
    else:
        with suppress(InvalidStateError):
            made.set_result(found)
