"""The driver: the one thread that runs an engine's steps and passes each result to its request.

    any thread                        the engine's thread
    submit, cancel, call ──orders──▶  carry them out between two steps
                                      run a step
    Receiver             ◀──update──  pass each result to its request

Only the main thread receives signals, and it runs no step: Ctrl-C interrupts a caller that waits
for an answer, never a step.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from headstart.engine.outputs import RequestOutput
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError, HeadstartError, RequestError, engine_error
from headstart.validation import describe

Update = RequestOutput | BaseException
"""The output of a request so far, or the error that ended it."""

Receiver = Callable[[Any], object]
"""Receives the updates of a request in the engine's thread. If it raises, the request ends."""

_PATIENCE = 1.0  # seconds between two checks that the engine's thread is alive

Answer = TypeVar("Answer")


class AnyOutput(Protocol):
    """An output of a request, such as a `RequestOutput`."""

    request_id: str
    finished: bool


class AnyRequest(Protocol):
    """A prepared request, such as a `RequestGroup`."""

    @property
    def request_id(self) -> str: ...

    @property
    def finished(self) -> bool: ...

    def output(self) -> AnyOutput:
        """Return the output so far."""


class Core(Protocol):
    """An engine, or a pipeline of engines, whose steps a driver runs."""

    def submit(self, group: Any, /) -> None:
        """Queue a prepared request. Raises RequestError when its id is in use."""

    def step(self) -> Sequence[tuple[Any, BaseException | None]]:
        """Run one step; return the requests that got a token or ended, and their errors."""

    def abort(self, request_id: str) -> object:
        """Remove a request at any time between steps."""

    def reset(self, cause: BaseException) -> Sequence[tuple[Any, BaseException | None]]:
        """End all requests after an unexpected exception; return them with their errors."""

    def close(self, reason: str) -> None:
        """Release everything; later calls raise EngineError with this reason."""


class Driver(Protocol):
    """The connection of a frontend to its engine. Thread-safe.

    `LocalDriver` runs the engine's steps in a thread of this process. The `ReplicaDriver` of
    `headstart.cluster` sends requests to replicas.
    """

    def require_request(self, request: object) -> None:
        """Raise RequestError unless `request` is a prepared request."""

    def awaited(self) -> AbstractContextManager[None]:
        """Return a context in which the caller waits for an answer.

        The call, or entering the context, raises EngineError if the caller would wait forever. This
        is the case in the engine's own thread, and in a coroutine that the engine's current step or
        order started. It is also the case in a step or order of another engine that this engine
        waits for.
        """

    def submit(self, group: Any, receive: Receiver, *, every_step: bool = True) -> None:
        """Queue a prepared request. Its last update is a finished output or an error.

        Raises EngineError if the engine is closed, or if called in the engine's own thread.
        """

    def cancel(self, groups: Sequence[Any], *, wait: bool = True) -> None:
        """Remove the unfinished requests of `groups`.

        wait: return only after the current step, when their memory is released.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request; its last update has finish reason "abort". Returns at once.

        Raises EngineError when the engine is closed.
        """

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the engine's thread between two steps; return its result.

        An exception of `function` is raised in the caller. It does not reset the engine, so
        `function` must leave the engine in a valid state even when it raises, like the methods of
        `EngineCore`. Raises EngineError if the engine is closed or ends before the call, or if
        called in the engine's own thread.
        """

    async def call_async(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` like `call`, without blocking the event loop."""

    def close(self) -> None:
        """End every request with an EngineError and release everything. Idempotent."""


class _Order(NamedTuple):
    """Work for the engine's thread between two steps; `refuse` is called if it cannot be done."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], object]


@dataclass(eq=False, slots=True)
class _InflightRequest:
    """A request in progress, and its receiver.

    every_step: the receiver gets the output of each step, not only the last update.
    """

    group: AnyRequest
    receive: Receiver
    every_step: bool


@dataclass(eq=False, slots=True)
class _Work:
    """A step or an order, and the engines that it currently waits for."""

    awaited: "list[_WaitNode]" = field(default_factory=list)


_current: ContextVar[_Work | None] = ContextVar("_current", default=None)


class _WaitNode:
    """One engine in the graph of engines that wait for each other, to detect deadlocks.

    current: the engine's current work. The edges lead to the engines in `current.awaited`. A
    coroutine inherits the context of the work that creates it, so its waits count as waits of this
    work. A thread inherits no context, so waits in threads that the work starts do not count.
    """

    def __init__(self) -> None:
        self.current: _Work | None = None

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Call `work` as the current work of this engine."""
        self.current = _Work()
        _current.set(self.current)
        try:
            return work()
        finally:
            self.current = None

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Mark that the caller waits for this engine.

        Raises EngineError if the wait would never end. The caller then belongs to this engine's
        current work, or to the work of an engine that this engine waits for. For example, the
        logits processors of two engines may each call the other engine.
        """
        if (caller := _current.get()) is None:
            yield
            return
        # Append before the search. Then, if two waits begin at once, at least one finds the other.
        caller.awaited.append(self)
        try:
            visited: set[_Work | None] = {None}
            pending = [self]
            while pending:
                work = pending.pop().current
                if work is caller:
                    raise _would_deadlock()
                if work not in visited:
                    visited.add(work)
                    pending += work.awaited if work is not None else ()
            yield
        finally:
            caller.awaited.remove(self)


def _would_deadlock() -> EngineError:
    return EngineError(
        "the engine was called during its own step, for example by a logits processor, and would "
        "wait for this step forever; call it after the step"
    )


class LocalDriver:
    """The `Driver` of a core in this process, whose steps run in a separate thread.

    The first order starts the thread. An engine whose methods are called directly has no thread.
    """

    def __init__(self, engine: Core) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._inflight: dict[str, _InflightRequest] = {}
        # The engine's thread never takes this lock, so no caller can delay a step. The lock is
        # reentrant: the garbage collector may close a stream in a thread that holds the lock.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._process = 0  # the process that started the thread
        # Not `Thread.is_alive`: in Python 3.11, Ctrl-C in that method marks a running thread as
        # ended.
        self._has_exited = False
        # Gets an item when the thread exits.
        self._exited: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waits = _WaitNode()
        self._ended: EngineError | None = None  # set when no more orders are accepted

    @staticmethod
    def require_request(request: object) -> None:
        if not isinstance(request, RequestGroup):
            raise RequestError(
                f"request is {describe(request)}; allowed: a result of `prepare` or `prepare_chat`"
            )

    def submit(self, group: AnyRequest, receive: Receiver, *, every_step: bool = True) -> None:
        with self.awaited():
            inflight = _InflightRequest(group, receive, every_step)
            self._post(_Order(lambda: self._submit(inflight), receive))

    def cancel(self, groups: Sequence[AnyRequest], *, wait: bool = True) -> None:
        with suppress(EngineError):  # the engine was closed, which removes all requests
            if wait:
                with suppress(EngineError):  # waiting would deadlock
                    return self.call(lambda: self._forget(groups))
            self._post(_Order(lambda: self._forget(groups), lambda error: None))

    def abort(self, request_id: str) -> None:
        self._post(_Order(lambda: self._abort(request_id), lambda error: None))

    def call(self, function: Callable[[], Answer]) -> Answer:
        answers: queue.SimpleQueue[tuple[Answer] | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(),))
            except BaseException as error:
                answers.put(error)

        with self.awaited():
            self._post(_Order(run, answers.put))
            answer = self.wait(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer[0]

    async def call_async(self, function: Callable[[], Answer]) -> Answer:
        answer: Future[Answer] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except BaseException as error:
                    answer.set_exception(error)

        with self.awaited():
            self._post(_Order(run, answer.set_exception))
            result, has_exited = asyncio.wrap_future(answer), False
            try:
                while not (await asyncio.wait([result], timeout=_PATIENCE))[0]:
                    if has_exited:  # the thread exited before the last wait: no answer comes
                        raise self.ended()
                    has_exited = not self.is_alive
                return result.result()
            finally:
                result.cancel()  # if the caller stops waiting, the order is not carried out

    def wait(
        self, items: "queue.SimpleQueue[Answer]", groups: Sequence[AnyRequest] | None = None
    ) -> Answer:
        """Return the next item from the engine's thread.

        Raises EngineError if no item will come: the thread has ended, or all of `groups` have.

        `items` must be a `SimpleQueue`. The garbage collector may run within a method of `items`
        and close a stream, which calls `wait` again. In a `queue.Queue`, this call would wait for a
        lock that its own thread holds.
        """
        with self.awaited():
            while True:
                try:
                    return items.get(timeout=_PATIENCE)
                except queue.Empty:
                    reason = None if self.is_alive else self.ended()
                    if groups is not None and all(
                        g.finished and not self._is_inflight(g) for g in groups
                    ):
                        reason = reason or EngineError(
                            "the request has ended, and its last update could not be delivered"
                        )
                    if reason is not None and items.empty():  # no item came since the timeout
                        raise reason from None

    @property
    def is_alive(self) -> bool:
        """True while the engine's thread runs; False in a process that was forked."""
        is_started = self._thread is not None and self._thread.ident is not None
        return is_started and not self._has_exited and self._process == os.getpid()

    def ended(self) -> EngineError:
        """Return the error for orders after the engine has ended."""
        if self._ended is None:
            return EngineError(
                "the engine's thread does not run: it failed, or this process was forked after the "
                "engine's first request; load the model again"
            )
        error = EngineError(str(self._ended))
        error.__cause__ = self._ended.__cause__
        return error

    def close(self) -> None:
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        self._orders.put(None)
        try:
            with self.awaited():
                while self.is_alive:
                    with suppress(queue.Empty):  # a timeout, or another caller took the item
                        self._exited.get(timeout=_PATIENCE)
        except EngineError:
            return  # the thread closes the engine after its current work
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()
        with self._starting:
            self._engine.close(str(self._ended))  # no effect if the thread closed it

    def _is_inflight(self, group: AnyRequest) -> bool:
        """Return True if this request is in progress, not another request with its id."""
        inflight = self._inflight.get(group.request_id)
        return inflight is not None and inflight.group is group

    def awaited(self) -> AbstractContextManager[None]:
        if threading.current_thread() is self._thread:
            raise _would_deadlock()
        return self._waits.awaited()

    def _post(self, order: _Order) -> None:
        if self._ended is not None:
            raise self.ended()
        self._require_thread()
        self._orders.put(order)
        if self._ended is not None:  # the thread may have ended before it took the order
            self._refuse_orders()
            self._orders.put(None)  # wakes the thread if it still waits

    def _require_thread(self) -> None:
        """Start the thread if necessary. Raises EngineError if it has ended."""
        if self.is_alive:
            return
        with self._starting:
            if self._thread is None or self._thread.ident is None:  # not started, or interrupted
                self._thread = threading.Thread(
                    target=self._run, name="headstart-engine", daemon=True
                )
                self._process = os.getpid()
                self._thread.start()
            elif not self.is_alive:
                raise self.ended()

    # In the engine's thread

    def _run(self) -> None:
        """Carry out orders and run steps until closed, or until the engine cannot be reset."""
        if self._thread is not threading.current_thread():
            return  # `start` was interrupted, and another thread was started instead
        reason: BaseException = EngineError("the engine was closed")
        try:
            while self._take_orders():
                if self._inflight:
                    self._do(self._step)
        except BaseException as error:
            reason = error
        finally:
            try:
                self._end(reason)
            finally:
                self._has_exited = True
                self._exited.put(None)

    def _take_orders(self) -> bool:
        """Carry out all queued orders; wait for an order if no request is in progress."""
        while self._ended is None:
            try:
                order = self._orders.get(block=not self._inflight)
            except queue.Empty:
                return True
            if order is not None:
                self._do(partial(self._waits.run, order.run))
            del order  # so that its arguments are freed before the next order
        return False

    def _do(self, work: Callable[[], None]) -> None:
        """Call `work`; after an exception reset the engine and end every request."""
        try:
            work()
        except BaseException as error:
            for group, failure in self._engine.reset(error):
                self._deliver(group, failure)
            for inflight in list(self._inflight.values()):
                self._end_request(inflight, engine_error("the engine broke", error))

    def _step(self) -> None:
        # Receivers are called after `run` has returned, so they are not part of the engine's work.
        for group, error in self._waits.run(self._engine.step):
            self._deliver(group, error)

    def _deliver(self, group: AnyRequest, error: BaseException | None) -> None:
        inflight = self._inflight.get(group.request_id)
        if inflight is None or inflight.group is not group:
            return
        if error is not None:
            self._end_request(inflight, error)
        elif group.finished or inflight.every_step:
            self._send(inflight)

    def _send(self, inflight: _InflightRequest) -> None:
        """Send the request's output so far; a receiver that raises ends the request."""
        try:
            output = inflight.group.output()
            inflight.receive(output)
        except Exception as error:  # such as an event loop that was closed
            self._engine.abort(inflight.group.request_id)
            self._end_request(inflight, engine_error("the answer cannot be delivered", error))
        else:
            if output.finished:
                self._inflight.pop(output.request_id, None)

    def _submit(self, inflight: _InflightRequest) -> None:
        request_id = inflight.group.request_id
        if request_id in self._inflight:
            with suppress(Exception):  # the receiver is closed
                inflight.receive(RequestError(f"request id {request_id!r} is in use"))
            return
        self._inflight[request_id] = inflight  # first, so that `_do` ends it if `submit` fails
        try:
            self._engine.submit(inflight.group)
        except HeadstartError as error:
            self._end_request(inflight, error)

    def _forget(self, groups: Sequence[AnyRequest]) -> None:
        for group in filter(self._is_inflight, groups):
            self._engine.abort(group.request_id)
            self._inflight.pop(group.request_id, None)

    def _abort(self, request_id: str) -> None:
        inflight = self._inflight.get(request_id)
        if inflight is not None:
            self._engine.abort(request_id)
            self._send(inflight)

    def _end_request(self, inflight: _InflightRequest, error: BaseException) -> None:
        self._inflight.pop(inflight.group.request_id, None)
        with suppress(Exception):  # the receiver is closed
            inflight.receive(error)

    def _end(self, reason: BaseException) -> None:
        """End every request and refuse all orders, at the end of the thread."""
        if self._ended is None:
            self._ended = engine_error("the engine ended", reason)
        for inflight in list(self._inflight.values()):
            self._end_request(inflight, self.ended())
        self._refuse_orders()
        self._engine.close(str(self._ended))

    def _refuse_orders(self) -> None:
        with suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None:
                    with suppress(Exception):
                        order.refuse(self.ended())
