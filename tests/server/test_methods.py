"""Requests by `HEAD`, compressed, by HTTP/1.0, or with an offer of another protocol."""

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
def test_head_has_what_get_has_but_for_the_body(server: Running, path: str) -> None:
    """Load balancers ask by it whether a server lives; it was refused with status 405."""
    with httpx.Client(base_url=server.url) as client:
        told, head = client.get(path), client.head(path)
        again = client.get(path)  # on the same connection: no byte of a body was in front of it
    assert (head.status_code, head.content, again.content) == (told.status_code, b"", told.content)
    own = {"date", "x-request-id", "request-id"}
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in told.headers.items() if k not in own
    }
    assert int(head.headers["content-length"]) == len(told.content)


@pytest.mark.parametrize("path", ["/metrics", "/cache", "/cache/advice"])
def test_head_of_what_changes(server: Running, path: str) -> None:
    head = httpx.head(server.url + path)
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0


def test_head_of_a_stream_ends_it(server: Running) -> None:
    """Which would be sent as long as the client stays."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        head = client.head("/cache/live")
        assert head.headers["content-type"].startswith("text/event-stream")
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_head_of_what_is_posted(server: Running, path: str) -> None:
    head = httpx.head(server.url + path)
    assert head.status_code == 405 and head.headers["allow"] == "POST" and not head.content


@pytest.mark.parametrize("encoding", ["gzip", "br", "Deflate"])
def test_a_compressed_body_is_told_so(server: Running, encoding: str) -> None:
    """It was no JSON that can be read."""
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


def test_a_body_that_is_said_to_be_as_it_is(server: Running) -> None:
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
def test_what_would_be_more_than_http_is_answered_quietly(
    server: Running, logged: list[logging.LogRecord], protocol: str, status: int
) -> None:
    """There were two warnings in the log; one advised to install a library."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        told = ask_for_more(client, protocol)
        assert told.startswith(b"HTTP/1.1 %d" % status)
        assert (b"websockets are not supported" in told) == (status == 400)
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


def tell(server: Running, asked: bytes, size: int = 1 << 20) -> bytes:
    """Send bytes, `size` at a time; return the answer until the server closes the connection."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        for start in range(0, len(asked), size):
            client.sendall(asked[start : start + size])
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
    """Java's HttpClient offers it with each request: its body was reported as missing."""
    asked = spell_post(server, body, *H2C, length) * 2
    asked += spell_post(server, body, "Connection: close, Upgrade", "Upgrade: h2c", length)
    told = tell(server, asked, size)
    assert told.count(b"HTTP/1.1 200") == told.count(b"text_completion") == 3, told


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_is_answered_without_chunks(server: Running, stream: bool) -> None:
    """It knows none: their sizes stood between the events."""
    body = json.dumps({**BODY, "stream": stream}).encode()
    asked = spell_post(server, body, f"Content-Length: {len(body)}", version="1.0")
    head, _, told = tell(server, asked).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and b"transfer-encoding" not in head.lower()
    if stream:
        assert told.startswith(b"data: {") and told.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(told)["object"] == "text_completion"
