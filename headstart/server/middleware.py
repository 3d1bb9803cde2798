"""What happens to every request before an API sees it: its id, and the bound on its size."""

from __future__ import annotations

import re
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server.errors import ApiError, JsonResponse, body_of

__all__ = ["Frontdoor"]

_NAME = re.compile(rb"[\w.-]{1,128}", re.ASCII)


class Frontdoor:
    """Names each request and refuses bodies that are too large.

    A client may name its request itself in the header `X-Request-Id`; the answer has the name in
    the header of both OpenAI's and Anthropic's spelling.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _NAME.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        size = headers.get(b"content-length", b"0")
        told = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        if size.isdigit() and int(size[:20]) > self._max_bytes:
            error = self._too_large()
            response = JsonResponse(body_of(error, scope["path"], name), status_code=413)
            await response(scope, receive, send_named)
            return
        await self._app(scope, self._bounded(receive), send_named)

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
