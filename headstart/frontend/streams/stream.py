"""Outputs of one request for a thread, as a generator has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headstart.engine.outputs import ShownOutputs
from headstart.frontend.streams.mailbox import Mailbox
from headstart.frontend.vllm_api.signatures import OfOneProcess

if TYPE_CHECKING:
    from headstart.engine.driver import Driver
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import ChatRequests

__all__ = ["OutputStream", "PromptProgress", "RequestStream", "prompt_progress"]

Output = TypeVar("Output")


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


def prompt_progress(group: RequestGroup) -> PromptProgress:
    """Return how much of a submitted request's prompt was read; may be called from any thread."""
    request = group.requests[0]
    total = len(group.prompt_token_ids)
    cached = request.num_cached_tokens
    return PromptProgress(total, min(max(request.num_read, cached), total), cached)


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
        return prompt_progress(self._group)

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
