"""Reports of a replica to the servers that follow it: its cache, and tokens of their requests.

    engine's thread   take events ──▶ batch         after a first token, and every `_PAUSE` seconds
    event loop        batch ──▶ each follower's queue ──▶ a stream of Ray Serve's
                      tokens ──▶ their follower's queue, every `_TOGETHER` seconds

A follower that reads too slowly loses a batch; the numbers of batches show it the gap, and it
follows again, which begins with a snapshot. Tokens wait until there is space.

Blocks of the store are reported as a separate tier: those that this engine saved or loaded, the
last `_MOST_STORED` of them. A store reports neither evictions nor what other processes save.

A message through Ray Serve takes about a millisecond of a core at either end. So the tokens of all
streams go together: one message for each token of each would limit everything.
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

_PAUSE = 0.05  # seconds between batches while requests run
_TOGETHER = 0.02  # seconds between messages of tokens
_MOST_QUEUED = 256  # reports that wait for one follower
_MOST_STORED = 1 << 18  # reported blocks of the store


class CachePublisher:
    """The reports of one engine, for the tasks of one event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        # The follower chooses the replica's number; the epoch identifies this start.
        self._events = EventPublisher(replica=0, epoch=time.time_ns())
        self._store_events = EventPublisher(replica=0, epoch=time.time_ns(), tier=DISK)
        self._stored: dict[BlockHash, None] = {}  # last seen last
        self._followers: dict[str, asyncio.Queue[Report | None]] = {}
        self._progress: dict[str, dict[RequestKey, list[Part]]] = {}  # by follower
        self._sending: asyncio.Task[None] | None = None
        self._num_running = 0
        self._is_saving = False  # as of the last look
        self._is_busy = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Note the start of a request, which may change the cache."""
        self._num_running += 1
        self._is_busy.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._publish_periodically())

    def end(self) -> None:
        """Note the end of a request."""
        self._num_running -= 1
        # No task is started here: a loop that ends closes generators after it ended all tasks.
        self._is_busy.set()

    async def publish(self) -> None:
        """Report changes to all followers. Raises EngineError when the engine is closed."""
        self._send(await self._llm.call(self._read))
        if self._llm.tiers is not None:
            self._send_stored(await self._llm.call(self._read_stored))

    async def reset(self, running: bool, tiers: bool) -> bool:
        """Reset the cache, `AsyncLLM.reset_prefix_cache`, and report it to all followers at once.

        Raises TierError as that does, and EngineError as `publish`.
        """
        report = await self._llm.call(lambda: self._reset(running, tiers))
        if report is not None:
            self._send(report)
            if tiers:
                self._send_stored(await self._llm.call(self._forget_stored))
        return report is not None

    def _send_stored(self, batch: EventBatch | None) -> None:
        if batch is not None:
            self._send(Report(batch))

    def _send(self, report: Report) -> None:
        for queue in self._followers.values():
            if not queue.full():
                queue.put_nowait(report)

    def add_progress(self, follower: str, key: RequestKey, part: Part) -> None:
        """Add tokens of a follower's request."""
        self._progress.setdefault(follower, {}).setdefault(key, []).append(part)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_progress())

    async def _send_progress(self) -> None:
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
        """Yield the cached blocks, then all changes. Ends with the engine, and by `drop`."""
        queue: asyncio.Queue[Report | None] = asyncio.Queue(_MOST_QUEUED)
        self._followers[follower] = queue  # first, so that changes after the snapshot are queued
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
        """End a follower's stream, if there is one."""
        queue = self._followers.pop(follower, None)
        if queue is not None:
            while not queue.empty():  # the end needs space
                queue.get_nowait()
            queue.put_nowait(None)

    async def _publish_periodically(self) -> None:
        with suppress(EngineError):  # the engine is closed, which its health check reports
            while True:
                await self._is_busy.wait()
                if not self._num_running:
                    self._is_busy.clear()
                await self.publish()
                await asyncio.sleep(_PAUSE)
                if self._is_saving:
                    self._is_busy.set()  # blocks that are saved then are reported, too

    # In the engine's thread

    def _read(self, *more: CacheEvent) -> Report:
        manager = self._llm.manager
        assert isinstance(manager, ObservedManager)
        if self._llm.tiers is None:  # which otherwise take them
            manager.take_events()
        batch = self._events.publish([*manager.take_observed(), *more])
        return Report(batch, self._llm.read_metrics())

    def _reset(self, running: bool, tiers: bool) -> Report | None:
        """Reset the cache; return None if nothing was forgotten.

        The manager's own event may wait until the tiers take it in the next step. Blocks stored by
        that step must not be reported before, or they would count as forgotten for good.
        """
        done = self._llm.engine.reset_prefix_cache(
            reset_running_requests=running, reset_tiers=tiers
        )
        return self._read(AllBlocksCleared()) if done else None

    def _read_all(self) -> Report:
        """Return a snapshot as of the last batch that was sent to all followers."""
        process = f"{os.getpid()} on {socket.gethostname()}"
        return Report(self._events.snapshot(), self._llm.read_metrics(), process=process)

    def _read_stored(self) -> EventBatch | None:
        """Return the store's blocks seen since the last call, which replace the oldest."""
        tiers = self._llm.tiers
        assert tiers is not None
        self._is_saving = tiers.is_saving  # first: blocks saved meanwhile are taken next time
        names = tiers.take_kept()
        for name in names:
            self._stored.pop(name, None)
            self._stored[name] = None
        oldest = list(islice(self._stored, max(0, len(self._stored) - _MOST_STORED)))
        for name in oldest:
            del self._stored[name]
        return self._store_events.publish_names(set(names).difference(oldest), oldest)

    def _forget_stored(self) -> EventBatch | None:
        self._stored.clear()
        return self._store_events.publish([AllBlocksCleared()])
