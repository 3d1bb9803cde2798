"""A server of headstart-tiny or another model on a free port, in a thread of the tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from headstart import AsyncLLM
from headstart.engine.request import Request
from headstart.engine.tenant_queue import TenantQueue
from headstart.server.app import create_app
from headstart.server.launch import HttpServer, listen, new_event_loop
from headstart.server.options import ServerOptions
from headstart.server.service import Service

__all__ = ["Running", "listening", "running", "serving"]


class Running:
    """A running server's address, engine and application."""

    def __init__(self, url: str, llm: AsyncLLM, app: FastAPI) -> None:
        self.url = url
        self.llm = llm
        self.app = app
        self.service: Service = app.state.service

    def pool(self) -> tuple[int, int]:
        """Check the pool, and return the numbers of its blocks and free blocks."""

        def look() -> tuple[int, int]:
            manager = self.llm.engine.manager
            manager.check()
            return manager.config.num_blocks, manager.num_free_blocks

        return self.llm.driver.call(look)

    def running(self) -> list[Request]:
        """Return the requests that the engine computes."""
        return self.llm.driver.call(lambda: list(self.llm.requests[0]))


@contextmanager
def running(
    model: str | Path = "headstart-tiny",
    *,
    name: str = "tiny",
    send_buffer: int = 0,
    **options: Any,
) -> Iterator[Running]:
    """Run a server of a model; `options` are the server's and the engine's.

    send_buffer: bytes that the kernel buffers for a client that does not read.
    """
    names = set(ServerOptions.__dataclass_fields__)
    server = {k: options.pop(k) for k in list(options) if k in names}
    llm = AsyncLLM(model, **{"num_blocks": 256, "dtype": "float32", **options})
    with serving(llm, name, server, send_buffer=send_buffer) as server_of_llm:
        yield server_of_llm


@contextmanager
def serving(
    llm: AsyncLLM,
    name: str,
    server: Mapping[str, Any],
    *,
    send_buffer: int = 0,
    **app_options: Any,
) -> Iterator[Running]:
    """Run a server of a loaded model, and close both; `server` are the server's options."""
    # Without keys, even if the user of this machine has some.
    app = create_app(llm, name, ServerOptions(**{"api_keys": False, **server}), **app_options)
    with closing(llm), listening(app, send_buffer=send_buffer) as url:
        yield Running(url, llm, app)


@contextmanager
def listening(app: FastAPI, *, send_buffer: int = 0) -> Iterator[str]:
    """Serve an application in a separate thread; yield its address."""
    address = listen(replace(app.state.service.options, port=0))
    if send_buffer:
        address.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = address.getsockname()[1]
    started, stopping = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        server = HttpServer(app, address)
        await server.start()
        loops.append(asyncio.get_running_loop())
        started.set()
        await stopping.wait()
        await server.stop(1)

    def serve() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.get_loop().set_default_executor(TenantQueue("headstart-server"))
            runner.run(run())

    thread = threading.Thread(target=serve, daemon=True)
    with address:
        thread.start()
        try:
            assert started.wait(30)
            yield f"http://127.0.0.1:{port}"
        finally:
            loops[0].call_soon_threadsafe(stopping.set)
            thread.join(30)
            assert not thread.is_alive(), "the server did not stop"
