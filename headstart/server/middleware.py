"""What happens to every request before an API sees it: its id, whose it is, its bounds, its line
in the log."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server.calls import new_name, time_limit
from headstart.server.errors import ApiError, JsonResponse, body_of, headers_of
from headstart.server.monitoring.logs import Line, RequestLog
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService, stopped, too_late
from headstart.validation import shorten

__all__ = ["OPEN_PATHS", "RequestMiddleware", "check_origin"]

# Without a key: probes, the API's description, and the page, which asks for a key itself; all are
# the same for everybody.
OPEN_PATHS = re.compile(r"/|/health|/ready|/docs|/openapi\.json|/page/.*", re.DOTALL)
# Across tenants: what shows or changes more than the asker's own. Whatever follows: routes take a
# path that ends in a line feed for the path without it.
_FOR_ADMINS = re.compile(r"/(metrics|cache)(?!/(advice|explain|prewarm)\Z).*", re.DOTALL)
_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
_NAME = re.compile(rb"[\w.-]{1,128}", re.ASCII)
_TRACE = (b"traceparent", b"tracestate")  # W3C's trace context
_PART = 64 << 10  # bytes of a body, which asyncio keeps for a client that reads slowly
_GRACE = 5.0  # seconds in which an answer that came too late is told to be so


class RequestMiddleware:
    """Names each request; refuses one without a good key, or a place, or with too large a body.

    A client may name its request itself in the header `X-Request-Id`; the answer has the name in
    the header of both OpenAI's and Anthropic's spelling. Whatever is posted is a call: see
    `calls`; but what an administrator orders needs no place.
    """

    def __init__(self, app: ASGIApp, service: BaseService[Any, Any]) -> None:
        self._app = app
        self._service = service
        self._max_bytes = service.options.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        with RequestLog(scope) as line:
            await self._open(scope, receive, send, line)

    async def _open(self, scope: Scope, receive: Receive, send: Send, line: Line) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _NAME.fullmatch(given) else new_name()
        state = scope["state"]
        state["request_id"] = name
        told = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                if "ignored" in state:  # parts of the request without effect: see `hosted`
                    told.append((b"x-headstart-ignored", state["ignored"].encode()))
                message = {**message, "headers": [*message["headers"], *told]}
            await _send_in_parts(send, message)

        try:
            path = scope["path"]
            _check_host(scope)
            if not self._service.tenants.ask_for_keys:
                check_origin(headers, self._service.options)
            if not OPEN_PATHS.fullmatch(path):
                state["tenant"] = self._service.tenants.of(headers)
                if _FOR_ADMINS.fullmatch(path) and not state["tenant"].is_admin:
                    raise ApiError(403, f"{path} needs a key that was made with --admin")
            self._check_size(headers)
            _check_kind(scope, headers)
            await self._pass_on(scope, headers, self._bounded(receive), send_named)
        except ApiError as error:
            state["error"] = error
            if line.status:  # nothing can be said any more: the connection is closed
                return
            body = body_of(error, scope["path"], name)
            response = JsonResponse(body, status_code=error.status, headers=headers_of(error))
            await response(scope, receive, send_named)

    async def _pass_on(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        path = scope["path"]
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET", "extensions": {}}, _without_body(send)
        try:
            if (
                scope["method"] != "POST"
                or OPEN_PATHS.fullmatch(path)
                or _FOR_ADMINS.fullmatch(path)
            ):
                await self._app(scope, receive, send)
            else:
                await self._pass_on_call(scope, headers, receive, send)
        except asyncio.CancelledError as error:
            if not self._service.is_draining:
                raise
            raise stopped() from error

    async def _pass_on_call(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        self._service.check_ready()
        with self._service.calls.call(scope["state"]["tenant"]) as call:
            call.trace = {k.decode(): headers[k].decode("latin-1") for k in _TRACE if k in headers}
            async with time_limit(call, _GRACE, partial(too_late, self._service.options)):
                await self._app(scope, receive, send)

    def _check_size(self, headers: Mapping[bytes, bytes]) -> None:
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size[:20]) > self._max_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """Count what comes without a length in its header."""
        seen = 0

        async def receive_bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                # The kind that FastAPI lets through while it reads a body.
                raise HTTPException(413, str(self._too_large()))
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request's body is too large; allowed: {self._max_bytes:,} bytes at most"
        )


async def _send_in_parts(send: Send, message: Message) -> None:
    """Send no more of a body than the client's connection takes: what follows waits for it here.

    A whole answer that is handed over at once would stay in the connection's buffer when its call
    is over, as long as the client does not read it.
    """
    body = message.get("body", b"")
    if len(body) > _PART:
        *starts, last = range(0, len(body), _PART)
        for start in starts:
            part = body[start : start + _PART]
            await send({"type": message["type"], "body": part, "more_body": True})
        message = {**message, "body": body[last:]}
    await send(message)


def _without_body(send: Send) -> Send:
    """Send the head of an answer alone: who streams the rest is told that the client is gone."""
    is_complete = False

    async def send_head(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            await send(message)
        elif not is_complete:
            is_complete = True
            await send({"type": message["type"]})

    return send_head


def _check_host(scope: Scope) -> None:
    """Refuse a request without one host (RFC 9112, section 3.2): `check_origin` reads the last."""
    count = len([value for name, value in scope["headers"] if name == b"host" and value])
    if count > 1 or (not count and scope["http_version"] not in ("1", "1.0")):
        raise ApiError(400, f"the request has {count} Host headers; allowed: one")


def _check_kind(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body that is not declared to be JSON, which nothing would read as such, or that is
    compressed, and what is no HTTP."""
    if headers.get(b"upgrade", b"").lower() == b"websocket":
        raise ApiError(400, "there are no websockets here; ask by HTTP, which streams events, too")
    if scope["method"] != "POST":
        return
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    size, kind = headers.get(b"content-length"), headers.get(b"content-type", b"").decode("latin-1")
    has_body = b"transfer-encoding" in headers if size is None else size != b"0"
    is_plain = encoding.lower() == "identity"
    if (is_plain and (not has_body or _JSON.match(kind))) or not _is_there(scope):
        return
    if not is_plain:
        told = f"the header Content-Encoding is {shorten(encoding)}; allowed: none, or identity"
        raise ApiError(415, f"{told}, which is a body as it is")
    said = f"is {shorten(kind)}" if kind else "is missing"
    raise ApiError(400, f"the header Content-Type {said}; send Content-Type: application/json")


def _is_there(scope: Scope) -> bool:
    """Whether any route has this path; of one that is not there, its type need not be told."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def check_origin(headers: Mapping[bytes, bytes], options: ServerOptions) -> None:
    """Raise ApiError (403) for a request by a foreign name, or from a foreign page.

    A page of another site can send requests to this machine, and by a name of its own that resolves
    to 127.0.0.1 even read the answers (DNS rebinding). So without keys the header `Host` must name
    this machine, and `Origin`, which browsers send, must be the server's own, or one that
    `--cors-origin` allows. Source: the Fetch standard, section 3.1.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    name = _name_of(f"//{host}")
    if host and name != options.host and not _is_this_machine(name):
        raise ApiError(403, f"the host {host!r} is not known; allowed: an address, or localhost")
    origin = headers.get(b"origin", b"").decode("latin-1")
    allowed = [one.strip() for one in (options.cors_origin or "").split(",")]
    if origin and origin not in allowed and "*" not in allowed and _host_of(origin) != host:
        raise ApiError(403, f"pages of {origin!r} may not ask; --cors-origin allows them")


def _is_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
