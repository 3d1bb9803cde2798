"""Streams of one request's outputs: `OutputStream` for threads, `AsyncOutputStream` for asyncio.

    the engine's thread ──`receive`──▶ Mailbox or AsyncMailbox ──`get`──▶ the reader

An `AsyncMailbox` wakes its reader through the `_Waker` of the event loop.

A stream submits its request when its first output is read, and cancels it when the stream is closed
or garbage-collected. The driver refers only to mailboxes, so a stream without a reader is collected
while its request still runs. Streams are classes instead of generator functions, because collecting
a stream must differ from closing it. `OutputStream.close` waits for the engine, but any thread may
collect a stream and must not wait. A collected asynchronous generator would be closed only later,
in the event loop.
"""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from headstart.engine.outputs import OutputConverter, RequestOutput
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.driver import AnyOutput, AnyRequest, Driver, LocalDriver
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import ChatRequests

Output = TypeVar("Output", bound="AnyOutput")

PACE = 0.005
"""Minimum seconds between two deliveries to a paced reader (`AsyncMailbox`)."""
# Seconds. A reader takes 0.1 ms for an update, so 32 paced readers take 5 % of the loop's time.
_PACE_PER_READER, _MAX_PACE = 0.002, 0.064
_MAX_UNREAD = 256  # updates; more may be dropped, because each has the whole text so far


class PromptProgress(NamedTuple):
    """The progress of a prompt, in tokens.

    read: tokens that have K/V, including cached tokens. cached: tokens that hit the cache. Both are
    0 while the request waits.
    """

    total: int
    read: int
    cached: int


def prompt_progress(group: RequestGroup) -> PromptProgress:
    """Return the progress of a submitted request's prompt; may be called from any thread."""
    request = group.requests[0]
    total = len(group.prompt_token_ids)
    cached = request.num_cached_tokens
    return PromptProgress(total, min(max(request.num_read, cached), total), cached)


class Mailbox(Generic[Output]):
    """A queue of updates of requests, for the thread that waits for them."""

    def __init__(self, driver: LocalDriver, groups: Sequence[AnyRequest]) -> None:
        self._driver = driver
        self._groups = groups
        self._updates: queue.SimpleQueue[Output | BaseException] = queue.SimpleQueue()

    def receive(self, update: Output | BaseException) -> None:
        """Add an update, or drop it if `_MAX_UNREAD` are unread: later updates have its text."""
        is_last = isinstance(update, BaseException) or update.finished
        if is_last or self._updates.qsize() < _MAX_UNREAD:
            self._updates.put(update)

    def get(self) -> Output:
        """Wait for the next output. Raises the error that ended a request."""
        update: Output | BaseException = self._driver.wait(self._updates, self._groups)
        if isinstance(update, BaseException):
            raise update
        return update


def run_all(
    driver: LocalDriver, groups: Sequence[AnyRequest], report: Callable[[Any], None] | None = None
) -> list[Any]:
    """Run requests until all finish, and return their last outputs in the order of the requests.

    report: called with the last output of each request when it arrives. An error of one request
    cancels all requests.
    """
    outputs: dict[str, Any] = {}
    updates: Mailbox[Any] = Mailbox(driver, groups)
    try:
        for group in groups:
            driver.submit(group, updates.receive, every_step=False)
        while len(outputs) < len(groups):
            output = updates.get()
            outputs[output.request_id] = output
            if report is not None:
                report(output)
    finally:
        if len(outputs) < len(groups):
            driver.cancel(groups)
    return [outputs[group.request_id] for group in groups]


class OutputStream(Generator[Output, None, None]):
    """The outputs of one request. Several threads may read the stream, and any may close it."""

    def __init__(
        self,
        driver: LocalDriver,
        group: Any,
        chats: ChatRequests | None = None,
        owner: object = None,
    ) -> None:
        """Stream `group`. chats: stores the answer for the next turn of a chat.

        owner: an object to which the stream holds a reference until it ends.
        """
        self._driver, self._group, self._chats, self._owner = driver, group, chats, owner
        self._converter = OutputConverter(group.output_kind)
        self._updates: Mailbox[Any] = Mailbox(driver, [group])
        self._unsubmitted = [group]  # the thread that removes it submits or cancels the request
        self._ended = self._aborted = self._is_closed = False

    def send(self, value: None) -> Output:
        """Return the next output; `value` is ignored."""
        if self._ended:
            raise StopIteration
        try:
            if self._unsubmitted:
                self._submit()
            converted = None
            while converted is None:
                output = self._updates.get()
                if output.finished:
                    self._end()
                    if self._chats is not None:
                        self._chats.remember(self._group, output)
                converted = self._converter.next(output)
        except BaseException:
            self.close()
            raise
        return converted  # type: ignore[return-value]

    def throw(self, *error: Any) -> Output:
        """Close the stream, then raise the error."""
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        """Cancel the request if it is unfinished, and wait until its memory is released."""
        if not self._ended:
            self._cancel(wait=True)
        self._end()

    def __del__(self) -> None:
        if not self._ended:
            self._cancel(wait=False)

    def abort(self) -> None:
        """End the request after the current step; do not wait for it.

        The stream's last output has the text so far and finish reason "abort". The answer of a chat
        is stored for the next turn. May be called from any thread and from a signal handler. Raises
        EngineError if the engine is closed.
        """
        self._aborted = True
        if not self._unsubmitted:
            self._driver.abort(self._group.request_id)

    def progress(self) -> PromptProgress:
        """Return the progress of the prompt; may be called from any thread."""
        return prompt_progress(self._group)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt. They are known before the request is submitted."""
        ids: list[int] = self._group.prompt_token_ids
        return ids

    def _submit(self) -> None:
        try:
            group = self._unsubmitted.pop()
        except IndexError:  # another thread submits the request
            return
        every_step = self._converter.wants_every_step
        self._driver.submit(group, self._updates.receive, every_step=every_step)
        if self._aborted:  # aborted before it was submitted
            self._driver.abort(group.request_id)
        if self._is_closed:  # another thread closed the stream before the request was submitted
            self._driver.cancel([group])

    def _cancel(self, *, wait: bool) -> None:
        self._is_closed = True  # first, so that a thread that submits the request sees it
        try:
            self._unsubmitted.pop()
        except IndexError:
            if self._driver.is_alive:
                self._driver.cancel([self._group], wait=wait)

    def _end(self) -> None:
        self._ended = True
        self._owner = None
        self._updates.receive(StopIteration())  # another thread may wait for an output


class AsyncMailbox(Generic[Output]):
    """Updates of one request for the tasks of the running event loop.

    paced: deliver the first and the last update at once; between them, deliver only the newest
    update, every `PACE` seconds. With many readers, the interval is longer: `_PACE_PER_READER`
    seconds for each reader, up to `_MAX_PACE`.
    """

    def __init__(self, driver: Driver, *, paced: bool = False) -> None:
        self.paced = paced
        self.is_listed = False  # True while the waker lists the mailbox for a later delivery
        self._driver = driver
        self.loop = asyncio.get_running_loop()
        self._waker = _WAKERS.get(self.loop) or _WAKERS.setdefault(self.loop, _Waker(self.loop))
        # Each update contains the earlier updates.
        self._updates: deque[Output] = deque(maxlen=1 if paced else None)
        self._last: Output | BaseException | None = None
        self._is_begun = False
        self._waiter: asyncio.Future[None] | None = None

    def receive(self, update: Output | BaseException) -> None:
        """Add an update, from any thread. Raises RuntimeError if the loop is closed."""
        may_wait = False
        if isinstance(update, BaseException) or update.finished:
            self._last = self._last or update
        elif self._last is None and (self.paced or len(self._updates) < _MAX_UNREAD):
            self._updates.append(update)
            may_wait = self.paced and self._is_begun
        else:
            return
        self._waker.add(self, may_wait=may_wait)
        self._is_begun = True

    def wake(self) -> None:
        """Wake the reader; called in the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Output:
        """Wait for the next output. Raises the error that ended the request."""
        while not self._updates and self._last is None:
            self._waiter = self.loop.create_future()
            try:
                with self._driver.awaited():
                    await self._waiter
            finally:
                self._waiter = None
        last = self._last
        if last is None or (self._updates and (not self.paced or isinstance(last, BaseException))):
            return self._updates.popleft()
        if isinstance(last, BaseException):
            raise last
        return last


class _Waker:
    """Waker of the readers of one event loop. The threads of engines call `add`.

    Waking the loop is expensive for an engine's thread: it takes a system call, which releases the
    interpreter's lock. So `add` wakes the loop once for many updates. After the loop has woken
    readers of paced updates, it looks for further updates by itself after a pause. During the
    pause, `add` wakes the loop only for updates that must not wait.

        idle ──`add` wakes the loop──▶ woken ──after a pause, with new updates──▶ woken
          ▲                              └────after a pause, without updates────▶ idle
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now: deque[AsyncMailbox[Any]] = deque()
        self._later: deque[AsyncMailbox[Any]] = deque()
        self._is_woken = False  # True from a wake-up by `add` until `_wake` begins
        self._is_pausing = False  # True if the loop looks again after a pause

    def add(self, mailbox: AsyncMailbox[Any], *, may_wait: bool) -> None:
        """Wake a mailbox's reader. Raises RuntimeError if the loop is closed."""
        # List the mailbox, then read the flags. The loop resets the flags, then reads the lists. So
        # if a flag is still set here, the loop will find the mailbox.
        if not may_wait:
            self._now.append(mailbox)
        elif not mailbox.is_listed:
            mailbox.is_listed = True
            self._later.append(mailbox)
        will_look = self._is_woken or (may_wait and self._is_pausing)
        if not will_look or self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        paced = set()
        while self._now or (self._later and not self._is_pausing):
            mailbox = self._now.popleft() if self._now else self._later.popleft()
            mailbox.is_listed = False
            mailbox.wake()
            if mailbox.paced:
                paced.add(mailbox)
        if paced and not self._is_pausing:
            self._is_pausing = True
            pause = max(PACE, min(_PACE_PER_READER * len(paced), _MAX_PACE))
            self._loop.call_later(pause, self._look_again)

    def _look_again(self) -> None:
        self._is_pausing = False
        self._wake()


# A waker exists as long as one of its mailboxes.
_WAKERS: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Waker] = (
    weakref.WeakValueDictionary()
)


class AsyncOutputStream(AsyncGenerator[Output, None]):
    """The outputs of one request for asyncio, read by one task at a time.

    If its task is cancelled or its event loop ends, the request is cancelled.
    """

    def __init__(
        self,
        driver: Driver,
        prepare: Callable[[], Awaitable[Any]],
        chats: ChatRequests | None = None,
        owner: object = None,
        *,
        paced: bool = False,
    ) -> None:
        """Stream the request that `prepare` makes when the first output is read."""
        self._driver, self._chats, self._owner, self._paced = driver, chats, owner, paced
        self._prepare: Callable[[], Awaitable[Any]] | None = prepare  # None after the end
        self._group: Any = None
        self._ended = self._is_read = False
        self._failure: Exception | None = None  # see `fail`

    async def asend(self, value: None) -> Output:
        """Return the next output; `value` is ignored.

        Raises the exceptions of `prepare`. All outputs must be read in the same event loop;
        otherwise raises RequestError.
        """
        if self._ended:
            self._raise_end()
        if self._group is not None and asyncio.get_running_loop() is not self._updates.loop:
            raise RequestError(
                "the stream was started in another event loop; allowed: the same loop, or "
                "`LLM.stream`, which needs no event loop"
            )
        if self._is_read:
            raise RuntimeError("another task waits for this stream's next output")
        self._is_read = True
        try:
            if self._group is None:
                await self._begin()
            while not self._ended:
                output = await self._updates.get()
                if output.finished:
                    self._end()
                    if self._chats is not None and self._group.chat is not None:
                        await asyncio.to_thread(self._chats.remember, self._group, output)
                converted = self._converter.next(output)
                if converted is not None:
                    return converted  # type: ignore[return-value]
        except StopAsyncIteration:  # sent by `_cancel`
            pass
        except BaseException:
            self._cancel()
            raise
        finally:
            self._is_read = False
        self._raise_end()

    async def athrow(self, *error: Any) -> Output:
        """Cancel the request, then raise the error."""
        self._cancel()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        """Cancel the request if it is unfinished."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def fail(self, error: Exception) -> None:
        """Cancel the request if it is unfinished, and raise `error` in place of the next output.

        Must be called in the event loop that reads the stream.
        """
        if not self._ended:
            self._failure = error
            self._cancel()

    async def _begin(self) -> None:
        """Prepare the request, and submit it unless the stream was closed meanwhile."""
        assert self._prepare is not None
        group = await self._prepare()
        if self._ended:
            return
        self._converter = OutputConverter(group.output_kind)
        self._updates: AsyncMailbox[Any] = AsyncMailbox(self._driver, paced=self._paced)
        self._group = group
        every_step = self._converter.wants_every_step
        self._driver.submit(group, self._updates.receive, every_step=every_step)

    def _raise_end(self) -> NoReturn:
        failure, self._failure = self._failure, None
        raise StopAsyncIteration if failure is None else failure

    def _cancel(self) -> None:
        ended = self._ended
        self._end()
        if not ended and self._group is not None:
            self._driver.cancel([self._group], wait=False)
            with suppress(RuntimeError):  # the loop may be closed
                self._updates.receive(StopAsyncIteration())  # a task may wait for an output

    def _end(self) -> None:
        self._ended = True
        self._owner = self._prepare = None  # `_prepare` refers to the owner too


RequestStream = OutputStream[RequestOutput]
AsyncRequestStream = AsyncOutputStream[RequestOutput]
