"""The middleware of all requests: id, tenant, limits, errors, and log line."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server.errors import ApiError, JsonResponse, as_api_error, as_route_error, body_of
from headstart.server.monitoring.logs import LogLine, log_request
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService, random_id, stopped, time_limit
from headstart.validation import shorten

# Paths that need no key: probes, the API's description, and the page, which prompts for a key.
OPEN_PATHS = re.compile(r"/|/health|/ready|/docs|/openapi\.json|/page/.*", re.DOTALL)
# Paths that show or change data of other tenants. Routes ignore a line feed after a path, so this
# pattern does too.
_FOR_ADMINS = re.compile(r"/(metrics|cache)(?!/(advice|explain|prewarm)\Z).*", re.DOTALL)
_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
_ID = re.compile(rb"[\w.-]{1,128}", re.ASCII)
_TRACE = (b"traceparent", b"tracestate")  # W3C's trace context
_PART = 64 << 10  # bytes of a body per send
_GRACE = 5.0  # seconds after the deadline in which an answer can report the timeout


class RequestMiddleware:
    """Middleware that gives each request an id, checks its key and size, and handles exceptions.

    A client may choose the id in the header `X-Request-Id`. The answer returns it in the header
    `x-request-id`, as OpenAI does, and in `request-id`, as Anthropic does. A `POST` takes a slot
    (see `Calls`), unless only administrators may send it.
    """

    def __init__(self, app: ASGIApp, service: BaseService[Any, Any]) -> None:
        self._app = app
        self._service = service
        self._max_bytes = service.options.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        with log_request(scope) as line:
            await self._answer(scope, receive, send, line)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, line: LogLine) -> None:
        headers = dict(scope["headers"])
        requested = headers.get(b"x-request-id", b"")
        request_id = requested.decode() if _ID.fullmatch(requested) else random_id()
        state = scope["state"]
        state["request_id"] = request_id
        added = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                if "ignored" in state:  # see `report_hosted`
                    added.append((b"x-headstart-ignored", state["ignored"].encode()))
                message = {**message, "headers": [*message["headers"], *added]}
            await _send_in_parts(send, message)

        try:
            await self._pass_on(scope, headers, receive, send_with_id)
        except Exception as error:
            if isinstance(error, HTTPException):
                error = as_route_error(error, scope)
            refusal = state["error"] = as_api_error(error)
            if not line.status:  # if the answer has begun, Granian only closes the connection
                body = body_of(refusal, scope["path"], request_id)
                response = JsonResponse(body, refusal.status, refusal.headers)
                await response(scope, receive, send_with_id)

    async def _pass_on(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        path, service, state = scope["path"], self._service, scope["state"]
        num_hosts = len([name for name, value in scope["headers"] if name == b"host" and value])
        # Of several Host headers, `check_origin` would read only the last (RFC 9112, section 3.2).
        if num_hosts > 1 or (not num_hosts and scope["http_version"] not in ("1", "1.0")):
            raise ApiError(400, f"the request has {num_hosts} Host headers; allowed: one")
        if not service.tenants.requires_keys:
            check_origin(headers, service.options)
        is_open, is_for_admins = OPEN_PATHS.fullmatch(path), _FOR_ADMINS.fullmatch(path)
        if not is_open:
            state["tenant"] = service.tenants.of(headers)
            if is_for_admins and not state["tenant"].is_admin:
                raise ApiError(403, f"{path} needs a key that was made with --admin")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size[:20]) > self._max_bytes:
            raise self._too_large()
        _check_kind(scope, headers)
        receive = self._bounded(receive)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", "extensions": {}}  # Granian leaves out the body

        def too_late() -> ApiError:
            seconds = service.options.request_timeout
            return ApiError(504, f"the request took longer than {seconds:g} s")

        try:
            if scope["method"] != "POST" or is_open or is_for_admins:
                await self._app(scope, receive, send)
                return
            service.check_ready()
            with service.calls.call(state["tenant"]) as call:
                call.trace = {
                    key.decode(): headers[key].decode("latin-1") for key in _TRACE if key in headers
                }
                async with time_limit(call, _GRACE, too_late):
                    await self._app(scope, receive, send)
        except asyncio.CancelledError as error:
            if not service.is_draining:
                raise
            raise stopped() from error

    def _bounded(self, receive: Receive) -> Receive:
        """Limit the size of bodies without a Content-Length."""
        count = 0

        async def receive_bounded() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise self._too_large()
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request's body is too large; allowed: {self._max_bytes:,} bytes at most"
        )


async def _send_in_parts(send: Send, message: Message) -> None:
    """Send a body in parts, each when the connection's buffer has space.

    A large body that is sent at once would stay in the buffer after its call has released its slot.
    Then no limit would apply to the memory of such bodies.
    """
    body = message.get("body", b"")
    if len(body) > _PART:
        *starts, last = range(0, len(body), _PART)
        for start in starts:
            part = body[start : start + _PART]
            await send({"type": message["type"], "body": part, "more_body": True})
        message = {**message, "body": body[last:]}
    await send(message)


def _check_kind(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Refuse a websocket, and a body that is compressed or not declared to be JSON."""
    if headers.get(b"upgrade", b"").lower() == b"websocket":
        raise ApiError(400, "websockets are not supported; use an HTTP event stream")
    if scope["method"] != "POST":
        return
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    size, kind = headers.get(b"content-length"), headers.get(b"content-type", b"").decode("latin-1")
    has_body = b"transfer-encoding" in headers if size is None else size != b"0"
    is_plain = encoding.lower() == "identity"
    if is_plain and (not has_body or _JSON.match(kind)):
        return
    if all(route.matches(scope)[0] is Match.NONE for route in scope["app"].routes):
        return  # the error for an unknown path is more helpful
    if not is_plain:
        text = f"the header Content-Encoding is {shorten(encoding)}; allowed: none, or identity"
        raise ApiError(415, f"{text} (an uncompressed body)")
    fault = f"is {shorten(kind)}" if kind else "is missing"
    raise ApiError(400, f"the header Content-Type {fault}; send Content-Type: application/json")


def check_origin(headers: Mapping[bytes, bytes], options: ServerOptions) -> None:
    """Raise ApiError (403) for a foreign host name or a page of another site.

    A page of another site can send requests to this machine. If the site's host name resolves to
    127.0.0.1, the page can even read the answers (DNS rebinding). So without keys the header `Host`
    must name this machine. The header `Origin`, which browsers send, must name this server or a
    site that `--cors-origin` allows. Source: the Fetch standard, section 3.1.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    name = ""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
    is_local = name == "localhost" or name.endswith(".localhost") or name == options.host
    if host and not is_local:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            text = f"the host {host!r} is not known; allowed: an IP address, or localhost"
            raise ApiError(403, text) from None
    origin = headers.get(b"origin", b"").decode("latin-1")
    allowed = [entry.strip() for entry in (options.cors_origin or "").split(",")]
    origin_host = ""
    with suppress(ValueError):
        origin_host = urlsplit(origin).netloc
    if origin and origin not in allowed and "*" not in allowed and origin_host != host:
        text = f"requests from pages of {origin!r} are refused; --cors-origin can allow them"
        raise ApiError(403, text)
