"""Tells whoever follows a replica what its cache holds, while requests change it.

    engine's thread   take events ──▶ batch         after a first token, and every `_PAUSE` seconds
    event loop        batch ──▶ each follower's queue ──▶ a stream of Ray Serve's

A follower that reads too slowly loses a batch; the numbers of batches show it the gap, and it
follows anew, which begins with a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING

from headstart.cache import AllBlocksCleared, CacheEvent
from headstart.cluster.events import EventBatch, EventPublisher
from headstart.cluster.serving.messages import Report
from headstart.engine.startup.observed import ObservedManager
from headstart.engine.vllm_api.metrics import read_metrics
from headstart.errors import EngineError

if TYPE_CHECKING:
    from headstart.engine.async_llm import AsyncLLM

__all__ = ["CachePublisher"]

_PAUSE = 0.05  # seconds from one batch to the next while requests run
_MOST_QUEUED = 256  # reports that wait for one follower


class CachePublisher:
    """The events of one engine, for the tasks of one event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        # The replica's number is the follower's to choose; the epoch tells starts apart.
        self._events = EventPublisher(replica=0, epoch=time.time_ns())
        self._followers: set[asyncio.Queue[Report]] = set()
        self._num_running = 0
        self._is_busy = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A request is under way, which may change the cache."""
        self._num_running += 1
        self._wake()

    def end(self) -> None:
        """It is not any more."""
        self._num_running -= 1
        self._wake()

    def _wake(self) -> None:
        self._is_busy.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._publish_on())

    async def publish(self) -> None:
        """Tell all followers what changed. Raises EngineError when the engine is closed."""
        self._tell(await self._llm.call(self._read))

    async def publish_reset(self) -> None:
        """Tell all followers that nothing is cached. Raises EngineError as `publish`.

        The manager's own event of it may wait for the next step, when the tiers take it.
        """
        self._tell(await self._llm.call(lambda: self._read(AllBlocksCleared())))

    def _tell(self, report: Report) -> None:
        for queue in self._followers:
            if not queue.full():
                queue.put_nowait(report)

    async def follow(self) -> AsyncGenerator[Report]:
        """What is cached, and then all that changes. Ends when the engine does."""
        queue: asyncio.Queue[Report] = asyncio.Queue(_MOST_QUEUED)
        self._followers.add(queue)  # first: what comes meanwhile is newer than the snapshot
        try:
            yield await self._llm.call(self._read_all)
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)

    async def _publish_on(self) -> None:
        with suppress(EngineError):  # the engine is closed, which its health check says
            while True:
                await self._is_busy.wait()
                if not self._num_running:
                    self._is_busy.clear()
                await self.publish()
                await asyncio.sleep(_PAUSE)

    # In the engine's thread

    def _read(self, *more: CacheEvent) -> Report:
        return Report(self._take_batch(*more), read_metrics(self._llm.engine))

    def _read_all(self) -> Report:
        """A snapshot is as of the last batch that all followers were sent."""
        return Report(self._events.snapshot(), read_metrics(self._llm.engine))

    def _take_batch(self, *more: CacheEvent) -> EventBatch | None:
        manager = self._llm.engine.manager
        assert isinstance(manager, ObservedManager)
        if self._llm.engine.tiers is None:  # nobody else takes them
            manager.take_events()
        return self._events.publish([*manager.take_observed(), *more])
