"""Updates of requests on their way from the engine's thread to whoever reads them."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.driver import Driver, Update
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.streams.async_driver import AsyncDriver

__all__ = ["PACE", "AsyncMailbox", "Mailbox"]

PACE = 0.005  # seconds between two looks at what may wait, at least
_PACE_OF_EACH = 0.002  # for each reader: an HTTP server works a twentieth of that on its event
_LONGEST_PACE = 0.064
_PATIENCE = 1.0  # seconds between two looks at whether the engine has anything to tell
_MOST_UPDATES = 256  # in one mailbox; each has all the text so far, so one more can be left out


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

    def __init__(self, driver: AsyncDriver, group: RequestGroup, *, paced: bool = False) -> None:
        """paced: updates between the first and the last may come a little later, several as one.

        At most by `PACE`, or with many readers `_PACE_OF_EACH` for each, up to `_LONGEST_PACE`.
        """
        self._driver = driver
        self._group = group
        self.paced = paced
        self._loop = asyncio.get_running_loop()
        self._post = _POSTS.get(self._loop) or _POSTS.setdefault(self._loop, _Post(self._loop))
        self._updates: deque[Update] = deque()
        self._late: deque[Update] = deque(maxlen=1)  # the newest that may wait; not yet handed out
        self.is_posted = (
            False  # among the post's late ones: set by who adds it, reset before taking
        )
        self._num_sent = self._num_read = 0
        self._is_over = False  # the last was sent
        self._waiter: asyncio.Future[None] | None = None  # done once there may be something to tell
        self._timer: asyncio.TimerHandle | None = None

    def receive(self, update: Update) -> None:
        """A `Receiver`. Raises RuntimeError when the loop was closed.

        Counts what is on its way as well: a loop that is busy takes nothing in.
        """
        is_last = _is_last(update)
        if self.paced and self._num_sent > 0 and not is_last:
            if not self._is_over:
                self._late.append(update)
                self._post.send_late(self)
        elif is_last or self._num_sent - self._num_read < _MOST_UPDATES:
            self._num_sent += 1
            self._is_over = is_last
            self._post.send(self, update)

    def take_in(self, update: Update) -> None:
        """An update has come; called by the loop."""
        if _is_last(update):  # an error does not take the place of what came before
            self.take_late()
        self._append(update)

    def take_late(self) -> None:
        """What could wait is told now; called by the loop."""
        self.is_posted = False  # before: what comes from now on is posted, taken along here or not
        if self._late:
            self._append(self._late.pop())

    def _append(self, update: Update) -> None:
        may_replace = self.paced and not isinstance(update, BaseException)
        if may_replace and self._updates and not _is_last(self._updates[-1]):
            self._updates.pop()  # nobody has read it, and the new one has all that it says
        self._updates.append(update)
        self._wake()

    def require_loop(self) -> None:
        """Raise RequestError in the tasks of another loop, which nobody would wake."""
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "the stream was begun in another event loop; allowed: read one stream in one loop, "
                "or use `LLM.stream`, which needs none"
            )

    async def get(self) -> RequestOutput:
        """As `Mailbox.get`. One timer serves many waits."""
        reason = None
        while not self._updates:
            self._waiter = self._loop.create_future()
            if self._timer is None:
                self._timer = self._loop.call_later(_PATIENCE, _look_again, weakref.ref(self))
            try:
                with self._driver.awaited():
                    await self._waiter
            finally:
                self._waiter = None
            if not self._updates:
                if reason is not None:  # since before the last wait: nothing was on its way
                    raise reason
                reason = self._driver.explain_silence([self._group])
        self._num_read += 1
        return _open(self._updates.popleft())

    def look(self) -> None:
        """Somebody has waited for `_PATIENCE`; called by the loop."""
        self._timer = None
        self._post.look_again()
        self.take_late()  # which an interrupted `send_late` may not have posted
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _look_again(mailbox: weakref.ref[AsyncMailbox]) -> None:
    found = mailbox()
    if found is not None:
        found.look()


class _Post:
    """Updates on their way to the mailboxes of one event loop, from the threads of engines.

    One call wakes the loop for all that came since it last looked: a call for each token of each
    request is a system call in the engine's thread, which lets go of the interpreter's lock for it.
    For what may wait the loop looks by itself, as long as there is something every `PACE`: a call
    between two looks hands out only what it was made for.

        nothing comes ──send: a call──▶ handed out ──after PACE, if something came──▶ handed out
              ▲                             └────after PACE, if nothing came────▶ nothing comes
              └─────────────────────────────────────────────────────────────────────────┘
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[AsyncMailbox, Update]] = deque()
        self._late: deque[AsyncMailbox] = deque()  # which have something that may wait
        self._is_called = False  # the loop was asked to hand out, and has not begun
        self._looks = False  # the loop looks again by itself
        self._next_look: asyncio.TimerHandle | None = None  # the one that is due, or was

    def send(self, mailbox: AsyncMailbox, update: Update) -> None:
        """From any thread. Raises RuntimeError when the loop was closed."""
        self._letters.append((mailbox, update))  # first: who hands out looks at the flags before
        self._call(will_come=self._is_called)

    def send_late(self, mailbox: AsyncMailbox) -> None:
        """As `send`, of what waits in the mailbox, which stands here once whatever comes."""
        if not mailbox.is_posted:
            mailbox.is_posted = True
            self._late.append(mailbox)
        self._call(will_come=self._is_called or self._looks)

    def _call(self, *, will_come: bool) -> None:
        if not will_come or self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self.hand_out)

    def hand_out(self) -> None:
        """All that has come, but for what a look is due for; called by the loop."""
        self._is_called = False
        paced = set()
        while self._letters:
            mailbox, update = self._letters.popleft()
            mailbox.take_in(update)
            if mailbox.paced:
                paced.add(mailbox)
        while self._late and not self._looks:
            mailbox = self._late.popleft()
            mailbox.take_late()
            paced.add(mailbox)
        if paced and not self._looks:
            self._looks = True
            pause = max(PACE, min(_PACE_OF_EACH * len(paced), _LONGEST_PACE))
            self._next_look = self._loop.call_later(pause, self.look_again)

    def look_again(self) -> None:
        """After a while, or where one waits so long that a look may have been lost."""
        if self._next_look is not None:
            self._next_look.cancel()  # or each who waits long would begin looks beside those
            self._next_look = None
        self._looks = False
        self.hand_out()


# Each as long as it has a mailbox.
_POSTS: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Post] = (
    weakref.WeakValueDictionary()
)


def _is_last(update: Update) -> bool:
    return isinstance(update, BaseException) or update.finished


def _open(update: Update) -> RequestOutput:
    if isinstance(update, BaseException):
        raise update
    return update
