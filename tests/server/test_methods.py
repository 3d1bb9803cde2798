"""Requests with `HEAD`, compression, HTTP/1.0, or an `Upgrade` header."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from contextlib import closing

import httpx
import pytest

from tests.server.running import Running

GET_PATHS = ("/", "/docs", "/openapi.json", "/page/page.css", "/health", "/ready", "/v1/models")
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("path", [*GET_PATHS, "/v1/models/tiny", "/v1/models/x", "/nothing"])
def test_head_returns_the_headers_of_get(server: Running, path: str) -> None:
    """Regression: `HEAD` had status 405, but load balancers use it for health checks."""
    with httpx.Client(base_url=server.url) as client:
        whole, head = client.get(path), client.head(path)
        again = client.get(path)  # on the same connection: no byte of a body was in front of it
    assert (head.status_code, head.content, again.content) == (
        whole.status_code,
        b"",
        whole.content,
    )
    own = {"date", "x-request-id", "request-id"}
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in whole.headers.items() if k not in own
    }
    assert int(head.headers["content-length"]) == len(whole.content)


@pytest.mark.parametrize("path", ["/metrics", "/cache", "/cache/advice"])
def test_head_of_a_dynamic_path_has_a_length(server: Running, path: str) -> None:
    head = httpx.head(server.url + path)
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0


def test_head_of_a_stream_ends_it(server: Running) -> None:
    """The stream would last as long as the connection."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        head = client.head("/cache/live")
        assert head.headers["content-type"].startswith("text/event-stream")
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_head_of_a_post_only_path_is_refused(server: Running, path: str) -> None:
    head = httpx.head(server.url + path)
    assert head.status_code == 405 and head.headers["allow"] == "POST" and not head.content


@pytest.mark.parametrize("encoding", ["gzip", "br", "Deflate"])
def test_a_compressed_body_is_refused_as_such(server: Running, encoding: str) -> None:
    """Regression: the error called it invalid JSON."""
    content = gzip.compress(json.dumps(BODY).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    url = server.url + "/v1/completions"
    answer = httpx.post(url, content=content, headers=headers, timeout=60)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == (
        f"the header Content-Encoding is {encoding}; allowed: none, or identity (an "
        "uncompressed body)"
    )


def test_a_body_with_identity_encoding_is_accepted(server: Running) -> None:
    headers = {"Content-Encoding": "identity"}
    answer = httpx.post(server.url + "/v1/completions", json=BODY, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def ask_for_more(to: socket.socket, protocol: str) -> bytes:
    head = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    to.sendall(f"{head}Upgrade: {protocol}\r\n{key}\r\n".encode())
    return to.recv(65_536)


@pytest.mark.parametrize(
    ("protocol", "status"), [("websocket", 400), ("WebSocket", 400), ("h2c", 200)]
)
def test_upgrades_are_declined_without_warnings(
    server: Running, logged: list[logging.LogRecord], protocol: str, status: int
) -> None:
    """Regression: two warnings were logged, one of which advised to install a library."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        answer = ask_for_more(client, protocol)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert (b"websockets are not supported" in answer) == (status == 400)
        assert ask_for_more(client, "h2c").startswith(b"HTTP/1.1 200"), "the connection goes on"
    assert not [record for record in logged if "granian" in record.name]


def spell_post(server: Running, body: bytes, *more: str, version: str = "1.1") -> bytes:
    where = httpx.URL(server.url)
    lines = [
        f"POST /v1/completions HTTP/{version}",
        f"Host: {where.host}:{where.port}",
        "Content-Type: application/json",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def exchange(server: Running, request: bytes, size: int = 1 << 20) -> bytes:
    """Send bytes, `size` at a time; return the answer until the server closes the connection."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        for start in range(0, len(request), size):
            client.sendall(request[start : start + size])
        return b"".join(iter(lambda: client.recv(65_536), b""))


PLAIN = json.dumps(BODY).encode()
IN_CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (PLAIN[:5], PLAIN[5:])) + b"0\r\n\r\n"
BODIES = [(f"Content-Length: {len(PLAIN)}", PLAIN), ("Transfer-Encoding: chunked", IN_CHUNKS)]
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["bytes", "parts", "whole"])
@pytest.mark.parametrize(("length", "body"), BODIES, ids=["length", "chunks"])
def test_a_body_after_an_offer_of_http_2_is_read(
    server: Running, length: str, body: bytes, size: int
) -> None:
    """Regression: the body of Java's HttpClient, which offers HTTP/2, was reported as missing."""
    requests = spell_post(server, body, *H2C, length) * 2
    requests += spell_post(server, body, "Connection: close, Upgrade", "Upgrade: h2c", length)
    answer = exchange(server, requests, size)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"text_completion") == 3, answer


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_is_answered_without_chunks(server: Running, stream: bool) -> None:
    """Regression: sizes of chunks, which HTTP/1.0 does not have, appeared between the events."""
    body = json.dumps({**BODY, "stream": stream}).encode()
    request = spell_post(server, body, f"Content-Length: {len(body)}", version="1.0")
    head, _, content = exchange(server, request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and b"transfer-encoding" not in head.lower()
    if stream:
        assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(content)["object"] == "text_completion"
