"""Signs of life: of servers to replicas, and of its own Ray to a server.

    server    sign_life ──▶ every replica, four times in what these allow
    replica   LiveServers: who gave no sign for so long is dead
    server    watch_ray: who takes no connection is dead

Ray does not end the calls of a process that was killed: the replica does that for a dead server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headstart.cluster.serving.ray_errors import read_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["SILENCE", "LiveServers", "knock", "sign_life", "watch_ray"]

SILENCE = 120.0
"""Seconds without a sign until a server counts as dead."""
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


class LiveServers:
    """When a replica last heard of each server; `clock` tells seconds."""

    def __init__(self, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silence = silence
        self._clock = clock
        self._heard: dict[str, float] = {}

    def hear(self, server: str) -> None:
        """It lives: it said so, or asks for something."""
        self._heard[server] = self._clock()

    def take_silent(self) -> list[str]:
        """Those that have been silent for more than `silence` seconds; they are forgotten."""
        before = self._clock() - self.silence
        silent = [server for server, heard in self._heard.items() if heard < before]
        for server in silent:
            del self._heard[server]
        return silent


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
