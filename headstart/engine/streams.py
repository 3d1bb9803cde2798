"""Streams of outputs, whoever ends them: the reader, an error, or the garbage collector."""

from __future__ import annotations

import asyncio
import queue
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from headstart.engine.outputs import ShownOutputs
from headstart.engine.vllm_api.signatures import OfOneProcess
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.chat.requests import ChatRequests
    from headstart.engine.driver import Driver, Receiver, Update
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.errors import EngineError

__all__ = [
    "AsyncDriver",
    "AsyncRequestStream",
    "Mailbox",
    "OutputStream",
    "PromptProgress",
    "RequestStream",
]

_PATIENCE = 1.0  # seconds between two looks at whether the engine has anything to tell
_MOST_UPDATES = 256  # in one mailbox; each has all the text so far, so one more can be left out

Output = TypeVar("Output")
Answer = TypeVar("Answer")


class AsyncDriver(Protocol):
    """What `AsyncLLM` and its streams ask of a driver: as of `Driver`, or of many replicas."""

    def require_request(self, given: object) -> None: ...

    def awaited(self) -> AbstractContextManager[None]: ...

    def submit(
        self, group: RequestGroup, receive: Receiver, *, every_step: bool = True
    ) -> None: ...

    def cancel(self, groups: Sequence[RequestGroup], *, wait: bool = True) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def call(self, function: Callable[[], Answer]) -> Answer: ...

    async def call_async(self, function: Callable[[], Answer]) -> Answer: ...

    def explain_silence(self, groups: Sequence[RequestGroup]) -> EngineError | None: ...

    def close(self) -> None: ...


class OutputStream(OfOneProcess, Generator[Output, None, None]):
    """The outputs of one request, which is submitted when the first of them is asked for.

    No generator function: the garbage collector would close it as a reader does, in whatever
    thread it runs, in the middle of whatever that thread does.
    """

    _ended = False

    @abstractmethod
    def _next(self) -> Output:
        """The next output; `_end` is called for the last."""

    @abstractmethod
    def _leave(self, *, collected: bool) -> None:
        """Forget the request if it was submitted.

        collected: the garbage collector calls. Only order it then: wait for nothing, and change
        nothing that a thread may be in the middle of.
        """

    def _end(self) -> None:
        """No more outputs. May be called again."""
        self._ended = True

    def send(self, value: None) -> Output:
        """The next output; `value` is ignored."""
        if self._ended:
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def throw(self, *error: Any) -> Output:
        """Close the stream, then raise the error."""
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        """Forget the request if it is unfinished; it holds nothing any more on return."""
        if not self._ended:
            self._leave(collected=False)
        self._end()

    def __del__(self) -> None:
        if not self._ended:
            self._leave(collected=True)


class PromptProgress(NamedTuple):
    """How much of a prompt has its K/V, in tokens, `cached` of them without computing.

    Both are 0 while the request waits.
    """

    total: int
    read: int
    cached: int


class RequestStream(OutputStream["RequestOutput"]):
    """One request's outputs by way of the driver; a chat's answer is remembered."""

    def __init__(
        self,
        driver: Driver,
        group: RequestGroup,
        chats: ChatRequests | None = None,
        owner: object = None,
    ) -> None:
        """owner: is kept alive until the stream ends, since the engine ends with it."""
        self._owner = owner
        self._driver = driver
        self._group = group
        self._chats = chats
        self._shown = ShownOutputs(group.params.output_kind)
        self._updates = Mailbox(driver, [group])
        self._unsubmitted = [group]  # until one thread takes it out: to submit it, or never to
        self._aborted = False
        self._is_left = False

    def abort(self) -> None:
        """End the request after the step under way: its last output, with finish reason "abort",
        has the text so far, and a chat remembers it.

        Returns at once; may be called from any thread and from a signal handler. Raises EngineError
        when the engine is closed.
        """
        self._aborted = True
        if not self._unsubmitted:
            self._driver.abort(self._group.request_id)

    def progress(self) -> PromptProgress:
        """How much of the prompt was read so far; may be called from any thread."""
        request = self._group.requests[0]
        total = len(self._group.prompt_token_ids)
        cached = request.num_cached_tokens
        return PromptProgress(total, min(max(request.num_read, cached), total), cached)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, before it is submitted, too."""
        return self._group.prompt_token_ids

    def _next(self) -> RequestOutput:
        if self._unsubmitted:
            self._submit()
        shown = None
        while shown is None:
            output = self._updates.get()
            if output.finished:
                self._end()
                if self._chats is not None:
                    self._chats.remember(self._group, output)
            shown = self._shown.next(output)
        return shown

    def _submit(self) -> None:
        try:
            group = self._unsubmitted.pop()
        except IndexError:  # another thread submits it
            return
        every_step = self._shown.wants_every_step
        self._driver.submit(group, self._updates.receive, every_step=every_step)
        if self._aborted:  # before there was anything to abort
            self._driver.abort(group.request_id)
        if self._is_left:  # by another thread, before there was anything to cancel
            self._driver.cancel([group])

    def _leave(self, *, collected: bool) -> None:
        self._is_left = True  # first, for a thread that is submitting it
        try:
            self._unsubmitted.pop()
        except IndexError:
            if self._driver.is_alive:
                self._driver.cancel([self._group], wait=not collected)

    def _end(self) -> None:
        super()._end()
        self._owner = None
        self._updates.receive(StopIteration())  # another thread may wait for one


class AsyncRequestStream(OfOneProcess, AsyncGenerator["RequestOutput", None]):
    """One request's outputs for asyncio, prepared and submitted when the first is asked for.

    No generator function: the event loop closes one that nobody holds any more some turns later,
    and until then its request ran on and its id was in use. Here the request is cancelled at once:
    by the time that a cancelled task, or a loop that was left, is over, its id is free.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        chats: ChatRequests,
        prepare: Callable[[], Awaitable[RequestGroup]],
        owner: object = None,
    ) -> None:
        """owner: is kept alive until the stream ends, since the engine ends with it."""
        self._owner = owner
        self._driver = driver
        self._chats = chats
        self._prepare: Callable[[], Awaitable[RequestGroup]] | None = prepare  # until it is called
        self._group: RequestGroup | None = None
        self._ended = self._is_read = False

    async def asend(self, value: None) -> RequestOutput:
        """The next output; `value` is ignored. Raises what preparing the request does.

        Raises RequestError in another event loop than that of the first output, and may be read on
        in that one.
        """
        if self._ended:
            raise StopAsyncIteration
        if self._group is not None:
            self._updates.require_loop()
        if self._is_read:
            raise RuntimeError("another task waits for this stream's next output")
        self._is_read = True
        try:
            return await self._next()
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_read = False

    async def athrow(self, *error: Any) -> RequestOutput:
        """Cancel the request, then raise the error."""
        self._leave()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        """Cancel the request if it is unfinished."""
        self._leave()

    async def _next(self) -> RequestOutput:
        group = self._group
        if group is None:
            assert self._prepare is not None
            group = await self._prepare()
            if self._ended:  # meanwhile
                raise StopAsyncIteration
            self._shown = ShownOutputs(group.params.output_kind)
            self._updates = AsyncMailbox(self._driver, group)
            self._group = group  # last: from here on there is something to cancel
            every_step = self._shown.wants_every_step
            self._driver.submit(group, self._updates.receive, every_step=every_step)
        while not self._ended:
            output = await self._updates.get()
            if output.finished:
                self._end()
                if group.chat is not None:
                    await asyncio.to_thread(self._chats.remember, group, output)
            shown = self._shown.next(output)
            if shown is not None:
                return shown
        raise StopAsyncIteration

    def _leave(self) -> None:
        ended = self._ended
        self._end()
        if not ended and self._group is not None:
            self._driver.cancel([self._group], wait=False)
            with suppress(RuntimeError):  # the loop was closed
                self._updates.receive(StopAsyncIteration())  # a task may wait for one

    def _end(self) -> None:
        self._ended = True
        self._owner = self._prepare = None  # which holds it, too

    def __del__(self) -> None:
        self._leave()


class Mailbox:
    """Updates of requests for a thread that waits for them.

    A reader far behind is not told every token: each output has all the text so far.
    """

    def __init__(self, driver: Driver, groups: Sequence[RequestGroup]) -> None:
        self._driver = driver
        self._groups = groups
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def receive(self, update: Update) -> None:
        """A `Receiver`."""
        if _is_last(update) or self._updates.qsize() < _MOST_UPDATES:
            self._updates.put(update)

    def get(self) -> RequestOutput:
        """The next output, waited for. Raises the error that ended a request."""
        return _open(self._driver.wait(self._updates, self._groups))


class AsyncMailbox:
    """As `Mailbox`, of one request for the tasks of one event loop: that which runs now."""

    def __init__(self, driver: AsyncDriver, group: RequestGroup) -> None:
        self._driver = driver
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._num_sent = self._num_read = 0

    def receive(self, update: Update) -> None:
        """A `Receiver`. Raises RuntimeError when the loop was closed.

        Counts what is on its way as well: a loop that is busy takes nothing in.
        """
        if _is_last(update) or self._num_sent - self._num_read < _MOST_UPDATES:
            self._num_sent += 1
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    def require_loop(self) -> None:
        """Raise RequestError in the tasks of another loop, which nobody would wake."""
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "the stream was begun in another event loop; allowed: read one stream in one loop, "
                "or use `LLM.stream`, which needs none"
            )

    async def get(self) -> RequestOutput:
        """As `Mailbox.get`."""
        reason = None
        while True:
            try:
                with self._driver.awaited():
                    async with asyncio.timeout(_PATIENCE):
                        update = await self._updates.get()
            except TimeoutError:
                # Since before the last wait, in which an update on its way would have come.
                if reason is not None and self._updates.empty():
                    raise reason from None
                reason = self._driver.explain_silence([self._group])
            else:
                self._num_read += 1
                return _open(update)


def _is_last(update: Update) -> bool:
    return isinstance(update, BaseException) or update.finished


def _open(update: Update) -> RequestOutput:
    if isinstance(update, BaseException):
        raise update
    return update
