"""Bodies with mistakes: an error names the first one, by its name in the API, and parsing stops
there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError

from headstart.server import app
from headstart.server.anthropic.schema import MessagesRequest
from headstart.server.app import _ROUTERS
from headstart.server.bodies import Body
from headstart.server.cache import api as cache
from headstart.server.openai.schema import ChatCompletionRequest, CompletionRequest
from headstart.server.responses.schema import ResponsesRequest
from headstart.server.tokenize import DetokenizeRequest
from tests.server.running import Running

MANY = 1000
CHAT = [{"role": "user", "content": "a"}]
ANSWER = {"model": "tiny", "max_tokens": 1}


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all parts of a schema of pydantic-core."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list | tuple):
            yield from schemas_in(part)


def test_every_list_is_parsed_up_to_its_first_mistake() -> None:
    kinds = {
        endpoint.body
        for router in (*_ROUTERS, cache.router)
        for _, endpoint in app._find_endpoints(router)
    }
    assert len(kinds) >= 9
    count = 0
    for kind in kinds:
        for schema in schemas_in(kind.__pydantic_core_schema__):
            is_checked = schema.get("items_schema", {}).get("type", "any") != "any"
            if schema.get("type") == "list" and is_checked:
                assert schema.get("fail_fast"), (kind, schema)
                count += 1
    assert count >= 40


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, {"prompt": [["a"]] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
        (ChatCompletionRequest, {"messages": [None] * MANY}),
        (ChatCompletionRequest, {"messages": CHAT, "tools": [{}] * MANY}),
        (MessagesRequest, ANSWER | {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ResponsesRequest, {"model": "tiny", "input": [{}] * MANY}),
        (
            ResponsesRequest,
            {"model": "tiny", "input": "a", "metadata": dict.fromkeys(map(str, range(MANY)))},
        ),
        (DetokenizeRequest, {"tokens": [None] * MANY}),
    ],
)
def test_an_error_does_not_collect_every_mistake(kind: type[Body], body: dict[str, Any]) -> None:
    """Regression: collecting the mistakes of 1 MB blocked every stream for two seconds."""
    with pytest.raises(RequestValidationError) as raised:
        app._parse_body(kind, json.dumps(body).encode())
    assert 1 <= len(raised.value.errors()) <= 4


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, {"function": {"name": "a b"}}),
        ("/v1/messages", ANSWER | {"messages": CHAT}, {"input_schema": {}, "name": "a b"}),
        ("/v1/responses", {"model": "tiny", "input": "a"}, {"name": "a b"}),
        ("/cache/explain", {"messages": CHAT}, {"function": {"name": "a b"}}),
    ],
)
def test_tools_are_counted_before_they_are_created(
    server: Running, path: str, body: dict[str, Any], tool: dict[str, Any]
) -> None:
    """Regression: creating 20,000 tools blocked every stream for 57 ms. These are all invalid."""
    kind = "custom" if path == "/v1/messages" else "function"
    for count, says in ((128, "a tool has the name"), (129, "128 at most")):
        tools = [{"type": kind, **tool}] * count
        answer = httpx.post(server.url + path, json=body | {"tools": tools}, timeout=60)
        assert answer.status_code == 400 and says in answer.text


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        ("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 0}, None),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 1, "messages": CHAT, "stop_sequences": [""]},
            None,
        ),
    ],
)
def test_an_error_uses_the_apis_name_of_a_field(
    server: Running, path: str, body: dict[str, object], name: str | None
) -> None:
    """Regression: it named the field of `SamplingParams`."""
    name = name or list(body)[-1]
    error = httpx.post(server.url + path, json=body, timeout=60).json()["error"]
    assert error["message"].startswith(f"{name} ")
    assert error.get("param", name) == name
