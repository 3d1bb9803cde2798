"""HTTP as httptools reads it for uvicorn, as strictly as h11: one host, and a head that ends.
Requests behind others do not hide that their client is gone, and no client leaves an answer unread
for ever. Who offers more than HTTP is answered by HTTP, and who knows no chunks is sent none."""

from __future__ import annotations

import asyncio

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstart.server.options import ServerOptions

__all__ = ["BoundedProtocol", "protocol_of"]

_MOST_BYTES = 64 << 10
"""Of a head, as with uvicorn's other reader of HTTP, beyond what its first read brings."""
_MOST_QUEUED = 8
"""Requests behind the one that is answered, up to which the connection is read."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which refuses a request without one host, ends a connection whose head
    or trailers do not end, and tells the request that is answered when its client is gone.

    httptools keeps all that it is sent of them, and anybody may send it: a head is read before the
    key that stands in it. What is sent of a body is counted where it is read (`max_request_bytes`).
    Where requests were sent behind the one that is answered, uvicorn tells the last one that the
    client is gone, and does not even read it; here the connection is read on.

    What a client does not read waits in the transport, which asks to be sent no more (beyond
    asyncio's 64 KiB). A connection where that stays so for `longest_unread` seconds is dropped, and
    so is one that is closed while something waits, as long after; to close it would keep all that
    waits until the client reads it.

    A request may offer to go on by another protocol (`Upgrade: h2c`, as Java's client does with
    each). httptools takes all that follows for that protocol's, the request's own body too: such a
    head is read again without the offer.

    A head has as long to begin as a connection is kept open between two requests, and then as long
    to end: uvicorn waits for ever for the first one, and for one of which a byte has come.
    """

    longest_unread = 600.0
    _dropping: asyncio.TimerHandle | None = None
    _awaiting_head: asyncio.TimerHandle | None = None  # closes the connection
    _num_unread = 0  # bytes that came since the last of a body, or a request's first
    _answered: RequestResponseCycle | None = None  # or begun to be; those behind it wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def _await_head(self, seconds: float | None = None) -> None:
        self._stop_awaiting_head()
        self._awaiting_head = self.loop.call_later(
            self.timeout_keep_alive if seconds is None else seconds,
            self.timeout_keep_alive_handler,
        )

    def _stop_awaiting_head(self) -> None:
        if self._awaiting_head is not None:
            self._awaiting_head.cancel()
            self._awaiting_head = None

    def data_received(self, data: bytes) -> None:
        self._num_unread += len(data)
        rest = memoryview(data)
        self._unset_keepalive_if_required()
        try:
            while len(rest):
                rest = self._read(rest)
        except HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        if self._num_unread > _MOST_BYTES and not self.transport.is_closing():
            self.logger.warning("A request's head is longer than %d bytes.", _MOST_BYTES)
            self.send_400_response("The head of the request is too long.")

    def _read(self, data: memoryview) -> memoryview:
        """Read up to an offer of another protocol; returns what follows. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            head = self._head_without_offer()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(head)
            return data[offer.args[0] :]
        return data[:0]

    def _head_without_offer(self) -> bytes:
        """The head that was read: its `Connection`, without which `Upgrade` offers nothing, says
        only whether it is to be closed."""
        named = [value for name, value in self.headers if name == b"connection"]
        closes = any(token.strip().lower() == b"close" for token in b",".join(named).split(b","))
        kept = [header for header in self.headers if header[0] != b"connection"]
        lines = [b"%s: %s\r\n" % header for header in kept]
        start = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        closing = b"connection: close\r\n" if closes else b""
        return b"".join([b"%s %s HTTP/%s\r\n" % start, *lines, closing, b"\r\n"])

    @property
    def _has_offer(self) -> bool:
        """Whether what is read now is an offer of another protocol: it will be read again."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _should_upgrade_to_ws(self) -> bool:
        return False  # also where a library for it is installed

    def on_message_begin(self) -> None:
        self._num_unread = 0
        if self._awaiting_head is not None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Raises ValueError, which becomes status 400, without one host (RFC 9112, section 3.2).

        Whoever may ask is told by the host: see `origins.py`.
        """
        if self._has_offer:
            return
        num_hosts = [name for name, _ in self.headers].count(b"host")
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() != "1.0"):
            raise ValueError(f"{num_hosts} hosts")
        self._num_unread = 0
        self._stop_awaiting_head()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _CycleWithoutChunks
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) < _MOST_QUEUED:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        else:
            self._await_head(self.longest_unread if self.cycle.more_body else None)
        super().on_response_complete()
        self._drop_if_closed()

    def on_message_complete(self) -> None:
        if self._has_offer:
            return
        super().on_message_complete()
        if self._awaiting_head is not None:
            self._await_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._drop_if_closed()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._drop_if_closed()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drop_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_drop()

    def _drop_if_closed(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._drop_later()

    def _drop_later(self) -> None:
        if self._dropping is None:
            self._dropping = self.loop.call_later(self.longest_unread, self.transport.abort)

    def _cancel_drop(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
            self._dropping = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_drop()
        self._stop_awaiting_head()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)


class _CycleWithoutChunks(RequestResponseCycle):
    """Answers HTTP/1.0, which knows no chunks: an answer of unknown length ends as its connection
    does (RFC 9112, section 6.3). uvicorn sends chunks, whose sizes would be read as text."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._has_length = b"content-length" in dict(message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def protocol_of(options: ServerOptions) -> type[BoundedProtocol]:
    """The protocol of a server with these options: what is left unread has a request's time."""
    bound = {"longest_unread": options.request_timeout}
    return type(BoundedProtocol.__name__, (BoundedProtocol,), bound)
