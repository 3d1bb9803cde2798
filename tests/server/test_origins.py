"""Without keys, only the server's pages may send requests, under names of this machine."""

from __future__ import annotations

import httpx
import pytest

from headstart.server.errors import ApiError
from headstart.server.middleware import check_origin
from headstart.server.options import ServerOptions
from tests.server.running import Running


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": "["}, False),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, False),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "origin": "https://good.example"}, True),
    ],
)
def test_allowed_origins(headers: dict[str, str], is_allowed: bool) -> None:
    options = ServerOptions(cors_origin="https://good.example")
    sent = {name.encode(): value.encode() for name, value in headers.items()}
    if is_allowed:
        check_origin(sent, options)
        return
    with pytest.raises(ApiError) as caught:
        check_origin(sent, options)
    assert caught.value.status == 403


def test_a_foreign_page_cannot_empty_the_cache(server: Running) -> None:
    foreign = {"Origin": "https://evil.example"}
    assert httpx.post(f"{server.url}/cache/reset", headers=foreign).status_code == 403
    rebound = {"Host": "evil.example"}
    assert httpx.get(f"{server.url}/cache", headers=rebound).status_code == 403
    own = {"Origin": server.url}
    assert httpx.get(f"{server.url}/cache", headers=own).status_code == 200
