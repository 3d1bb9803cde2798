"""Answers: whole ones, and streams of server-sent events as OpenAI and Anthropic frame them.

Long answers are read and encoded in a thread, so that no stream waits for them: to read calls and
reasoning from a text takes 2 us a character, and 20 log-probabilities of a token 40 us.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.server.encoding import encode
from headstart.server.errors import JsonResponse
from headstart.server.service import ClientGone, unless_gone

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["EventStream", "Frames", "frame", "read_whole", "tell_event", "tell_whole"]

Answer = TypeVar("Answer")
_LONG = 4096  # characters of a text; a log-probability counts as one


def frame(data: Any, event: str | None = None) -> bytes:
    """Return an event; `data` is encoded as JSON unless it is a text."""
    body = data.encode() if isinstance(data, str) else encode(data)
    name = b"" if event is None else b"event: %s\n" % event.encode()
    return b"%sdata: %s\n\n" % (name, body)


class Frames:
    """Events of one stream that all begin with the same fields, which are encoded once.

    >>> Frames({"id": "a"}).frame({"choices": []})
    b'data: {"id":"a","choices":[]}\\n\\n'
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        """`head` has at least one field."""
        self._begin = encode(head)[:-1]

    def frame(self, more: Mapping[str, Any]) -> bytes:
        """Return an event with these fields, at least one, behind the first ones."""
        return b"data: %s,%s\n\n" % (self._begin, encode(more)[1:])


async def read_whole(outputs: Sequence[RequestOutput], make: Callable[[], Answer]) -> Answer:
    """Return the result of `make`, which reads these outputs; in a thread if they are long."""
    return make() if _size(outputs) <= _LONG else await asyncio.to_thread(make)


async def tell_whole(
    outputs: Sequence[RequestOutput], make: Callable[[], dict[str, Any]]
) -> Response:
    """Return the result of `make` as a response, like `read_whole`."""
    return await read_whole(outputs, lambda: JsonResponse(make()))


async def tell_event(
    output: RequestOutput, frames: Frames, make: Callable[[], dict[str, Any]]
) -> bytes:
    """Return the result of `make` as an event, like `read_whole`."""
    return await read_whole([output], lambda: frames.frame(make()))


def _size(outputs: Sequence[RequestOutput]) -> int:
    of_prompts = sum(len(one or ()) for told in outputs for one in told.prompt_logprobs or ())
    return of_prompts + sum(_size_of(answer) for told in outputs for answer in told.outputs)


def _size_of(answer: CompletionOutput) -> int:
    return len(answer.text) + sum(map(len, answer.logprobs or ()))


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
