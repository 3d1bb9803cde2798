"""Bodies with many mistakes: an error tells the first, and the others are not even looked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from headstart.server.anthropic.schema import MessageRequest
from headstart.server.app import _ROUTERS
from headstart.server.bodies import Body
from headstart.server.cache import api as cache
from headstart.server.http import endpoints
from headstart.server.openai.schema import ChatRequest, CompletionRequest
from headstart.server.responses.schema import ResponseRequest
from headstart.server.tokenize import DetokenizeRequest

MANY = 1000
CHAT = [{"role": "user", "content": "a"}]
ANSWER = {"model": "tiny", "max_tokens": 1}


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """All parts of a schema of pydantic's core."""
    if isinstance(schema, dict):
        yield schema
    for one in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(one, dict | list | tuple):
            yield from schemas_in(one)


def test_every_list_of_every_body_is_read_up_to_its_first_mistake() -> None:
    kinds = {
        endpoint.body
        for router in (*_ROUTERS, cache.router)
        for _, endpoint in endpoints._with_bodies(router)
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
        (ChatRequest, {"messages": [None] * MANY}),
        (ChatRequest, {"messages": CHAT, "tools": [{}] * MANY}),
        (MessageRequest, ANSWER | {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ResponseRequest, {"model": "tiny", "input": [{}] * MANY}),
        (
            ResponseRequest,
            {"model": "tiny", "input": "a", "metadata": dict.fromkeys(map(str, range(MANY)))},
        ),
        (DetokenizeRequest, {"tokens": [None] * MANY}),
    ],
)
def test_an_error_does_not_note_every_mistake(kind: type[Body], body: dict[str, Any]) -> None:
    """The mistakes of 1 MB were noted in two seconds, in which every stream stood still."""
    with pytest.raises(RequestValidationError) as raised:
        endpoints._read(kind, json.dumps(body).encode(), json.loads)
    assert 1 <= len(raised.value.errors()) <= 4
