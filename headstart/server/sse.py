"""Server-sent events: one stream of JSON texts, as OpenAI and Anthropic frame them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.server.service import ClientGone, unless_gone

__all__ = ["EventStream", "Frames", "frame"]

_encode = json.JSONEncoder(separators=(",", ":")).encode


def frame(data: Any, event: str | None = None) -> bytes:
    """An event; `data` is JSON, or a text that stands as it is."""
    text = data if isinstance(data, str) else _encode(data)
    named = f"event: {event}\n" if event is not None else ""
    return f"{named}data: {text}\n\n".encode()


class Frames:
    """Events of one stream that all begin with the same fields, which are encoded once.

    >>> Frames({"id": "a"}).frame({"choices": []})
    b'data: {"id":"a","choices":[]}\\n\\n'
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        """`head` has a field at least."""
        self._begin = f"data: {_encode(head)[:-1]},"

    def frame(self, more: Mapping[str, Any]) -> bytes:
        """An event with these fields behind the first ones, of which there is one at least."""
        return self.place(_encode(more))

    def place(self, more: str) -> bytes:
        """As `frame`, with fields that are JSON already."""
        return f"{self._begin}{more[1:]}\n\n".encode()


class EventStream(Response):
    """A response of events. No proxy on the way may hold them back.

    When the client goes away the generator is closed at once, also while it waits for an event:
    what it holds is let go of.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(ClientGone, OSError):  # of which one may come while an event is sent
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
