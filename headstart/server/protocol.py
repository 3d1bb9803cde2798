"""HTTP as httptools reads it for uvicorn, as strictly as h11: one host, and a head that ends; and
requests behind others do not hide that their client is gone."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["BoundedProtocol"]

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
    """

    _num_unread = 0  # bytes that came since the last of a body, or a request's first
    _answered: RequestResponseCycle | None = None  # or begun to be; those behind it wait

    def data_received(self, data: bytes) -> None:
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > _MOST_BYTES and not self.transport.is_closing():
            self.logger.warning("A request's head is longer than %d bytes.", _MOST_BYTES)
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        self._num_unread = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Raises ValueError, which becomes status 400, without one host (RFC 9112, section 3.2).

        Whoever may ask is told by the host: see `origins.py`.
        """
        num_hosts = [name for name, _ in self.headers].count(b"host")
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() != "1.0"):
            raise ValueError(f"{num_hosts} hosts")
        self._num_unread = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) < _MOST_QUEUED:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)
