"""Follows the replicas that run: what their caches hold, their metrics, tokens of their answers.

Every report is a sign of life, and a replica without news sends empty ones. One that misses two is
lost until its next report comes, whatever Ray thinks of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.cluster.serving.messages import Follow, Part, Report, RequestKey
from headstart.cluster.serving.ray_errors import read_error
from headstart.cluster.serving.signs import HEARTBEAT, LastHeard

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

    from headstart.cluster.events import EventBatch
    from headstart.cluster.serving.dispatch import Dispatcher

__all__ = ["Feeds", "cancel"]

_LARGE = 1 << 14  # bytes of names: 512 blocks, which take most of a millisecond
_AGAIN = 0.5  # seconds from one beginning of a replica's feed to the next
_LOOK = 1.0  # seconds between two looks for replicas that are silent
_LOG = logging.getLogger("headstart.server")


class Feeds:
    """One task for each replica that runs. Every method is for the event loop's thread."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        dispatcher: Dispatcher,
        follower: str,
        take_progress: Callable[[RequestKey, Part], None],
        lose: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the feeds of a server.

        replicas: a handle that streams. follower: this server's name to them. lose: called with
        a replica that stopped answering. clock: returns seconds.
        """
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._follower = follower
        self._take_progress = take_progress
        self._lose = lose
        self._clock = clock
        self._heard = LastHeard(2 * HEARTBEAT, clock)
        self._looked = clock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()  # the replicas that ran when last looked
        self._told: set[str] = set()  # those of them whose processes are told
        self._is_over = False

    def end(self) -> None:
        """Begin nothing any more; whoever has the loop cancels its tasks."""
        self._is_over = True

    def match(self) -> None:
        """Follow the replicas that run, and no others."""
        if self._is_over:
            return
        running = set(self._dispatcher.replicas)
        for name in sorted(running ^ self._known):
            state = "runs" if name in running else "is gone"
            _LOG.info("replica %s %s; running: %d", name, state, len(running))
        for name in running - self._known:
            self._heard.hear(name)
        for name in self._known - running:
            self._heard.forget(name)
        self._known = running
        self._told &= running
        for name, task in self._tasks.items():
            if name not in running:
                task.cancel()  # it would keep the replica from ending
        for name in running - self._tasks.keys():
            self._tasks[name] = task = asyncio.get_running_loop().create_task(self._follow(name))
            task.add_done_callback(partial(self._drop, name))

    async def watch(self) -> None:
        """Look for silent replicas again and again."""
        while True:
            await asyncio.sleep(_LOOK)
            self.look()

    def look(self) -> None:
        """Report the replicas that have been silent for too long."""
        now = self._clock()
        if now - self._looked > HEARTBEAT:  # this process itself was stopped
            self._heard.restart()
        self._looked = now
        for name in self._heard.take_silent():
            _LOG.warning("replica %s stopped answering; its requests are moved", name)
            self._lose(name)

    def _hear(self, replica: str) -> None:
        if replica in self._known:
            self._heard.hear(replica)
            if self._dispatcher.note_heard(replica):
                _LOG.warning("replica %s answers again", replica)

    def _drop(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        # The replica may run all the same: Ray cancelled the stream, or it was back at once.
        asyncio.get_running_loop().call_later(_AGAIN, self.match)

    async def _follow(self, replica: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self._read(replica)
            except Exception as error:  # it died, which Ray Serve tells the dispatcher, or broke
                _LOG.info("replica %s is not followed: %s", replica, read_error(error))
            # A feed that breaks as soon as it begins would keep both sides busy with snapshots.
            await asyncio.sleep(begun + _AGAIN - loop.time())

    async def _read(self, replica: str) -> None:
        """Until a batch is missing: following anew begins with a snapshot."""
        stream = self._replicas.follow.remote(Follow(replica, self._follower))
        try:
            async for report in stream:
                assert isinstance(report, Report)
                self._hear(replica)
                if report.process is not None and replica not in self._told:
                    self._told.add(replica)
                    _LOG.info("replica %s is process %s", replica, report.process)
                for key, part in (report.progress or {}).items():
                    self._take_progress(key, part)
                if report.metrics is not None:
                    self._dispatcher.note_metrics(replica, report.metrics)
                if report.batch is not None and not await self._apply(replica, report.batch):
                    return
        finally:
            cancel(stream)

    async def _apply(self, replica: str, batch: EventBatch) -> bool:
        """As of the dispatcher; what takes long is no matter of this thread."""
        if batch.cleared or len(batch.stored) + len(batch.removed) > _LARGE:
            return await asyncio.to_thread(self._dispatcher.apply, replica, batch)
        return self._dispatcher.apply(replica, batch)


def cancel(stream: DeploymentResponseGenerator[Any]) -> None:
    """End a call of a replica, which may be gone."""
    with suppress(Exception):
        stream.cancel()
