"""Signs of life: between servers and replicas, and of its own Ray to a server.

    server    sign_life ──▶ every replica, four times in what these allow
    replica   LastHeard: who gave no sign for so long is dead
    replica   with_heartbeats ──▶ every server that follows it
    server    LastHeard: a replica that missed two heartbeats gets no requests until it is heard
    server    watch_ray: who takes no connection is dead

Ray does not end the calls of a process that was killed: the replica does that for a dead server.
Nor does it end those of a replica that hangs: the server moves them to another replica.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from headstart.cluster.serving.messages import Report
from headstart.cluster.serving.ray_errors import read_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = [
    "HEARTBEAT",
    "SILENCE",
    "LastHeard",
    "knock",
    "sign_life",
    "watch_ray",
    "with_heartbeats",
]

SILENCE = 120.0
"""Seconds without a sign until a server counts as dead."""
HEARTBEAT = 9.0
"""Seconds until a replica that has nothing to report sends an empty report.

Two that are missed, and the time to the next look, are less than 20 seconds.
"""
_SIGNS = 4  # in that time
_LOOK = 2.0  # seconds from one look at Ray to the next
_PATIENCE = 5.0  # seconds that a process of Ray may take to take a connection
_LOG = logging.getLogger("headstart.server")


async def sign_life(handle: DeploymentHandle, server: str, silence: float) -> None:
    """Tell every replica again and again that a server lives; `silence` is what they allow."""
    pause = silence / _SIGNS
    while True:
        await asyncio.sleep(pause)
        try:
            call = handle.broadcast("hear", server)
            async with asyncio.timeout(pause):  # `wait_for` may lose the word that this is to end
                await call.results_async(return_exceptions=True)
        except Exception as error:  # a replica hangs, or none runs
            _LOG.info("a sign of life was not heard by all: %s", read_error(error))


class LastHeard:
    """Times at which each server, or each replica, was last heard; `clock` returns seconds."""

    def __init__(self, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silence = silence
        self._clock = clock
        self._heard: dict[str, float] = {}

    def hear(self, name: str) -> None:
        """Note a sign of life."""
        self._heard[name] = self._clock()

    def forget(self, name: str) -> None:
        """Expect no more signs of life."""
        self._heard.pop(name, None)

    def restart(self) -> None:
        """Allow all that are known the whole time again."""
        self._heard = dict.fromkeys(self._heard, self._clock())

    def take_silent(self) -> list[str]:
        """Those that have been silent for more than `silence` seconds; they are forgotten."""
        before = self._clock() - self.silence
        silent = [name for name, heard in self._heard.items() if heard < before]
        for name in silent:
            del self._heard[name]
        return silent


async def with_heartbeats(
    reports: AsyncGenerator[Report], period: float = HEARTBEAT
) -> AsyncGenerator[Report]:
    """Yield the reports, and an empty one whenever there is none for `period` seconds."""
    coming: asyncio.Future[Report] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(reports))
            done, _ = await asyncio.wait([coming], timeout=period)
            if not done:
                yield Report()
                continue
            try:
                report = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield report
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
        await reports.aclose()


def watch_ray(
    processes: Mapping[str, str], is_over: threading.Event, tell: Callable[[str], object]
) -> None:
    """Tell which of Ray's processes died, as soon as one has; until `is_over`.

    processes: `host:port` of each, by name. One that hangs still takes connections.
    """
    while not is_over.wait(_LOOK):
        for name, address in processes.items():
            try:
                knock(address)
            except ConnectionRefusedError:
                if not is_over.is_set():
                    tell(f"Ray's process {name} died, and with it the replicas")
                return
            except OSError as error:  # such as too many open files, of which it is not guilty
                _LOG.info("Ray's process %s at %s: %s", name, address, error)


def knock(address: str) -> None:
    """Raise OSError if nobody answers at `host:port`: Ray itself tries for a minute or more."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
