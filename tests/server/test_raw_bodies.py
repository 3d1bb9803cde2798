"""Invalid bodies get a status and an error in OpenAI's format."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import httpx
import pytest

from headstart.server import launch
from tests.server.running import Running, running

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}

NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def body(**change: object) -> bytes:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return json.dumps(fields | change).encode()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"7", 400),
        (b"null", 400),
        (b"\xff\xfe{}", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (body()[:-1] + b', "temperature": NaN}', 400),
        (body()[:-1] + b', "temperature": 1e400}', 400),
        (body()[:-1] + b', "n": ' + b"9" * 5000 + b"}", 400),
        (body(stop=["\ud800"]), 400),
        (body(messages=[{"role": "\ud800", "content": "x"}]), 400),
        (body(messages=[{"role": "user", "content": "\ud800"}]), 400),
        (body(**{"\ud800": 1}), 400),
        (body(cache_salt="\ud800"), 400),
        (body(logit_bias={"٣": 1}), 400),
        (body(logit_bias={"9" * 5000: 1}), 400),
        (body(max_tokens=True), 400),
        (body(max_tokens="5"), 400),
        (body(no_store="true"), 400),
        (body(ignore_eos=0), 400),
        (body(n=1.5), 400),
        (body(seed=2**70), 400),
        (body(priority=2**70), 400),
        (body(response_format={"type": "json_schema"}), 400),
        (body(response_format=NO_SCHEMA), 400),
        (body(structured_outputs={}), 400),
        (body(structured_outputs={"regex": "("}), 400),
        (body(chat_template="{{ 1/0 }}"), 400),
        (body(modalities=["audio"]), 400),
        (body(chat_template_kwargs={"messages": 1}), 400),
        (body(add_generation_prompt=True, continue_final_message=True), 400),
        (body(messages=[{"role": "user", "content": [FILE]}]), 400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_body_is_refused(server: Running, content: bytes, status: int, stream: bool) -> None:
    if stream and content.endswith(b"}"):
        content = content[:-1] + b', "stream": true}'
    answer = httpx.post(server.url + CHAT, content=content, headers=JSON, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and 0 < len(error["message"]) <= 300
    blocks, free = server.pool()
    assert blocks == free


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream": 1}, "stream", "valid boolean"),
        (
            {"messages": [{"role": "sytem", "content": "Hi"}]},
            "messages[0].role",
            "'sytem'; allowed",
        ),
        ({"messages": [{"role": "user", "content": "Hi"}, 7]}, "messages[1]", "valid dictionary"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0]", "content"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ],
)
def test_an_invalid_field_is_named(
    server: Running, change: dict[str, object], param: str, message: str
) -> None:
    """Regression: booleans were coerced, and misspelled roles were accepted."""
    answer = httpx.post(server.url + CHAT, content=body(**change), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("role", ["developer", "system", "tool", "function", "ipython"])
def test_roles_of_clients_and_templates_are_accepted(server: Running, role: str) -> None:
    """A role is accepted if clients use it or the template mentions it."""
    messages = [
        {"role": role, "content": "Ben is 45."},
        {"role": "user", "content": "How old is Ben?"},
    ]
    template = "{# 'ipython' #}" + server.llm.tokenizer.chat_template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm.tokenizer, "chat_template", template)
        answer = httpx.post(server.url + CHAT, content=body(messages=messages), headers=JSON)
    assert answer.status_code == 200, answer.text


def test_explain_renders_the_prompt_of_a_chat(server: Running) -> None:
    """Regression: `/cache/explain` rendered developer messages differently, and any role."""
    results = []
    for role in ("system", "developer", "sytem"):
        messages = [{"role": role, "content": "Ben is 45."}, {"role": "user", "content": "Hi"}]
        answer = httpx.post(server.url + "/cache/explain", json={"messages": messages})
        results.append((answer.status_code, answer.json().get("prompt_tokens")))
    assert results[0] == results[1]
    assert [status for status, _ in results] == [200, 200, 400]
    blocks, free = server.pool()
    assert blocks == free


def test_invalid_json_is_reported_with_its_position(server: Running) -> None:
    """Regression: the error's position was reported as the name of a field."""
    answer = httpx.post(server.url + CHAT, content=b'{"model": "tiny",, "n": 1}', headers=JSON)
    error = answer.json()["error"]
    assert error["message"].startswith("the body is not JSON, at character 17: ")
    assert error["param"] is None


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/completions", "/cache/explain"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "jsonx", None])
def test_a_body_without_a_json_content_type_is_refused(
    server: Running, path: str, kind: str | None
) -> None:
    """Regression: the error for `curl -d` was "should be a valid dictionary"."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(server.url + path, content=body(), headers=headers, timeout=60)
    assert answer.status_code == 400
    problem = "is missing" if kind is None else f"is {kind}"
    assert answer.json()["error"]["message"] == (
        f"the header Content-Type {problem}; send Content-Type: application/json"
    )
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "application/problem+json"])
def test_other_json_content_types_are_accepted(server: Running, kind: str) -> None:
    answer = httpx.post(
        server.url + CHAT, content=body(), headers={"Content-Type": kind}, timeout=60
    )
    assert answer.status_code == 200, answer.text


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    most = server.service.options.max_request_bytes
    declared = httpx.post(server.url + CHAT, content=b" " * (most + 1), headers=JSON, timeout=60)
    assert declared.status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(most // 2**20 + 2):
            yield b" " * 2**20

    counted = httpx.post(server.url + CHAT, content=endless(), headers=JSON, timeout=60)
    assert counted.status_code == 413
    assert counted.json()["error"]["message"].startswith("the request's body is too large")


def test_a_body_may_be_as_long_as_the_limit() -> None:
    with running(max_request_bytes=1024) as server:
        for size, status in ((1024, 200), (1025, 413)):
            content = body().ljust(size)
            for chunks in (content, iter([content[:500], content[500:]])):
                answer = httpx.post(server.url + CHAT, content=chunks, headers=JSON, timeout=60)
                assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: example.com\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
    ],
)
def test_a_request_has_exactly_one_host(server: Running, head: bytes, status: int) -> None:
    """A server without keys checks the origin of a page by its host."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        client.sendall(head + b"\r\n")
        assert client.recv(12)[8:] == b" %d" % status


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


@pytest.mark.parametrize(
    "begin", [b"GET / HTTP/1.1\r\nHost: localhost\r\n", CHUNKED], ids=["head", "trailers"]
)
@pytest.mark.parametrize("line", [b"x: y\r\n", b"x"], ids=["many lines", "one long line"])
def test_an_endless_head_is_refused(server: Running, begin: bytes, line: bytes) -> None:
    """A client without a key could otherwise fill the memory, as the key is in the head."""
    where = httpx.URL(server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        client.sendall(begin)
        with pytest.raises(ConnectionError):
            for _ in range(64):
                client.sendall(line * (2**20 // len(line)))


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[Running]:
    """A server that waits one second for a head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_HEAD_SECONDS", 1)
        with running() as server:
            yield server


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def test_an_incomplete_head_times_out(impatient_server: Running) -> None:
    """A client without a key could otherwise occupy all connections forever."""
    where = httpx.URL(impatient_server.url)
    with ExitStack() as stack:
        clients = {}
        for begin in (b"", HEALTH, HEALTH + b"\r\n", HEALTH + b"\r\n" + HEALTH):
            client = stack.enter_context(socket.create_connection((where.host, where.port), 60))
            client.sendall(begin)
            clients[begin] = client
        for begin, client in clients.items():
            answer = b"".join(iter(partial(client.recv, 4096), b""))  # until it is closed
            assert answer.count(b"HTTP/1.1 200 OK") == begin.count(b"\r\n\r\n")


def test_the_timeout_of_heads_does_not_apply_to_bodies(impatient_server: Running) -> None:
    """The timeout of heads applies neither to a slow body nor to a slow answer."""
    content = body()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = head % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % len(content)
    where = httpx.URL(impatient_server.url)
    with closing(socket.create_connection((where.host, where.port), 60)) as client:
        client.sendall(head + content[:9])
        time.sleep(1.5)
        client.sendall(content[9:] + HEALTH)  # and a half request behind it
        answer = b"".join(iter(partial(client.recv, 4096), b""))
        assert answer.count(b"HTTP/1.1 200 OK") == 1 and b'"completion_tokens":1' in answer


def test_incomplete_requests_do_not_delay_others(server: Running) -> None:
    """Other requests are answered while many heads and bodies are incomplete."""
    where = httpx.URL(server.url)
    post = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post = post % CHAT.encode() + b"Content-Length: 900\r\n\r\n{"
    with ExitStack() as stack:
        for begin in [HEALTH] * 400 + [post] * 100:
            client = stack.enter_context(socket.create_connection((where.host, where.port), 60))
            client.sendall(begin)
        answer = httpx.post(server.url + CHAT, content=body(), headers=JSON, timeout=60)
        assert answer.status_code == 200, answer.text


def test_a_long_body_may_arrive_in_small_parts(server: Running) -> None:
    def parts() -> Iterator[bytes]:
        yield from (b" " for _ in range(100_000))
        yield body()

    answer = httpx.post(server.url + CHAT, content=parts(), headers=JSON, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models/nothing"])
def test_an_unknown_path_is_not_found(server: Running, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_errors_of_empty_messages_and_unknown_models_name_the_field(server: Running) -> None:
    empty = httpx.post(server.url + CHAT, json={"messages": []}).json()["error"]
    assert empty["param"] == "messages"
    nothing = httpx.get(server.url + "/v1/models/nothing").json()["error"]
    assert nothing["param"] == "model" and nothing["message"].endswith("; allowed: 'tiny'")


@pytest.mark.parametrize("kind", [JSON, {"Content-Type": "text/plain"}])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/embeddings", "there is no /v1/embeddings: only generation is supported; "),
        ("/v1/nothing", "there is no /v1/nothing: GET /docs lists the paths"),
    ],
)
def test_the_error_of_an_unknown_path_suggests_others(
    server: Running, path: str, says: str, kind: dict[str, str]
) -> None:
    answer = httpx.post(server.url + path, content=b"{}", headers=kind)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize("name", ["gpt", "\ud800", "x" * 10_000])
def test_an_unknown_model_is_not_found(server: Running, name: str) -> None:
    answer = httpx.post(server.url + CHAT, content=body(model=name), headers=JSON)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_another_method_is_refused(server: Running) -> None:
    answer = httpx.get(server.url + CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "the method is GET; allowed at this path: POST"


def test_a_request_has_the_id_that_its_client_sent(server: Running) -> None:
    mine = httpx.get(server.url + "/health", headers={"X-Request-Id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1" == mine.headers["request-id"]
    odd = httpx.get(server.url + "/health", headers={"X-Request-Id": "a b\tc"})
    assert len(odd.headers["x-request-id"]) == 32
