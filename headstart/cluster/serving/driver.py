"""Frontend and driver of replicas: prepare requests in the server's process, and route them.

Replicas receive and return token ids. The server tokenizes prompts, so the router knows the hashes
of their blocks. The server also stores the token ids of earlier chat turns for all replicas.

    submitted ──▶ routed ──▶ sent ──first tokens──▶ answered, token by token ──▶ finished
                    ▲          │                        │
                    └──────────┘ the replica is lost    │ the replica is lost: an error, since a
                      another replica computes it       ▼ client may have seen tokens

A replica is lost when it died, or when it missed two heartbeats (`heartbeat.py`). A request that
returns its tokens only at the end is always computed again, as the client has seen no token. A
request fails when `MAX_LOST` replicas were lost while they computed it.

One thread with an event loop runs all requests and the calls to Ray Serve. The done callback of a
request's task sends the last update, because a task that is cancelled before it starts runs no
code.
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
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headstart.cache import BlockHasher, Shares
from headstart.cluster.index import PromptKeys
from headstart.cluster.router import RouteRequest
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.heartbeat import Feeds, cancel, send_heartbeats
from headstart.cluster.serving.messages import (
    AnswerRequest,
    RequestDelta,
    RequestKey,
    has_died,
    read_error,
)
from headstart.engine.adapter_names import Adapter, AdapterNames, InEngine, adapter_folder
from headstart.engine.driver import LocalDriver, Receiver, Update
from headstart.errors import (
    ConfigError,
    EngineError,
    HeadstartError,
    ReplicaLostError,
    RequestError,
)
from headstart.frontend.frontend import Frontend, ModelFacts
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import check_name

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from headstart.cluster.serving.images import ServerImages
    from headstart.cluster.serving.messages import EngineFacts
    from headstart.engine.config import EngineConfig
    from headstart.engine.image_cache import SentImages
    from headstart.engine.request import RequestGroup


CLOSED = "the engine is closed"


class ReplicaAdapters(AdapterNames):
    """LoRA adapters of replicas, by name. Thread-safe.

    To load an adapter, one replica reads its folder and returns its digest. A request contains the
    adapter's name, folder and digest. A replica that does not have this adapter loads it before it
    answers. So the folder must have the same files on every machine with replicas.

    read: loads an adapter (name, folder) in one replica, and returns it.
    """

    def __init__(self, read: Callable[[str, Path], Adapter]) -> None:
        super().__init__()
        self._read = read
        self._changing = threading.Lock()  # one thread at a time may change the names

    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        check_name("an adapter's name", name, ConfigError, required=True)
        adapter = self._read(name, adapter_folder(path))

        def add() -> Adapter:
            with self._changing:
                self._named = {**self._named, adapter.name: adapter}
            return adapter

        return in_engine(add)

    def unload(self, name: str) -> None:
        with self._changing:
            super().unload(name)


class ReplicaFrontend(Frontend):
    """`Frontend` of the replicas of one model."""

    images: ServerImages | None

    def __init__(
        self,
        model: str | Path,
        facts: EngineFacts,
        config: EngineConfig,
        max_replicas: int,
        adapters: ReplicaAdapters,
        tokenizer_folder: str | Path | None = None,
    ) -> None:
        """Prepare requests for up to `max_replicas` replicas with `config`. Raises ModelError.

        tokenizer_folder: None for the model's own tokenizer.
        """
        config = replace(config, max_num_seqs=config.max_num_seqs * max_replicas)
        tokenizer = load_tokenizer(tokenizer_folder or model)
        images: ServerImages | None = None
        if facts.vision is not None:  # image processors take long to import
            module = load_module("headstart.cluster.serving.images")
            images = module.ServerImages(model, facts.vision, tokenizer, config)
        model_facts = ModelFacts(
            facts.vocab_size,
            facts.eos_token_ids,
            facts.max_model_len,
            facts.num_blocks * max_replicas,
            facts.kv_cache_bytes * max_replicas,
            BlockHasher(facts.block_size, facts.model_name),
            Shares(),
        )
        super().__init__(tokenizer, model_facts, config, adapters, images, self._require_open)
        self.silence = facts.silence
        self.why_closed: str | None = None

    def _require_open(self) -> None:
        if self.why_closed is not None:
            raise EngineError(self.why_closed)

    def close(self, reason: str = CLOSED) -> None:
        """Accept no more requests; later calls do not change the reason."""
        self.why_closed = self.why_closed or reason


MAX_LOST = 3
_LOST = "the replica that computed this answer died or stopped answering"
_THREAD_POLL = 1.0  # seconds between two checks whether the thread is alive
_LOG = logging.getLogger("headstart.server")

Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class _Running:
    """An unfinished request. every_step: False if only its last update is needed.

    name: the request's id in replicas, which differs from the group's id if an earlier request
    with the same id has not ended. task: returns the last update. error, is_aborted: if the task is
    cancelled, the request ends with this error or with finish reason "abort".
    """

    group: RequestGroup
    receive: Receiver
    every_step: bool
    name: str = ""
    task: asyncio.Task[Update] | None = None
    is_aborted: bool = False
    error: HeadstartError | None = None

    def cancel(self, error: HeadstartError | None = None) -> None:
        """Cancel the task; `error` ends the request."""
        assert self.task is not None
        self.error = error or self.error
        self.task.cancel()

    def send(self, update: Update) -> None:
        with suppress(Exception):  # the receiver may be closed
            self.receive(update)

    def last_update(self) -> Update:
        """Return the last update of a request whose task has ended."""
        assert self.task is not None
        if not self.task.cancelled():
            return self.task.result()
        if self.error is not None:
            return self.error
        if not self.is_aborted:
            return EngineError("the request was cancelled")
        try:
            for request in self.group.requests:
                request.finish_reason = request.finish_reason or "abort"
            return self.group.output()
        except Exception as error:
            return _receiver_error(error)


@dataclass(eq=False, slots=True)
class _Attempt:
    """An attempt to compute a request. parts: received deltas to add to the request."""

    running: _Running
    sent: float
    is_begun: bool = False
    parts: list[RequestDelta] = field(default_factory=list)
    is_lost: bool = False

    def add_parts(self, *, send: bool) -> None:
        """Add the parts to the request. send: also send an update. Raises EngineError."""
        group = self.running.group
        try:
            for part in self.parts:
                part.add_to(group, self.sent)
            self.parts.clear()
            if send:
                self.running.receive(group.output())
        except Exception as error:  # such as a closed event loop
            raise _receiver_error(error) from error


def _receiver_error(error: Exception) -> EngineError:
    return EngineError(f"the answer cannot be sent: {type(error).__name__}: {error}")


class ReplicaDriver:
    """The driver of `AsyncLLM`. Every method may be called from any thread."""

    def __init__(
        self,
        handle: DeploymentHandle,
        frontend: ReplicaFrontend,
        dispatcher: Dispatcher,
        put: Callable[[SentImages], Awaitable[SentImages]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send requests to replicas.

        put: stores images for replicas, such as `ray.put`. clock: returns seconds, to detect silent
        replicas.
        """
        self._replicas = handle.options(stream=True)
        self._handle = handle
        self._frontend = frontend
        self._put = put
        self._dispatcher = dispatcher
        self._name = uuid.uuid4().hex  # this server, in subscriptions to the replicas' reports
        self._commands: deque[Callable[[], None]] = deque()
        self._running: dict[str, _Running] = {}  # by request id
        self._started: dict[str, _Running] = {}  # by name, until their tasks have ended
        self._attempts: dict[RequestKey, _Attempt] = {}
        self._feeds = Feeds(
            self._replicas, dispatcher, self._name, self._take_progress, self._mark_silent, clock
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headstart-replicas")
        self._thread.daemon = True
        self._thread.start()
        dispatcher.on_change = lambda: self._call_soon(self._feeds.follow_running)
        dispatcher.on_route = lambda: self._call_soon(dispatcher.catch_up)
        self._call_soon(self._feeds.follow_running)
        for task in (send_heartbeats(handle, self._name, frontend.silence), self._feeds.watch()):
            asyncio.run_coroutine_threadsafe(task, self._loop)

    # `Driver`

    awaited = staticmethod(nullcontext)  # no step runs in this process
    require_request = staticmethod(LocalDriver.require_request)

    def submit(self, group: RequestGroup, receive: Receiver, *, every_step: bool = True) -> None:
        """Send a prepared request; its last update is a finished output or an error.

        Raises EngineError if this driver is closed.
        """
        self._frontend.require_open()
        running = _Running(group, receive, every_step)
        self._enqueue(lambda: self._start(running))
        if self._frontend.why_closed is not None:  # closed meanwhile, so the thread may have ended
            self._run_commands()

    def cancel(self, groups: Sequence[RequestGroup], *, wait: bool = True) -> None:
        """Cancel unfinished requests; return at once. Later requests may use their ids."""

        def forget() -> None:
            for group in groups:
                running = self._running.get(group.request_id)
                if running is not None and running.group is group:  # not a later use of the id
                    running.receive = lambda update: None
                    running.cancel()
                    self._release(running)

        self._enqueue(forget)

    def abort(self, request_id: str) -> None:

        def abort() -> None:
            running = self._running.get(request_id)
            if running is not None:
                running.is_aborted = True
                running.cancel()

        self._enqueue(abort)

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` at once: this process runs no steps."""
        self._frontend.require_open()
        return function()

    async def call_async(self, function: Callable[[], Answer]) -> Answer:
        return self.call(function)

    def fail_all(self, reason: str) -> None:
        """End every request with an EngineError that has this reason, and accept no more."""
        self._frontend.close(reason)
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)

    def close(self) -> None:
        self._frontend.close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._run_commands()  # refuses the remaining requests
            self._loop.close()

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every replica; replicas that die meanwhile are ignored.

        Raises the error of the first call that fails.
        """

        async def call_all() -> list[Any]:
            try:
                call = self._handle.broadcast(method, *args)
                results = await call.results_async(return_exceptions=True)
            except Exception as error:
                raise read_error(error) from error
            for result in results:
                if isinstance(result, Exception) and not has_died(result):
                    raise read_error(result) from result
            return [result for result in results if not isinstance(result, Exception)]

        self._frontend.require_open()
        calling = asyncio.run_coroutine_threadsafe(call_all(), self._loop)
        while True:
            try:
                return calling.result(_THREAD_POLL)
            except TimeoutError:
                if self._thread.is_alive():
                    continue
            except CancelledError:  # `close` cancelled the task
                pass
            raise self._closed_error()

    def _closed_error(self) -> EngineError:
        return EngineError(self._frontend.why_closed or CLOSED)

    def _enqueue(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._call_soon(self._run_commands)

    def _call_soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # In the thread

    def _run_commands(self) -> None:
        """Run the commands that other threads queued, such as to start or abort a request."""
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # another thread took the command
                return
            command()

    def _start(self, running: _Running) -> None:
        request_id = running.group.request_id
        if self._frontend.why_closed is not None:
            running.send(self._closed_error())
        elif request_id in self._running:
            running.send(RequestError(f"request id {request_id!r} is in use"))
        else:
            names = chain([request_id], (f"{request_id}+{number}" for number in count(1)))
            running.name = next(name for name in names if name not in self._started)
            self._running[request_id] = self._started[running.name] = running
            running.task = self._loop.create_task(self._answer(running))
            running.task.add_done_callback(lambda task: self._end(running))

    def _end(self, running: _Running) -> None:
        """Forget a request whose task has ended, and send its last update."""
        try:
            del self._started[running.name]
            self._release(running)  # first, because the update's receiver may use the id again
            self._dispatcher.finish(running.name)
        finally:  # even after a bug, the receiver must not wait forever
            update = running.last_update()
            # The frames of a cancelled task refer to `running`, so its images would stay in Ray's
            # store until the next garbage collection.
            running.task = None
            running.send(update)

    def _release(self, running: _Running) -> None:
        if self._running.get(running.group.request_id) is running:
            del self._running[running.group.request_id]

    async def _answer(self, running: _Running) -> Update:
        """Send a request, and send it again if its replica is lost; return its last update."""
        try:
            request = await self._make_request(running)
            route = RouteRequest(
                running.name,
                PromptKeys(self._frontend.facts.hasher, running.group.requests[0].sequence),
                len(request.prompt_token_ids),
                self._frontend.facts.hasher.block_size,
            )
            self._dispatcher.expect(route)
            for attempt in range(MAX_LOST):
                try:
                    await self._stream(running, replace(request, attempt=attempt))
                    return running.group.output()
                except Exception as error:
                    reason = read_error(error)
                if not isinstance(reason, ReplicaLostError):
                    return reason
                _LOG.warning("a replica was lost during request %s: %s", running.name, reason)
                if any(request.last_token_time is not None for request in running.group.requests):
                    # A client may have seen tokens.
                    return ReplicaLostError(f"{_LOST}; send the request again")
            return ReplicaLostError(f"{MAX_LOST} replicas died while they computed this request")
        except Exception as error:
            return read_error(error)

    async def _stream(self, running: _Running, request: AnswerRequest) -> None:
        """Send a request to a replica, and receive its tokens. Raises errors of Ray or the replica.

        The stream yields the first tokens, and at its end all later tokens. With `every_step`,
        reports also deliver the later tokens as they are computed.
        """
        attempt = _Attempt(running, time.perf_counter())
        self._attempts[request.key] = attempt
        stream = None
        try:
            stream = self._replicas.answer.remote(request)
            async for part in stream:
                if not attempt.is_begun:
                    self._dispatcher.first_token(running.name)
                    if self._frontend.images is not None:
                        self._frontend.images.note_encoded(running.group)
                # A report may arrive before the first tokens.
                attempt.parts.insert(len(attempt.parts) if attempt.is_begun else 0, part)
                attempt.is_begun = True
                if part.finished:
                    attempt.add_parts(send=False)
                    stream = None  # nothing to cancel
                    return
                if running.every_step:
                    attempt.add_parts(send=True)
        except asyncio.CancelledError:
            # A local variable for the task would form a cycle with this frame, see `_end`.
            if attempt.is_lost and running.task is not None and running.task.uncancel() == 0:
                raise ReplicaLostError("the replica stopped answering") from None
            raise
        finally:
            del self._attempts[request.key]
            if stream is not None:
                cancel(stream)
        raise EngineError("a replica ended the request, as this server sent no heartbeats")

    def _mark_silent(self, replica: str) -> None:
        names = self._dispatcher.mark_silent(replica)
        for attempt in self._attempts.values():
            if attempt.running.name in names:
                attempt.is_lost = True
                attempt.running.cancel()

    def _take_progress(self, key: RequestKey, part: RequestDelta) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:  # the request has ended
            return
        attempt.parts.append(part)
        if attempt.is_begun:
            try:
                attempt.add_parts(send=True)
            except EngineError as error:
                attempt.running.cancel(error)

    async def _make_request(self, running: _Running) -> AnswerRequest:
        group, facts, images = running.group, self._frontend.facts, self._frontend.images
        salt, sequence = group.namespace.salt, group.requests[0].sequence
        owner = facts.shares.owner(salt)
        sequence.cut(facts.hasher.block_size)  # sets `num_public`
        message = None if images is None else images.take(group)
        # A thread copies the images, which may take long.
        images_ref = None if message is None else await asyncio.to_thread(self._put, message)
        return AnswerRequest(
            request_id=running.name,
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            salt=salt,
            owner=None if owner is None else (owner, facts.shares.weight(owner)),
            priority=group.priority,
            marks=tuple(sequence.marks),
            server=self._name,
            every_step=running.every_step,
            num_public=sequence.num_public,
            adapter=group.adapter,
            images=images_ref,
        )

    async def _end_all(self) -> None:
        self._feeds.end()
        self._run_commands()
        for running in list(self._started.values()):
            running.cancel(self._closed_error())
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # feeds and calls of replicas
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
