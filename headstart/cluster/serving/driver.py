"""Has requests answered by replicas; in place of an engine's driver.

    submitted ──▶ routed ──▶ sent ──first tokens──▶ answered here, token by token ──▶ finished
                    ▲          │                        │
                    └──────────┘ the replica died       │ the replica died: an error, as a client
                      another computes it from anew     ▼ may have been told what it has so far

A request that wants all of its tokens at the end told nobody anything before that, so it is always
computed anew. `MAX_LOST` replicas that die under one request are not by chance: it then ends.

Everything is done by one thread with an event loop of its own; Ray Serve's calls are made there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from headstart.cluster.index import prefix_keys
from headstart.cluster.load import RouteRequest
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.messages import AnswerRequest, Follow, Part, Report, RequestKey
from headstart.cluster.serving.received import take_part
from headstart.engine.driver import AsyncMailbox, Receiver
from headstart.errors import EngineError, HeadstartError, ReplicaLostError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from headstart.cluster.serving.front import FrontEngine
    from headstart.engine.request import RequestGroup

__all__ = ["MAX_LOST", "ReplicaDriver"]

MAX_LOST = 3
_ABORT = "abort"
_AGAIN = 0.5  # seconds until a replica is followed again whose stream broke
_LOG = logging.getLogger("headstart.server")

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Running:
    """An attempt to have a request answered. parts: that came and are not taken in yet."""

    group: RequestGroup
    receive: Receiver
    sent: float
    is_begun: bool = False
    parts: list[Part] = field(default_factory=list)

    def take(self) -> None:
        """Take the parts in, and tell whoever asked."""
        for part in self.parts:
            take_part(self.group, part, self.sent)
        self.parts.clear()
        self.receive(self.group.output())


class ReplicaDriver:
    """What `AsyncLLM` asks of a `Driver`. Every method may be called from any thread."""

    def __init__(
        self, handle: DeploymentHandle, front: FrontEngine, dispatcher: Dispatcher
    ) -> None:
        self._replicas = handle.options(stream=True)
        self._handle = handle
        self._front = front
        self._dispatcher = dispatcher
        self._name = uuid.uuid4().hex  # of this server, to the replicas that it follows
        self._running: dict[RequestKey, _Running] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headstart-replicas")
        self._thread.daemon = True
        self._thread.start()
        dispatcher.call_on_change(lambda: self._soon(self._match_feeds))
        self._soon(self._match_feeds)

    # As of a driver

    def async_mailbox(self) -> AsyncMailbox:
        """Where updates of requests are waited for, by the event loop that runs."""
        return AsyncMailbox()

    def submit(self, group: RequestGroup, receive: Receiver, *, every_step: bool = True) -> None:
        """Have a prepared request answered. Its last update is a finished output or an error.

        Raises EngineError when this is closed.
        """
        self._front.require_open()
        self._soon(lambda: self._start(group, receive, every_step))

    def cancel(self, groups: Sequence[RequestGroup], *, wait: bool = True) -> None:
        """Forget those of these requests that are unfinished; returns at once."""
        for group in groups:
            self._soon(partial(self._stop, group.request_id))

    def abort(self, request_id: str) -> None:
        """Stop a request; its last update has finish reason "abort". Returns at once."""
        self._soon(lambda: self._stop(request_id, _ABORT))

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function`; an engine would between two steps."""
        self._front.require_open()
        return function()

    async def call_async(self, function: Callable[[], Answer]) -> Answer:
        """As `call`."""
        return self.call(function)

    def close(self) -> None:
        """End every request with an EngineError, and follow no replica any more. Idempotent."""
        self._front.close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def ask_all(self, method: str, *given: Any) -> list[Any]:
        """Call a method of every replica. Raises what the first that fails raises."""

        async def ask() -> list[Any]:
            return list(await self._handle.broadcast(method, *given).results_async())

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()

    def _soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing is under way
            self._loop.call_soon_threadsafe(function)

    # In the thread

    def _start(self, group: RequestGroup, receive: Receiver, every_step: bool) -> None:
        work = self._answer(group, receive, every_step)
        self._keep(self._tasks, group.request_id, work)

    def _keep(
        self, tasks: dict[str, asyncio.Task[None]], name: str, work: Coroutine[Any, Any, None]
    ) -> None:
        tasks[name] = task = self._loop.create_task(work)
        task.add_done_callback(lambda done: tasks.pop(name) if tasks.get(name) is done else None)

    def _stop(self, name: str, why: str | None = None) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel(why)

    async def _answer(self, group: RequestGroup, receive: Receiver, every_step: bool) -> None:
        """Have it answered, by one replica after another while they die under it."""
        asked = self._describe(group, every_step)
        update: HeadstartError | None = None
        try:
            self._dispatcher.expect(self._route(group))
            for attempt in range(MAX_LOST):
                try:
                    await self._stream(group, replace(asked, attempt=attempt), receive)
                    return
                except RayActorError as error:
                    why = str(error).partition("\n")[0]
                    _LOG.warning("a replica died under %s: %s", group.request_id, why)
                    if any(one.last_token_time is not None for one in group.requests):
                        update = ReplicaLostError(
                            "the replica that computed this answer died; ask again"
                        )
                        break
            else:
                update = ReplicaLostError(f"{MAX_LOST} replicas died under this request")
        except asyncio.CancelledError as stopped:
            if self._front.is_closed:
                receive(EngineError("the engine is closed"))
            elif stopped.args == (_ABORT,):
                for one in group.requests:
                    one.finish_reason = one.finish_reason or _ABORT
                receive(group.output())
            raise
        except RayTaskError as error:
            update = _read_error(error)
        except Exception as error:  # Ray's own, such as an application that was deleted meanwhile
            update = EngineError(f"the replicas cannot be asked: {type(error).__name__}: {error}")
        finally:
            self._dispatcher.finish(group.request_id)
        if update is not None:
            receive(update)

    async def _stream(self, group: RequestGroup, asked: AnswerRequest, receive: Receiver) -> None:
        """One attempt: the first tokens and the last come here, those between with the reports."""
        running = _Running(group, receive, time.perf_counter())
        stream = self._replicas.answer.remote(asked)
        self._running[asked.key] = running
        try:
            async for part in stream:
                if not running.is_begun:
                    self._dispatcher.first_token(group.request_id)
                # A report may overtake the first tokens.
                running.parts.insert(len(running.parts) if running.is_begun else 0, part)
                running.is_begun = True
                if asked.follower is not None or part.finished:
                    running.take()
                if part.finished:
                    return
        except asyncio.CancelledError:
            stream.cancel()
            raise
        finally:
            del self._running[asked.key]
        raise EngineError("a replica ended a request without an answer")

    def _take_progress(self, key: RequestKey, part: Part) -> None:
        running = self._running.get(key)
        if running is None:  # it is answered
            return
        running.parts.append(part)
        if running.is_begun:
            running.take()

    def _describe(self, group: RequestGroup, every_step: bool) -> AnswerRequest:
        salt, shares = group.namespace.salt, self._front.manager.shares
        owner = shares.owner(salt)
        return AnswerRequest(
            request_id=group.request_id,
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            salt=salt,
            owner=None if owner is None else (owner, shares.weight(owner)),
            priority=group.priority,
            marks=tuple(group.requests[0].sequence.marks),
            follower=self._name if every_step else None,
        )

    def _route(self, group: RequestGroup) -> RouteRequest:
        return RouteRequest(
            group.request_id,
            prefix_keys(self._front.names(group)),
            len(group.prompt_token_ids),
            self._front.manager.block_size,
        )

    # What replicas tell of their caches

    def _match_feeds(self) -> None:
        """Follow the replicas that run, and no others."""
        running = set(self._dispatcher.replicas)
        for name, task in self._feeds.items():
            if name not in running:
                task.cancel()  # it would keep the replica from ending
        for name in running - self._feeds.keys():
            self._keep(self._feeds, name, self._follow(name))

    async def _follow(self, replica: str) -> None:
        while True:
            try:
                await self._read_feed(replica)
            except Exception as error:  # it died, which Ray Serve tells the dispatcher, or broke
                _LOG.info("replica %s is not followed: %s", replica, error)
                await asyncio.sleep(_AGAIN)

    async def _read_feed(self, replica: str) -> None:
        """Until a batch is missing: following anew begins with a snapshot."""
        stream = self._replicas.follow.remote(Follow(replica, self._name))
        try:
            async for report in stream:
                assert isinstance(report, Report)
                for key, part in (report.progress or {}).items():
                    self._take_progress(key, part)
                if report.metrics is not None:
                    self._dispatcher.note_metrics(replica, report.metrics)
                if report.batch is not None and not self._dispatcher.apply(replica, report.batch):
                    return
        finally:
            stream.cancel()

    async def _end_all(self) -> None:
        tasks = [*self._tasks.values(), *self._feeds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read_error(error: RayTaskError) -> HeadstartError:
    """What a replica raised, as if it had been raised here."""
    cause = error.cause
    if isinstance(cause, HeadstartError):
        return cause
    return EngineError(f"a replica failed: {type(cause).__name__}: {cause}")
