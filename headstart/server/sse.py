"""Server-sent events: one stream of JSON texts, as OpenAI and Anthropic frame them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["EventStream", "frame"]


def frame(data: Any, event: str | None = None) -> bytes:
    """An event; `data` is JSON, or a text that stands as it is."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    named = f"event: {event}\n" if event is not None else ""
    return f"{named}data: {text}\n\n".encode()


class EventStream(StreamingResponse):
    """A response of events. No proxy on the way may hold them back.

    When the client goes away the generator is closed at once, also while it waits for an event:
    what it holds is let go of.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            sending = asyncio.ensure_future(self.stream_response(send))
            gone = asyncio.ensure_future(self.listen_for_disconnect(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            except OSError:  # the connection broke while an event was sent
                pass
            finally:
                for future in (sending, gone):
                    future.cancel()
                await asyncio.gather(sending, gone, return_exceptions=True)
