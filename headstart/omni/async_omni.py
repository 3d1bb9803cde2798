"""`AsyncOmni`: an `Omni` for the tasks of an event loop.

One thread makes every call of the pipeline, in the order in which the tasks ask. Whoever waits for
an answer asks for one step at a time; a step is a step of all requests, so a task whose answer
grew in another's step gets it without one of its own. Who reads nothing asks for no step.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headstart.errors import ConfigError, EngineError, HeadstartError, RequestError
from headstart.frontend.vllm_api.signatures import OfOneProcess, check_calls
from headstart.omni.members import ASYNC_OMNI
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput, OmniParams, OmniPrompt
from headstart.omni.pipeline import Progress
from headstart.validation import describe

__all__ = ["AsyncOmni", "OmniStream"]

Answer = TypeVar("Answer")


@check_calls(ConfigError)
class AsyncOmni(OfOneProcess):
    """An `Omni` whose answers are awaited; any number of tasks of any event loop may ask."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; `options` are those of `Omni`. Raises ConfigError, ModelError."""
        self.omni = Omni(model, **options)
        self._thread: threading.Thread | None = None  # the pipeline's, once it is there
        self._pool = ThreadPoolExecutor(1, "headstart-omni", self._begin_thread)
        self._grown: set[Progress] = set()  # whose answer grew since it was told
        self._dropped: deque[Progress] = deque()  # whose reader the garbage collector found
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """True until `close`."""
        return not self._is_closed

    async def start(
        self,
        prompt: OmniPrompt,
        params: OmniParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> "OmniStream":
        """Begin an answer, and return when it is known to be possible.

        Raises the errors of `Omni.generate`.
        """

        def begin() -> Progress:
            return self.omni.pipeline.submit(self.omni.prepare(prompt, params, cache_salt))

        begun = self._submit(begin)
        try:
            return OmniStream(self, await asyncio.wrap_future(begun))
        except asyncio.CancelledError:
            begun.add_done_callback(self._leave_begun)
            raise

    async def generate(
        self,
        prompt: OmniPrompt,
        params: OmniParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> OmniOutput:
        """The whole answer to one prompt. Raises the errors of `Omni.generate`."""
        async with aclosing(await self.start(prompt, params, cache_salt=cache_salt)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineError("the pipeline ended a request without an answer")

    async def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the pipeline's thread; returns or raises what it does.

        Raises EngineError after `close`, RequestError for what cannot be called.
        """
        if not callable(function):
            raise RequestError(f"function is {describe(function)}; allowed: a function")
        return await asyncio.wrap_future(self._submit(function))

    def close(self) -> None:
        """End every request with an EngineError and free the memory. May be called again.

        Waits for the step under way. Raises EngineError in the pipeline's own thread.
        """
        if threading.current_thread() is self._thread:
            raise EngineError("the pipeline cannot be closed from within one of its calls")
        if not self._is_closed:
            self._is_closed = True
            closing = self._pool.submit(self.omni.close)
            self._pool.shutdown()
            closing.result()

    def _submit(self, function: Callable[[], Answer]) -> Future[Answer]:
        def run() -> Answer:
            try:
                while self._dropped:
                    self._forget(self._dropped[0])
                    self._dropped.popleft()
                return function()
            except Exception:
                raise
            except BaseException as error:  # an event loop that awaits it would end by it
                raise EngineError(f"a stage was interrupted: {type(error).__name__}") from error

        try:
            return self._pool.submit(run)
        except RuntimeError as error:  # it was shut down
            raise EngineError("the pipeline is closed") from error

    def _leave_begun(self, begun: Future[Progress]) -> None:
        if not begun.cancelled() and begun.exception() is None:
            self.leave(begun.result())

    def ask(self, progress: Progress) -> asyncio.Future[OmniOutput | None]:
        """An answer as it grew by a step, or None; for the event loop that awaits it."""
        return asyncio.wrap_future(self._submit(lambda: self._advance(progress)))

    def leave(self, progress: Progress) -> None:
        """Nobody reads this answer any more; its request is aborted soon. From any thread."""
        with suppress(EngineError):
            self._submit(lambda: self._forget(progress))

    def drop(self, progress: Progress) -> None:
        """As `leave`, for the garbage collector: the next call aborts the request.

        It may run while its thread has the pool's lock, so it takes none.
        """
        self._dropped.append(progress)

    def __getattr__(self, name: str) -> NoReturn:
        raise ASYNC_OMNI.missing(name, dir(type(self)))

    # In the pipeline's thread

    def _begin_thread(self) -> None:
        self._thread = threading.current_thread()

    def _advance(self, progress: Progress) -> OmniOutput | None:
        """The answer if it grew, by a step of its own if by no other's; None if it did not."""
        if progress not in self._grown and progress.finish_reason is None:
            self._grown.update(self._step())
        if progress.error is not None:
            raise progress.error
        if progress not in self._grown and progress.finish_reason is None:
            return None
        self._grown.discard(progress)
        return self.omni.output(progress)

    def _step(self) -> list[Progress]:
        try:
            return self.omni.pipeline.step()
        except HeadstartError:
            raise
        except Exception as error:  # the next call ends all requests, each with such an error
            raise EngineError(f"a stage failed: {type(error).__name__}: {error}") from error

    def _forget(self, progress: Progress) -> None:
        self._grown.discard(progress)
        self.omni.pipeline.abort(progress.request.request_id)


class OmniStream(AsyncIterator[OmniOutput]):
    """One request's outputs as they come; each holds the whole answer so far.

    Closing it aborts the request. If it is garbage-collected, the next call aborts the request.
    """

    def __init__(self, owner: AsyncOmni, progress: Progress) -> None:
        self._owner = owner
        self._progress: Progress | None = progress
        self._asked: asyncio.Future[OmniOutput | None] | None = None  # while a task waits
        self._failure: Exception | None = None

    async def __anext__(self) -> OmniOutput:
        while (progress := self._progress) is not None:
            try:
                self._asked = self._owner.ask(progress)
                output = await self._asked
            except HeadstartError:
                await self.aclose()
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._failure is None or (task is not None and task.cancelling()):
                    raise
                break
            finally:
                self._asked = None
            if output is not None:
                if output.finished:
                    self._failure = None
                    await self.aclose()
                return output
        failure, self._failure = self._failure, None
        raise StopAsyncIteration if failure is None else failure

    def fail(self, error: Exception) -> None:
        """Abort the request if it is unfinished; the next output that is asked for is this error.

        For the event loop that reads it, as when its time is over. Who waits gets it at once.
        """
        progress, self._progress = self._progress, None
        if progress is not None:
            self._failure = error
            self._owner.leave(progress)
            if self._asked is not None:
                self._asked.cancel()

    async def aclose(self) -> None:
        """Abort the request if it is unfinished. May be called again."""
        progress, self._progress = self._progress, None
        if progress is not None:
            self._owner.leave(progress)

    def __del__(self) -> None:
        if self._progress is not None:
            self._owner.drop(self._progress)
