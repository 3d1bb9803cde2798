"""What happens to every request before an API sees it: its id, whose it is, its greatest size."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server.errors import ApiError, JsonResponse, body_of
from headstart.server.tenants import Tenants

__all__ = ["Frontdoor"]

_PROBES = ("/health", "/ready")
_NAME = re.compile(rb"[\w.-]{1,128}", re.ASCII)


class Frontdoor:
    """Names each request; refuses those without a good key, and bodies that are too large.

    Probes (`/health`, `/ready`) need no key.

    A client may name its request itself in the header `X-Request-Id`; the answer has the name in
    the header of both OpenAI's and Anthropic's spelling.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, max_bytes: int) -> None:
        self._app = app
        self._tenants = tenants
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _NAME.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = name
        told = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        try:
            if scope["path"] not in _PROBES:
                state["tenant"] = self._tenants.of(headers)
            self._check_size(headers)
        except ApiError as error:
            response = JsonResponse(
                body_of(error, scope["path"], name),
                status_code=error.status,
                headers={"WWW-Authenticate": "Bearer"} if error.status == 401 else None,
            )
            await response(scope, receive, send_named)
            return
        await self._app(scope, self._bounded(receive), send_named)

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
