"""Has requests answered by replicas; in place of an engine's driver.

    submitted ──▶ routed ──▶ sent ──first tokens──▶ answered here, token by token ──▶ finished
                    ▲          │                        │
                    └──────────┘ the replica is lost    │ the replica is lost: an error, as a client
                      another computes it from anew     ▼ may have been told what it has so far

A replica is lost when it died, or when it missed two heartbeats (`feeds.py`).

A request that wants all of its tokens at the end told nobody anything before that, so it is always
computed anew. `MAX_LOST` replicas that die under one request are not by chance: it then ends.

Everything is done by one thread with an event loop of its own; Ray Serve's calls are made there. A
request's last update is told when its task ends, however it ends: a task that is cancelled before
it begins runs no line of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

from headstart.cluster.router import RouteRequest
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.feeds import Feeds, cancel
from headstart.cluster.serving.front import CLOSED
from headstart.cluster.serving.messages import AnswerRequest, Part, RequestKey
from headstart.cluster.serving.ray_errors import has_died, read_error
from headstart.cluster.serving.running import Attempt, Running
from headstart.cluster.serving.signs import sign_life
from headstart.engine.driver import LocalDriver, Receiver, Update
from headstart.errors import EngineError, ReplicaLostError, RequestError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from headstart.cluster.serving.front import ReplicaFrontend
    from headstart.engine.image_cache import SentImages
    from headstart.engine.request import RequestGroup

__all__ = ["MAX_LOST", "ReplicaDriver"]

MAX_LOST = 3
_LOST = "the replica that computed this answer died or stopped answering"
_PATIENCE = 1.0  # seconds between two looks at whether the thread is alive
_LOG = logging.getLogger("headstart.server")

Answer = TypeVar("Answer")


class ReplicaDriver:
    """The driver of `AsyncLLM`. Every method may be called from any thread."""

    def __init__(
        self,
        handle: DeploymentHandle,
        front: ReplicaFrontend,
        dispatcher: Dispatcher,
        put: Callable[[SentImages], Awaitable[SentImages]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`put` lays images where replicas find them by what it returns: `ray.put`.

        clock: returns seconds, by which replicas are found silent.
        """
        self._replicas = handle.options(stream=True)
        self._handle = handle
        self._front = front
        self._put = put
        self._dispatcher = dispatcher
        self._name = uuid.uuid4().hex  # of this server, to the replicas that it follows
        self._orders: deque[Callable[[], None]] = deque()  # in the order they were given
        self._running: dict[str, Running] = {}  # by request id
        self._started: dict[str, Running] = {}  # by name: those that are forgotten and end, too
        self._attempts: dict[RequestKey, Attempt] = {}
        self._feeds = Feeds(
            self._replicas, dispatcher, self._name, self._take_progress, self._lose, clock
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headstart-replicas")
        self._thread.daemon = True
        self._thread.start()
        dispatcher.call_on_change(lambda: self._soon(self._feeds.match))
        dispatcher.call_on_route(lambda: self._soon(dispatcher.catch_up))
        self._soon(self._feeds.match)
        for task in (sign_life(handle, self._name, front.silence), self._feeds.watch()):
            asyncio.run_coroutine_threadsafe(task, self._loop)

    # As of a driver

    awaited = staticmethod(nullcontext)  # no step runs in this process
    require_request = staticmethod(LocalDriver.require_request)

    def submit(self, group: RequestGroup, receive: Receiver, *, every_step: bool = True) -> None:
        """Have a prepared request answered. Its last update is a finished output or an error.

        Raises EngineError when this is closed.
        """
        self._front.require_open()
        running = Running(group, receive, every_step)
        self._order(lambda: self._start(running))
        if self._front.is_closed:  # meanwhile, and the thread may be gone
            self._take_orders()

    def cancel(self, groups: Sequence[RequestGroup], *, wait: bool = True) -> None:
        """Forget those of these requests that are unfinished; returns at once.

        Their ids are free for what is submitted next.
        """
        self._order(lambda: self._forget(groups))

    def abort(self, request_id: str) -> None:
        """Stop a request; its last update has finish reason "abort". Returns at once."""
        self._order(lambda: self._abort(request_id))

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function`; an engine would between two steps."""
        self._front.require_open()
        return function()

    async def call_async(self, function: Callable[[], Answer]) -> Answer:
        """As `call`."""
        return self.call(function)

    def break_off(self, why: str) -> None:
        """The replicas are lost: end every request with an EngineError, and take no more."""
        self._front.close(why)
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)

    def close(self) -> None:
        """End every request with an EngineError, and follow no replica any more. Idempotent."""
        self._front.close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._take_orders()  # which refuses requests now
            self._loop.close()

    def ask_all(self, method: str, *given: Any) -> list[Any]:
        """Call a method of every replica; those that die meanwhile are left out.

        Raises what the first that fails raises.
        """

        async def ask() -> list[Any]:
            try:
                call = self._handle.broadcast(method, *given)
                told = await call.results_async(return_exceptions=True)
            except Exception as error:
                raise read_error(error) from error
            for one in told:
                if isinstance(one, Exception) and not has_died(one):
                    raise read_error(one) from one
            return [one for one in told if not isinstance(one, Exception)]

        self._front.require_open()
        asking = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        while True:
            try:
                return asking.result(_PATIENCE)
            except TimeoutError:
                if self._thread.is_alive():
                    continue
            except CancelledError:  # by `close`
                pass
            raise self._closed()

    def _closed(self) -> EngineError:
        return EngineError(self._front.why_closed or CLOSED)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._soon(self._take_orders)

    def _soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing is under way there
            self._loop.call_soon_threadsafe(function)

    # In the thread

    def _take_orders(self) -> None:
        """Carry out what was asked; in any thread, refuse requests, once this is closed."""
        while self._orders:
            try:
                order = self._orders.popleft()
            except IndexError:  # another thread took it
                return
            order()

    def _start(self, running: Running) -> None:
        asked = running.group.request_id
        if self._front.is_closed:
            running.tell(self._closed())
        elif asked in self._running:
            running.tell(RequestError(f"request id {asked!r} is in use"))
        else:
            running.name = next(
                name
                for name in chain([asked], (f"{asked}+{again}" for again in count(1)))
                if name not in self._started
            )
            self._running[asked] = self._started[running.name] = running
            running.task = self._loop.create_task(self._answer(running))
            running.task.add_done_callback(lambda task: self._end(running))

    def _end(self, running: Running) -> None:
        """Its task has ended: keep nothing of it, and tell whoever asked."""
        try:
            del self._started[running.name]
            self._release(running)  # first: who is told may ask again under this id
            self._dispatcher.finish(running.name)
        finally:  # whatever is wrong with the books, nobody waits for ever
            update = running.last_update()
            # A task that was cancelled has the frames where it was, which know `running`: the
            # images there would lie in Ray's store until the garbage collector comes by.
            running.task = None
            running.tell(update)

    def _release(self, running: Running) -> None:
        """Its id may be another's."""
        if self._running.get(running.group.request_id) is running:
            del self._running[running.group.request_id]

    def _forget(self, groups: Sequence[RequestGroup]) -> None:
        for group in groups:
            running = self._running.get(group.request_id)
            if running is not None and running.group is group:  # and not another of its id
                running.forget()
                self._release(running)

    def _abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.abort()

    async def _answer(self, running: Running) -> Update:
        """Have it answered, by one replica after another while they die under it.

        Returns its last update, which nobody was told.
        """
        name = running.name
        try:
            asked = await self._describe(running)
            self._dispatcher.expect(self._route(running))
            for attempt in range(MAX_LOST):
                try:
                    await self._stream(running, replace(asked, attempt=attempt))
                    return running.group.output()
                except Exception as error:
                    found = read_error(error)
                if not isinstance(found, ReplicaLostError):
                    return found
                _LOG.warning("a replica was lost under %s: %s", name, found)
                if running.is_begun:
                    return ReplicaLostError(f"{_LOST}; ask again")
            return ReplicaLostError(f"{MAX_LOST} replicas died under this request")
        except Exception as error:
            return read_error(error)

    async def _stream(self, running: Running, asked: AnswerRequest) -> None:
        """One attempt: the first tokens and the last come here, those between with the reports.

        Raises what Ray and the replica raise.
        """
        attempt = Attempt(running, time.perf_counter())
        self._attempts[asked.key] = attempt
        stream = None
        try:
            stream = self._replicas.answer.remote(asked)
            async for part in stream:
                if not attempt.is_begun:
                    self._dispatcher.first_token(running.name)
                    self._front.note_encoded(running.group)
                # A report may overtake the first tokens.
                attempt.parts.insert(len(attempt.parts) if attempt.is_begun else 0, part)
                attempt.is_begun = True
                if part.finished:
                    attempt.take(tell=False)
                    stream = None  # there is nothing to cancel
                    return
                if running.every_step:
                    attempt.take(tell=True)
        except asyncio.CancelledError:
            if attempt.was_given_up():
                raise ReplicaLostError("it stopped answering") from None
            raise
        finally:
            del self._attempts[asked.key]
            if stream is not None:
                cancel(stream)
        raise EngineError("this server was silent for too long: a replica took it for dead")

    def _lose(self, replica: str) -> None:
        """Have other replicas answer the requests that a silent one has not begun to answer."""
        names = self._dispatcher.note_silent(replica)
        for attempt in self._attempts.values():
            if attempt.running.name in names:
                attempt.give_up()

    def _take_progress(self, key: RequestKey, part: Part) -> None:
        """Tell whoever asked for a request; an output that cannot be told ends that request."""
        attempt = self._attempts.get(key)
        if attempt is None:  # it is answered
            return
        attempt.parts.append(part)
        if attempt.is_begun:
            try:
                attempt.take(tell=True)
            except EngineError as error:
                attempt.running.fail(error)

    async def _describe(self, running: Running) -> AnswerRequest:
        group = running.group
        salt, shares = group.namespace.salt, self._front.facts.shares
        owner = shares.owner(salt)
        return AnswerRequest(
            request_id=running.name,
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            salt=salt,
            owner=None if owner is None else (owner, shares.weight(owner)),
            priority=group.priority,
            marks=tuple(group.requests[0].sequence.marks),
            follower=self._name if running.every_step else None,
            server=self._name,
            num_public=self._front.count_public(group),
            adapter=group.adapter,
            images=await self._put_images(group),
        )

    async def _put_images(self, group: RequestGroup) -> Awaitable[SentImages] | None:
        """A prompt's images for replicas. In another thread: a large one takes 0.2 s to copy."""
        images = self._front.take_images(group)
        return None if images is None else await asyncio.to_thread(self._put, images)

    def _route(self, running: Running) -> RouteRequest:
        group = running.group
        return RouteRequest(
            running.name,
            self._front.keys(group),
            len(group.prompt_token_ids),
            self._front.facts.names.block_size,
        )

    async def _end_all(self) -> None:
        self._feeds.end()
        self._take_orders()
        for one in list(self._started.values()):
            one.fail(self._closed())
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # feeds, and calls of all replicas
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
