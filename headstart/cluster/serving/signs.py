"""Signs of life of servers: Ray does not end the calls of a process that was killed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headstart.cluster.serving.ray_errors import read_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["LiveServers", "sign_life"]

_EVERY = 30.0  # seconds from one sign to the next
_SILENCE = 120.0  # seconds without a sign until a server counts as dead
_LOG = logging.getLogger("headstart.server")


async def sign_life(handle: DeploymentHandle, server: str) -> None:
    """Tell every replica again and again that a server lives."""
    while True:
        await asyncio.sleep(_EVERY)
        try:
            call = handle.broadcast("hear", server)
            await asyncio.wait_for(call.results_async(return_exceptions=True), _EVERY)
        except Exception as error:  # a replica hangs, or none runs
            _LOG.info("a sign of life was not heard by all: %s", read_error(error))


class LiveServers:
    """When a replica last heard of each server; `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}

    def hear(self, server: str) -> None:
        """It lives: it said so, or asks for something."""
        self._heard[server] = self._clock()

    def take_silent(self) -> list[str]:
        """Those that have been silent for too long; they are forgotten."""
        before = self._clock() - _SILENCE
        silent = [server for server, heard in self._heard.items() if heard < before]
        for server in silent:
            del self._heard[server]
        return silent
