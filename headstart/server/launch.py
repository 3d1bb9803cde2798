"""The HTTP server: it listens for an application, and shuts down gracefully.

Granian calls the application in the running event loop. Its Rust threads read requests and send
answers without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.net import SocketHolder  # type: ignore[attr-defined]
from granian.server.embed import Server
from uvloop import new_event_loop as new_event_loop

from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import ConfigError, HeadstartError
from headstart.server.app import create_app as create_app
from headstart.server.app import create_speech_app as create_speech_app
from headstart.server.monitoring.logs import open_tracer as open_tracer
from headstart.server.monitoring.logs import set_up_logs
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService
from headstart.server.tenants import open_tenants as open_tenants

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM

Prefix = str | list[int]
_LOG = logging.getLogger("headstart.server")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HEAD_SECONDS = 75
"""Seconds from the end of an answer until the head of the next request must have arrived.

Clients close idle connections earlier (httpx after 5 s, aiohttp after 15 s). If the server closed
them first, a request sent at that moment would fail with "connection reset".
"""
_BUFFER = 64 << 10  # limit, in bytes, of a request's head and of an answer's unsent part
_MAX_CONNECTIONS = 1 << 16
_BACKLOG = 2048  # connections that wait to be accepted
_TICK = 0.05  # seconds between two checks
_ERROR_SECONDS = 0.5  # seconds for clients to read the error that ends their answers
_CLOSE_SECONDS = 5.0  # seconds for requests that hold no slot, such as a metrics scrape


def listen(options: ServerOptions) -> socket.socket:
    """Return a socket that is bound to the server's address and does not listen yet.

    Raises ConfigError if the address or the certificate cannot be used.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        certificate, key = options.tls_cert, options.tls_key
        for path in (certificate, key):
            if not os.path.isfile(path):
                raise ConfigError(f"there is no file {path!r}, which is set as tls_cert or tls_key")
        try:
            # The empty password prevents OpenSSL's prompt if the key is encrypted.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert {certificate!r} and tls_key {key!r} cannot be used: {error}"
            ) from error
    try:
        info = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        if options.port:  # check that it is free, as SO_REUSEPORT lets servers share a port
            socket.create_server(info[4][:2], family=info[0]).close()
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        # SO_REUSEPORT allows a restart while the system still closes a killed server's connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # SO_REUSEADDR allows binding while connections of an earlier server are in TIME_WAIT. It is
        # then switched off until this server listens, so that no other server can bind the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # ends connections that leave an answer unread
            milliseconds = round(options.request_timeout * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(info[4])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, UnicodeError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            text = "another program listens there; choose another port with --port N"
        raise ConfigError(
            f"the server cannot listen on host {options.host!r}, port {options.port}: {text}"
        ) from error
    return listener


class _Granian(Server):
    """Granian on the socket `listener`."""

    listener: socket.socket

    def _init_shared_socket(self) -> None:
        backlog = (_BACKLOG,) if sys.platform == "linux" else ()
        file = self.listener.dup().detach()
        self._shd = SocketHolder(file, False, *backlog)  # type: ignore[call-arg, assignment]


class HttpServer:
    """Granian for one application, in the running event loop."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        options: ServerOptions = app.state.service.options
        host, port = listener.getsockname()[:2]
        self._server = _Granian(
            app,
            host,
            port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backpressure=_MAX_CONNECTIONS,
            http1_settings=HTTP1Settings(_HEAD_SECONDS * 1000, max_buffer_size=_BUFFER),
            log_enabled=False,
            ssl_cert=Path(options.tls_cert) if options.tls_cert else None,
            ssl_key=Path(options.tls_key) if options.tls_key else None,
            ssl_protocol_min=SSLProtocols.tls12,
        )
        self._server.listener = listener

    async def start(self) -> None:
        self._server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server.listener.listen(_BACKLOG)
        self._task = asyncio.create_task(self._server.serve())
        await asyncio.sleep(0)  # Granian starts in one iteration of the loop
        if self._task.done():
            self._task.result()  # raises the reason

    async def stop(self, seconds: float) -> None:
        """Stop listening. Running requests have `seconds` to end."""
        self._server.listener.close()
        self._server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait([self._task], timeout=seconds)
        self._task.cancel()


def read_prefixes(files: Sequence[str]) -> dict[str, Prefix]:
    """Return the prefix in each file: token ids from a `.json` file, text from any other.

    A newline at the end of text is left out: editors add it. Raises ConfigError.
    """
    prefixes: dict[str, Prefix] = {}
    for name in files:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"public_prefix {name!r} cannot be read: {error}") from error
        prefixes[name] = text.removesuffix("\n").removesuffix("\r")
        if name.endswith(".json"):
            try:
                prefixes[name] = msgspec.json.decode(text, type=list[int])
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"public_prefix {name!r} is not a list of token ids in JSON: {error}"
                ) from error
    return prefixes


def publish(llm: AsyncLLM, prefixes: Mapping[str, Prefix]) -> None:
    """Let tenants share the prefixes. Raises ConfigError for a prefix shorter than a block."""
    for name, prefix in prefixes.items():
        try:
            count = llm.publish(prefix)
        except HeadstartError as error:
            raise ConfigError(f"public_prefix {name!r} cannot be used: {error}") from error
        if not count:
            raise ConfigError(
                f"public_prefix {name!r} is shorter than a block; allowed: at least "
                f"{llm.block_size} tokens"
            )


def serve(app: FastAPI, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is called once connections are accepted.

    app: from `create_app`. After a signal no request is accepted, and running requests have
    `drain_seconds` to end. A second signal ends them, and a third kills the process. The caller
    closes the engine.
    """
    set_up_logs(app.state.service.options.log_format)
    shutdown = _Shutdown(app.state.service)
    before = {kind: signal.signal(kind, shutdown.handle_signal) for kind in _SIGNALS}

    async def run() -> None:
        server = HttpServer(app, listener)
        await server.start()
        shutdown.loop = asyncio.get_running_loop()
        ready()
        await shutdown.drain()
        await server.stop(_ERROR_SECONDS if shutdown.is_forced else _CLOSE_SECONDS)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.get_loop().set_default_executor(TenantQueue("headstart-server"))
            runner.run(run())
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Shutdown:
    """The shutdown of a server, which continues to listen while its calls end.

    serves ──signal──▶ drains: new calls are refused, /ready is 503 ──▶ closed
                         └──no call is left, drain time is over, or second signal──┘
    """

    def __init__(self, service: BaseService[Any, Any]) -> None:
        self._service = service
        self.is_forced = False
        self.loop: asyncio.AbstractEventLoop | None = None  # set when the server listens

    def handle_signal(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end the requests at the second; a third kills the process."""
        self.is_forced = self._service.is_draining
        self._service.is_draining = True
        if self.is_forced:
            for kind in _SIGNALS:
                signal.signal(kind, signal.SIG_DFL)
        elif self.loop is not None:  # log in the loop: the handler may have interrupted a log call
            self.loop.call_soon_threadsafe(self._log_wait)

    def _log_wait(self) -> None:
        seconds, running = self._service.options.drain_seconds, self._service.calls.num_slots
        if seconds and running:
            requests = "1 request" if running == 1 else f"{running} requests"
            _LOG.info("waiting up to %g s for %s; Ctrl-C again stops now", seconds, requests)

    async def drain(self) -> None:
        """Wait for a signal, and then for the calls to end."""
        service = self._service
        while not service.is_draining:
            await asyncio.sleep(_TICK)
        deadline = time.monotonic() + service.options.drain_seconds
        while service.calls.num_slots and not self.is_forced and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
        self.is_forced = self.is_forced or service.calls.num_slots > 0
        service.cut_off()
        deadline = time.monotonic() + _ERROR_SECONDS
        while service.calls.num_slots and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
