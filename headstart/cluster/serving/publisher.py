"""Tells the servers that follow a replica what its cache holds, and the tokens of their requests.

    engine's thread   take events ──▶ batch         after a first token, and every `_PAUSE` seconds
    event loop        batch ──▶ each follower's queue ──▶ a stream of Ray Serve's
                      tokens ──▶ that of the follower whose they are, every `_TOGETHER` seconds

A follower that reads too slowly loses a batch; the numbers of batches show it the gap, and it
follows anew, which begins with a snapshot. Tokens wait until there is room.

What the store has is told as a tier of its own: blocks that this engine saved or loaded, the last
`_MOST_STORED` of them. A store says of none that it evicted it, or that another process saved it.

A message through Ray Serve takes about a millisecond of a core at either end. So the tokens of all
streams go together: one message for each token of each would be the limit of everything.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from headstart.cache import AllBlocksCleared, BlockHash, CacheEvent
from headstart.cluster.events import DISK, EventBatch, EventPublisher
from headstart.cluster.serving.messages import Part, Report, RequestKey
from headstart.engine.parts import ObservedManager
from headstart.errors import EngineError

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM

__all__ = ["CachePublisher"]

_PAUSE = 0.05  # seconds from one batch to the next while requests run
_TOGETHER = 0.02  # seconds from one message of tokens to the next
_MOST_QUEUED = 256  # reports that wait for one follower
_MOST_STORED = 1 << 18  # blocks of the store that followers are to know


class CachePublisher:
    """The events of one engine, for the tasks of one event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        # The replica's number is the follower's to choose; the epoch tells starts apart.
        self._events = EventPublisher(replica=0, epoch=time.time_ns())
        self._store_events = EventPublisher(replica=0, epoch=time.time_ns(), tier=DISK)
        self._stored: dict[BlockHash, None] = {}  # last seen last
        self._followers: dict[str, asyncio.Queue[Report | None]] = {}
        self._progress: dict[str, dict[RequestKey, list[Part]]] = {}  # by follower
        self._telling: asyncio.Task[None] | None = None
        self._num_running = 0
        self._is_saving = False  # as of the last look
        self._is_busy = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A request is under way, which may change the cache."""
        self._num_running += 1
        self._is_busy.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._publish_on())

    def end(self) -> None:
        """It is not any more."""
        self._num_running -= 1
        # No task is begun here: an event loop that ends closes what runs after it ended all tasks.
        self._is_busy.set()

    async def publish(self) -> None:
        """Tell all followers what changed. Raises EngineError when the engine is closed."""
        self._tell(await self._llm.call(self._read))
        if self._llm.tiers is not None:
            self._tell_stored(await self._llm.call(self._read_stored))

    async def reset(self, running: bool, tiers: bool) -> bool:
        """As `AsyncLLM.reset_prefix_cache`; all followers are told at once that nothing is cached.

        Raises TierError as that does, and EngineError as `publish`.
        """
        report = await self._llm.call(lambda: self._reset(running, tiers))
        if report is not None:
            self._tell(report)
            if tiers:
                self._tell_stored(await self._llm.call(self._forget_stored))
        return report is not None

    def _tell_stored(self, batch: EventBatch | None) -> None:
        if batch is not None:
            self._tell(Report(batch))

    def _tell(self, report: Report) -> None:
        for queue in self._followers.values():
            if not queue.full():
                queue.put_nowait(report)

    def add_progress(self, follower: str, key: RequestKey, part: Part) -> None:
        """Tokens of a follower's request are there."""
        self._progress.setdefault(follower, {}).setdefault(key, []).append(part)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._tell_progress())

    async def _tell_progress(self) -> None:
        """Until there is nothing to tell."""
        while self._progress:
            for follower in list(self._progress):
                queue = self._followers.get(follower)
                if queue is not None and queue.full():
                    continue
                parts = self._progress.pop(follower)
                if queue is not None:
                    joined = {key: Part.joined(several) for key, several in parts.items()}
                    queue.put_nowait(Report(progress=joined))
            await asyncio.sleep(_TOGETHER)

    async def follow(self, follower: str) -> AsyncGenerator[Report]:
        """What is cached, and then all that changes. Ends with the engine, and by `drop`."""
        queue: asyncio.Queue[Report | None] = asyncio.Queue(_MOST_QUEUED)
        self._followers[follower] = queue  # first: what comes meanwhile is newer than the snapshot
        try:
            yield await self._llm.call(self._read_all)
            if self._llm.tiers is not None:
                yield Report(await self._llm.call(self._store_events.snapshot))
            while (report := await queue.get()) is not None:
                yield report
        finally:
            if self._followers.get(follower) is queue:
                del self._followers[follower]

    def drop(self, follower: str) -> None:
        """End what a follower is told, if it is told anything."""
        queue = self._followers.pop(follower, None)
        if queue is not None:
            while not queue.empty():  # nobody reads them, and the end needs room
                queue.get_nowait()
            queue.put_nowait(None)

    async def _publish_on(self) -> None:
        with suppress(EngineError):  # the engine is closed, which its health check says
            while True:
                await self._is_busy.wait()
                if not self._num_running:
                    self._is_busy.clear()
                await self.publish()
                await asyncio.sleep(_PAUSE)
                if self._is_saving:
                    self._is_busy.set()  # what is saved then is told, too

    # In the engine's thread

    def _read(self, *more: CacheEvent) -> Report:
        return Report(self._take_batch(*more), self._llm.read_metrics())

    def _reset(self, running: bool, tiers: bool) -> Report | None:
        """None if nothing was forgotten.

        The manager's own event of it may wait for the next step, when the tiers take it. What that
        step stores must not be told before, or it would count as forgotten for good.
        """
        done = self._llm.engine.reset_prefix_cache(
            reset_running_requests=running, reset_tiers=tiers
        )
        return self._read(AllBlocksCleared()) if done else None

    def _read_all(self) -> Report:
        """A snapshot is as of the last batch that all followers were sent."""
        process = f"{os.getpid()} on {socket.gethostname()}"
        return Report(self._events.snapshot(), self._llm.read_metrics(), process=process)

    def _take_batch(self, *more: CacheEvent) -> EventBatch | None:
        manager = self._llm.manager
        assert isinstance(manager, ObservedManager)
        if self._llm.tiers is None:  # nobody else takes them
            manager.take_events()
        return self._events.publish([*manager.take_observed(), *more])

    def _read_stored(self) -> EventBatch | None:
        """What the store was seen to have since the last call; the oldest are forgotten for it."""
        tiers = self._llm.tiers
        assert tiers is not None
        self._is_saving = tiers.is_saving  # first: what is saved meanwhile is taken next time
        kept = tiers.take_kept()
        for name in kept:
            self._stored.pop(name, None)
            self._stored[name] = None
        oldest = list(islice(self._stored, max(0, len(self._stored) - _MOST_STORED)))
        for name in oldest:
            del self._stored[name]
        return self._store_events.publish_names(set(kept).difference(oldest), oldest)

    def _forget_stored(self) -> EventBatch | None:
        self._stored.clear()
        return self._store_events.publish([AllBlocksCleared()])
