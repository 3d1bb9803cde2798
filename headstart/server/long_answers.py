"""Whole answers that are long: read and spelled in a thread, so that no stream waits for them.

To tell calls and reasoning from an answer's text takes 2 us a character, and to tell the 20
likeliest of a token 40 us: a thousand tokens would stop the event loop for several milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from headstart.server.errors import JsonResponse
from headstart.server.sse import Frames

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["read_whole", "spell", "tell_event", "tell_whole"]

Answer = TypeVar("Answer")
_LONG = 4096  # characters of a text; a log-probability counts as one
_PART = 64  # entries of a list that are spelled by one call in C, in which no other thread runs


async def read_whole(outputs: Sequence[RequestOutput], make: Callable[[], Answer]) -> Answer:
    """What `make` returns, which reads these outputs; in a thread if they are long."""
    return make() if _size(outputs) <= _LONG else await asyncio.to_thread(make)


async def tell_whole(
    outputs: Sequence[RequestOutput], make: Callable[[], dict[str, Any]]
) -> Response:
    """As `read_whole`, and the answer as JSON. What `make` returns is empty then, and so are the
    log-probabilities of the outputs."""
    if _size(outputs) <= _LONG:
        return JsonResponse(make())

    def tell() -> bytes:
        told = b"".join(spell(make()))
        for output in outputs:
            for entries in (output.prompt_logprobs, *(one.logprobs for one in output.outputs)):
                for _ in _let_go(entries or []):
                    pass
        return told

    return Response(await asyncio.to_thread(tell), media_type=JsonResponse.media_type)


async def tell_event(
    output: RequestOutput, frames: Frames, make: Callable[[], dict[str, Any]]
) -> bytes:
    """As `tell_whole`, of an event; the output keeps what it has, which other events tell, too."""
    if _size([output]) <= _LONG:
        return frames.frame(make())
    return await asyncio.to_thread(lambda: frames.place(b"".join(spell(make())).decode()))


def spell(value: Any) -> Iterator[bytes]:
    """JSON as of `JsonResponse`, part by part; of a long list what was spelled is let go of.

    >>> b"".join(spell({"a": [1, None]}))
    b'{"a":[1,null]}'
    """
    if isinstance(value, dict) and value:
        for place, (key, one) in enumerate(value.items()):
            yield f"{',' if place else '{'}{_encode(key)}:".encode()
            yield from spell(one)
        yield b"}"
    elif isinstance(value, list) and len(value) > _PART:
        for place, part in enumerate(_let_go(value)):
            yield (("," if place else "[") + _encode(part)[1:-1]).encode()
        yield b"]"
    elif isinstance(value, list) and value:
        for place, one in enumerate(value):
            yield b"," if place else b"["
            yield from spell(one)
        yield b"]"
    else:
        yield _encode(value).encode()


def _let_go(entries: list[Any]) -> Iterator[list[Any]]:
    """The parts of a list, in whose place it has None: freed at once, all would take too long."""
    for at in range(0, len(entries), _PART):
        part = entries[at : at + _PART]
        entries[at : at + _PART] = [None] * len(part)
        yield part


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _size(outputs: Sequence[RequestOutput]) -> int:
    of_prompts = sum(len(one or ()) for told in outputs for one in told.prompt_logprobs or ())
    return of_prompts + sum(_size_of(answer) for told in outputs for answer in told.outputs)


def _size_of(answer: CompletionOutput) -> int:
    return len(answer.text) + sum(map(len, answer.logprobs or ()))
