"""Requests as coding agents send them, of which other servers refuse or misread some."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.running import Running

READ = {"name": "Read", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=60)


def count(server: Running, messages: list[Any], **more: Any) -> int:
    answer = post(server, "/v1/messages/count_tokens", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def with_result(content: Any) -> list[Any]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "tool_reference", "tool_name": "Read"}, "The tool Read is available."),
        (
            {"type": "document", "title": "A", "source": PDF},
            "Document: A\n[not shown: application/pdf cannot be read by this model]",
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}},
            "Document: untitled\n[not shown: https://a.example/b.pdf cannot be read by this model]",
        ),
        (
            {
                "type": "document",
                "title": "A",
                "context": "old",
                "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
            },
            "Document: A\nold\nabc",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": "abc"}},
            "Document: untitled\nabc",
        ),
        (
            {
                "type": "search_result",
                "source": "https://a.example",
                "title": "t",
                "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
            },
            "Search result: t (https://a.example)\nx\ny",
        ),
    ],
)
def test_blocks_that_are_texts_to_a_model(
    tool_server: Running, block: dict[str, Any], text: str
) -> None:
    in_result = count(tool_server, with_result([block]), tools=[READ])
    assert in_result == count(tool_server, with_result(text), tools=[READ])
    if block["type"] != "tool_reference":
        asked = [{"role": "user", "content": [block]}]
        assert count(tool_server, asked) == count(tool_server, [{"role": "user", "content": text}])


def test_a_scope_of_a_cache_mark_is_accepted(tool_server: Running) -> None:
    mark = {"type": "ephemeral", "scope": "global"}
    system = [{"type": "text", "text": "x", "cache_control": mark}]
    asked = [{"role": "user", "content": "a"}]
    assert count(tool_server, asked, system=system) == count(tool_server, asked, system="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_hosted_tool_next_to_own_tools_is_named_in_a_header(
    tool_server: Running, stream: bool
) -> None:
    asked = [{"role": "user", "content": "a"}]
    body = {"messages": asked, "max_tokens": 2, "tools": [READ, SEARCH], "stream": stream}
    answer = post(tool_server, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headstart-ignored"] == "tools[1] web_search_20250305"
    assert count(tool_server, asked, tools=[READ, SEARCH]) == count(
        tool_server, asked, tools=[READ]
    )
    alone = post(tool_server, "/v1/messages", {**body, "tools": [SEARCH]})
    assert alone.status_code == 400 and "does not run here" in alone.json()["error"]["message"]
