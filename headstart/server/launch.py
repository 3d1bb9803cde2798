"""A server that listens: from an application to a socket, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import ConfigError
from headstart.server.app import create_app, create_speech_app
from headstart.server.http.protocol import protocol_of
from headstart.server.monitoring.logs import set_up_logs
from headstart.server.monitoring.tracing import open_tracer
from headstart.server.options import ServerOptions
from headstart.server.public_prefixes import publish, read_prefixes
from headstart.server.service import Front
from headstart.server.tenants import open_tenants

__all__ = [
    "create_app",
    "create_speech_app",
    "listen",
    "open_tenants",
    "open_tracer",
    "publish",
    "read_prefixes",
    "serve",
]

KEEP_ALIVE = 75
"""Seconds that a connection stays open between two requests.

Longer than clients keep one (httpx 5, aiohttp 15): a request that is sent on a connection which the
server is just closing fails with "connection reset".
"""


def listen(options: ServerOptions) -> socket.socket:
    """A socket at the server's address, whose connections send each write at once (TCP_NODELAY).

    asyncio asks for that only where the socket names its protocol, which `create_server` leaves
    open: an answer's head and body, or two frames of a stream, would stand 40 ms apart.

    Raises ConfigError if it cannot be had, or if the certificate for it cannot be used.
    """
    _check_tls(options)
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another program listens there; --port N takes another port" if taken else str(error)
        raise ConfigError(
            f"host {options.host!r} and port {options.port} cannot be listened on: {why}"
        ) from error
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())


def _check_tls(options: ServerOptions) -> None:
    if options.tls_cert is None or options.tls_key is None:
        return
    for path in (options.tls_cert, options.tls_key):
        if not os.path.isfile(path):
            raise ConfigError(
                f"there is no file {path!r}; allowed for tls_cert and tls_key: a file each"
            )
    try:
        # A password that is none, or an encrypted key would have OpenSSL ask for one.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except (OSError, ValueError) as error:  # of which SSLError is one
        raise ConfigError(
            f"tls_cert {options.tls_cert!r} and tls_key {options.tls_key!r} cannot be used: {error}"
        ) from error


def serve(app: FastAPI, at: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is called when the first can come.

    app: of `create_app`. After a signal nothing new is taken, and what runs has `drain_seconds` to
    end. A second signal ends it, a third kills the process. Whoever made its engine closes it.
    """
    options: ServerOptions = app.state.service.options
    set_up_logs(options.log_format)
    config = uvicorn.Config(
        app,
        http=protocol_of(options),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    server = _Server(config, app.state.service, ready)
    log = logging.getLogger("uvicorn.error")
    log.addFilter(server.is_news)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.get_loop().set_default_executor(TenantQueue("headstart-server"))
            runner.run(server.serve(sockets=[at]))
    finally:
        sys.setswitchinterval(switch)
        log.removeFilter(server.is_news)


class _Server(uvicorn.Server):
    """uvicorn's server, which goes on listening while the service drains.

    takes ──signal──▶ drains: new calls are refused, /ready is 503 ──▶ closed
                         └──nothing runs, its time is over, or a second signal──┘
    """

    def __init__(self, config: uvicorn.Config, service: Front, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._ready = ready
        self._is_cutting_off = False
        self._loop: asyncio.AbstractEventLoop | None = None  # once it listens

    def is_news(self, record: logging.LogRecord) -> bool:
        """Whether a line of uvicorn's is shown; that answers are cut off on purpose is no news."""
        return not (self._is_cutting_off and str(record.msg).startswith(_CUT_OFF))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: drain, or if that is so already end now and have the next one kill."""
        self.force_exit = self.should_exit
        self.should_exit = self._service.is_draining = True
        if self.force_exit:
            for kind in _SIGNALS:
                signal.signal(kind, signal.SIG_DFL)
        elif self._loop is not None:  # a handler itself may stand amid another line of the log
            self._loop.call_soon_threadsafe(self._tell_wait)

    def _tell_wait(self) -> None:
        seconds, running = self._service.options.drain_seconds, self._service.calls.num_places
        if seconds and running:
            requests = "1 request" if running == 1 else f"{running} requests"
            _LOG.info("waiting up to %g s for %s; Ctrl-C again stops now", seconds, requests)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self._service
        service.is_draining = True
        deadline = time.monotonic() + service.options.drain_seconds
        while service.calls.num_places and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
        self._is_cutting_off = self.force_exit or service.calls.num_places > 0
        service.cut_off()
        deadline = time.monotonic() + _LAST_WORDS
        while service.calls.num_places and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
        self.config.timeout_graceful_shutdown = 0 if self._is_cutting_off else _LAST_BYTES
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was answered by an orderly end is not raised again."""
        before = {kind: signal.signal(kind, self.handle_exit) for kind in _SIGNALS}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


_LOG = logging.getLogger("headstart.server")
_CUT_OFF = ("ASGI callable returned without completing", "Cancel %s running task(s)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TICK = 0.05  # seconds
_SWITCH = 1e-4
"""Seconds after which a thread that asks for the interpreter gets it; Python's own are 5 ms.

The engine's thread asks between any two kernels, and the event loop may be at work on a request
for a millisecond.
"""
_LAST_WORDS = 0.5  # seconds in which clients read that their answers end here
_LAST_BYTES = 5  # seconds for what is no call, such as a scrape of metrics
