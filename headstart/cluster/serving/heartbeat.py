"""Heartbeats between servers and replicas, and the feeds of the replicas' reports.

    server    send_heartbeats ──▶ every replica, every quarter of `SILENCE`
    replica   Heartbeats: a server that was silent for too long is dead
    replica   with_heartbeats ──▶ every server that follows it, in its feed of reports
    server    Feeds: a replica that missed two heartbeats gets no requests until its next report
    server    watch_ray: a process of the server's Ray that accepts no connection is dead

Ray does not end the calls of a killed process, so a replica ends the calls of a dead server. Ray
does not end calls to a replica that hangs either, so the server sends these requests to other
replicas.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.cluster.serving.messages import Follow, Report, RequestDelta, RequestKey, read_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

    from headstart.cluster.events import EventBatch
    from headstart.cluster.serving.dispatch import Dispatcher

SILENCE = 120.0
"""Seconds without a heartbeat until a server counts as dead."""
HEARTBEAT = 9.0
"""Seconds until a replica without changes sends an empty report."""
_BEATS = 4  # heartbeats that a server sends in `silence` seconds
_RAY_POLL = 2.0  # seconds between checks of Ray's processes
_CONNECT_TIMEOUT = 5.0  # seconds that a process of Ray may take to accept a connection
_LARGE = 1 << 14  # bytes of block hashes; a larger batch is applied in a thread
_RESTART_PAUSE = 0.5  # seconds between two starts of a replica's feed
_SILENCE_POLL = 1.0  # seconds between two checks for silent replicas
_LOG = logging.getLogger("headstart.server")


async def send_heartbeats(handle: DeploymentHandle, server: str, silence: float) -> None:
    """Send heartbeats of a server to every replica.

    silence: seconds without a heartbeat after which replicas consider the server dead.
    """
    pause = silence / _BEATS
    while True:
        await asyncio.sleep(pause)
        try:
            call = handle.broadcast("beat", server)
            async with asyncio.timeout(pause):  # `wait_for` may lose a cancellation
                await call.results_async(return_exceptions=True)
        except Exception as error:  # a replica hangs, or no replica runs
            _LOG.info("a heartbeat did not reach every replica: %s", read_error(error))


class Heartbeats:
    """The time of the last heartbeat of each server, or of each replica.

    clock: returns seconds.
    """

    def __init__(self, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silence = silence
        self._clock = clock
        self._times: dict[str, float] = {}

    def beat(self, name: str) -> None:
        self._times[name] = self._clock()

    def forget(self, name: str) -> None:
        self._times.pop(name, None)

    def restart(self) -> None:
        """Measure the silence of all names from now on."""
        self._times = dict.fromkeys(self._times, self._clock())

    def take_silent(self) -> list[str]:
        """Return and forget the names without a heartbeat for more than `silence` seconds."""
        limit = self._clock() - self.silence
        silent = [name for name, last in self._times.items() if last < limit]
        for name in silent:
            del self._times[name]
        return silent


async def with_heartbeats(
    reports: AsyncGenerator[Report], period: float = HEARTBEAT
) -> AsyncGenerator[Report]:
    """Yield the reports, and an empty report whenever there was none for `period` seconds."""
    pending: asyncio.Future[Report | None] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(reports, None))
            if not (await asyncio.wait([pending], timeout=period))[0]:
                yield Report()
                continue
            report, pending = pending.result(), None
            if report is None:
                return
            yield report
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending
        await reports.aclose()


class Feeds:
    """Readers of the reports of running replicas, one task for each replica. Not thread-safe."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        dispatcher: Dispatcher,
        follower: str,
        take_progress: Callable[[RequestKey, RequestDelta], None],
        on_silent: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the feeds; `follow_running` starts them.

        replicas: a streaming handle. follower: the name of this server. on_silent: called with the
        name of a replica that stopped answering. clock: returns seconds.
        """
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._follower = follower
        self._take_progress = take_progress
        self._on_silent = on_silent
        self._clock = clock
        self._beats = Heartbeats(2 * HEARTBEAT, clock)
        self._last_check = clock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._names: set[str] = set()  # the replicas that ran at the last call of `follow_running`
        self._is_over = False

    def end(self) -> None:
        """Start no more feeds; the caller cancels the loop's tasks."""
        self._is_over = True

    def follow_running(self) -> None:
        """Start and stop feeds, so that exactly the running replicas are followed."""
        if self._is_over:
            return
        running = set(self._dispatcher.replicas)
        for name in sorted(running ^ self._names):
            state = "runs" if name in running else "was removed"
            _LOG.info("replica %s %s; running: %d", name, state, len(running))
        for name in running - self._names:
            self._beats.beat(name)
        for name in self._names - running:
            self._beats.forget(name)
        self._names = running
        for name, task in self._tasks.items():
            if name not in running:
                task.cancel()  # an open feed prevents the replica from ending
        for name in running - self._tasks.keys():
            self._tasks[name] = task = asyncio.get_running_loop().create_task(self._follow(name))
            task.add_done_callback(partial(self._drop, name))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_SILENCE_POLL)
            self.check_silence()

    def check_silence(self) -> None:
        """Call `on_silent` for each replica that has been silent for too long."""
        now = self._clock()
        if now - self._last_check > HEARTBEAT:  # this process itself was suspended
            self._beats.restart()
        self._last_check = now
        for name in self._beats.take_silent():
            _LOG.warning(
                "replica %s stopped answering; its requests are moved to other replicas", name
            )
            self._on_silent(name)

    def _drop(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        # Follow the replica again if it still runs.
        asyncio.get_running_loop().call_later(_RESTART_PAUSE, self.follow_running)

    async def _follow(self, replica: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            start = loop.time()
            try:
                await self._read(replica)
            except Exception as error:  # the feed broke, or the replica died
                _LOG.info("the feed of replica %s ended: %s", replica, read_error(error))
            # Each start of a feed sends a snapshot, which is expensive for both sides.
            await asyncio.sleep(start + _RESTART_PAUSE - loop.time())

    async def _read(self, replica: str) -> None:
        """Read reports until a batch is missing; the next feed begins with a snapshot."""
        stream = self._replicas.follow.remote(Follow(replica, self._follower))
        try:
            async for report in stream:
                assert isinstance(report, Report)
                if replica in self._names:
                    self._beats.beat(replica)
                    if self._dispatcher.mark_alive(replica):
                        _LOG.warning("replica %s answers again", replica)
                if report.process is not None:
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
        if batch.cleared or len(batch.stored) + len(batch.removed) > _LARGE:
            return await asyncio.to_thread(self._dispatcher.apply, replica, batch)
        return self._dispatcher.apply(replica, batch)


def cancel(stream: DeploymentResponseGenerator[Any]) -> None:
    """Cancel a call of a replica; do nothing if the call has ended."""
    with suppress(Exception):
        stream.cancel()


def watch_ray(
    processes: Mapping[str, str], is_over: threading.Event, on_death: Callable[[str], object]
) -> None:
    """Call `on_death` with a message when one of Ray's processes has died; stop at `is_over`.

    processes: `host:port` of each, by name. A process that hangs still accepts connections.
    """
    while not is_over.wait(_RAY_POLL):
        for name, address in processes.items():
            try:
                check_port(address)
            except ConnectionRefusedError:
                if not is_over.is_set():
                    on_death(f"Ray's process {name} died, and with it the replicas")
                return
            except OSError as error:  # a cause in this process, such as too many open files
                _LOG.info("Ray's process %s at %s: %s", name, address, error)


def check_port(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
