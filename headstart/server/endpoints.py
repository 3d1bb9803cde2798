"""The paths that take a body: it is read, checked and answered here, without FastAPI's layers.

FastAPI describes these paths in `/openapi.json`, and answers what is asked of them by another
method. Its way to an endpoint costs as much of the event loop as a small model's tokens do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.server.bodies import Body, decode
from headstart.server.errors import ApiError
from headstart.server.service import ClientGone

__all__ = ["Endpoints"]

_LONG = 1 << 15  # bytes of a body beyond which it is read in a thread
_MAX_VALUES = 1 << 20  # of a body: no other thread runs while so many are read, at most 0.1 s
_MAX_OBJECTS = 20_000  # and as many lists; some APIs take 0.7 µs of the event loop for each


class _Endpoint(NamedTuple):
    """What answers the requests to a path, and the kind of their bodies.

    is_optional: a request may come without a body; then it is None.
    """

    body: type[Body]
    answer: Callable[..., Awaitable[Response]]
    is_optional: bool


class Endpoints:
    """Answers a `POST` to a route whose function takes a `Body` and the request; `app` the rest.

    A path that ends in a line feed is the path without it, as for FastAPI's routes.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """Of two routes of one path the first one counts, as in FastAPI."""
        self._app = app
        self._endpoints: dict[str, _Endpoint] = {}
        for router in routers:
            for path, endpoint in _with_bodies(router):
                self._endpoints.setdefault(path, endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removesuffix("\n")
        endpoint = self._endpoints.get(path) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            data = await request.body()
            is_left_out = endpoint.is_optional and data in (b"", b"null")
            body = None if is_left_out else await _read_any(endpoint.body, data)
            response = await endpoint.answer(body=body, request=request)
        except ClientDisconnect as error:
            raise ClientGone from error
        await response(scope, receive, send)


def _with_bodies(router: APIRouter) -> Iterator[tuple[str, _Endpoint]]:
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"POST"}:
            hint = get_type_hints(route.endpoint).get("body")
            kinds = get_args(hint) or (hint,)
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, Body):
                    yield route.path, _Endpoint(kind, route.endpoint, type(None) in kinds)


async def _read_any(kind: type[Body], data: bytes) -> Body:
    """Return a body. Raises ApiError, or RequestValidationError as FastAPI does."""
    if len(data) <= _LONG:
        return _read(kind, data)
    return await asyncio.to_thread(_read, kind, data)


def _read(kind: type[Body], data: bytes) -> Body:
    if data.count(b",") > _MAX_VALUES:
        raise ApiError(400, f"the body has more than {_MAX_VALUES:,} values; allowed: so many")
    try:
        given = decode(data) if data else None
    except json.JSONDecodeError as error:
        wrong = {"type": "json_invalid", "loc": (error.pos,), "ctx": {"error": error.msg}}
        raise RequestValidationError([wrong]) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, too many digits, too many brackets
        raise ApiError(400, "the body is no JSON that can be read") from error
    for kind_of, bracket, name in ((dict, b"{", "objects"), (list, b"[", "lists")):
        if data.count(bracket) > _MAX_OBJECTS < _count(given, kind_of):
            raise ApiError(400, f"the body has more than {_MAX_OBJECTS:,} {name}; allowed: so many")
    if given is None:
        raise RequestValidationError([{"type": "missing", "loc": (), "msg": "Field required"}])
    try:
        return kind.model_validate(given, from_attributes=True)  # the words of FastAPI's errors
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(told) from error


def _count(value: Any, kind: type) -> int:
    """Return the number of objects or lists; the texts of a body may have brackets, too."""
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        count += isinstance(item, kind)
        if isinstance(item, dict | list):
            rest.extend(item.values() if isinstance(item, dict) else item)
    return count
