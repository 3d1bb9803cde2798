"""Outputs of one request for asyncio, as an asynchronous generator has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from headstart.engine.outputs import ShownOutputs
from headstart.frontend.streams.mailbox import AsyncMailbox
from headstart.frontend.vllm_api.signatures import OfOneProcess

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import ChatRequests
    from headstart.frontend.streams.async_driver import AsyncDriver

__all__ = ["AsyncRequestStream"]


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
        *,
        paced: bool = False,
    ) -> None:
        """owner: is kept alive until the stream ends, since the engine ends with it.

        paced: tokens that come soon after others may be told with them; see `AsyncMailbox`.
        """
        self._owner = owner
        self._paced = paced
        self._driver = driver
        self._chats = chats
        self._prepare: Callable[[], Awaitable[RequestGroup]] | None = prepare  # until it is called
        self._group: RequestGroup | None = None
        self._ended = self._is_read = False
        self._failure: Exception | None = None  # which ended it, and was not told

    # `OfOneProcess` says in words of ours that a property cannot be set. Here is none, and two
    # attributes are set for each output: its method in Python would cost the loop time for nothing.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __anext__(self) -> Coroutine[Any, Any, RequestOutput]:
        """The next output."""
        return self.asend(None)

    async def asend(self, value: None) -> RequestOutput:
        """The next output; `value` is ignored. Raises what preparing the request does.

        Raises RequestError in another event loop than that of the first output, and may be read on
        in that one.
        """
        if self._ended:
            self._stop()
        if self._group is not None:
            self._updates.require_loop()
        if self._is_read:
            raise RuntimeError("another task waits for this stream's next output")
        self._is_read = True
        try:
            if self._group is None:
                await self._begin()
            while not self._ended:
                output = await self._updates.get()
                if output.finished:
                    await self._finish(output)
                shown = self._shown.next(output)
                if shown is not None:
                    return shown
        except StopAsyncIteration:  # which came in an output's place
            pass
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_read = False
        self._stop()

    async def athrow(self, *error: Any) -> RequestOutput:
        """Cancel the request, then raise the error."""
        self._leave()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        """Cancel the request if it is unfinished."""
        self._leave()

    async def _begin(self) -> None:
        """Prepare and submit the request, unless the stream was ended meanwhile."""
        assert self._prepare is not None
        group = await self._prepare()
        if self._ended:
            return
        self._shown = ShownOutputs(group.params.output_kind)
        self._updates = AsyncMailbox(self._driver, group, paced=self._paced)
        self._group = group  # last: from here on there is something to cancel
        every_step = self._shown.wants_every_step
        self._driver.submit(group, self._updates.receive, every_step=every_step)

    async def _finish(self, output: RequestOutput) -> None:
        """The last output has come; a chat is remembered before it is told."""
        self._end()
        group = self._group
        assert group is not None
        if group.chat is not None:
            await asyncio.to_thread(self._chats.remember, group, output)

    def fail(self, error: Exception) -> None:
        """Cancel the request if it is unfinished; the next output that is asked for is this error.

        For the event loop that reads it, as when its time is over.
        """
        if not self._ended:
            self._failure = error
            self._leave()

    def _stop(self) -> NoReturn:
        failure, self._failure = self._failure, None
        raise StopAsyncIteration if failure is None else failure

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
