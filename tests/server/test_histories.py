"""Conversations as clients send them, over all three APIs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.running import Running, running

LINE = "x-anthropic-billing-header: cc_version=2.1.40.0d9; cc_entrypoint=cli; cch=fa690;\n"
SYSTEM = "Be brief. " * 20
QUESTION = {"role": "user", "content": "Hi"}


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    "system",
    [
        LINE + SYSTEM,
        [text(LINE + SYSTEM)],
        [text(LINE), text(SYSTEM)],
        [text(LINE + "\n" + SYSTEM)],
    ],
)
def test_only_the_billing_line_is_removed(server: Running, system: Any) -> None:
    """Regression: a block that began with the line was dropped, and chats included the line."""
    path = "/v1/messages/count_tokens"
    plain = post(server, path, system=SYSTEM, messages=[QUESTION])
    assert post(server, path, system=system, messages=[QUESTION]) == plain
    for role in ("system", "developer"):
        message = {"role": role, "content": system}
        prompt = post(server, "/tokenize", messages=[message, QUESTION])
        assert prompt["count"] == plain["input_tokens"]
    if isinstance(system, str):
        answer = post(server, "/v1/responses", instructions=system, input="Hi", max_output_tokens=1)
        assert answer["usage"]["input_tokens"] == plain["input_tokens"]


def test_a_system_prompt_with_only_the_billing_line_is_absent(server: Running) -> None:
    plain = post(server, "/tokenize", messages=[QUESTION])
    system = {"role": "system", "content": LINE}
    assert post(server, "/tokenize", messages=[system, QUESTION]) == plain


WRITE = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
FUNCTION = {"type": "function", "function": {"name": "write", "parameters": WRITE}}


def test_a_cut_off_call_is_accepted_in_a_chats_history(tool_server: Running) -> None:
    """Regression: the next turn was refused. It hits all blocks before the cut."""
    body: dict[str, Any] = {"tools": [FUNCTION], "temperature": 0}
    path = "/v1/chat/completions"
    forced = {"tool_choice": "required", "max_tokens": 60}
    answer = post(tool_server, path, messages=[QUESTION], **body, **forced)
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and not is_json(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "cut off"}
    history = [QUESTION, choice["message"], result]
    usage = post(tool_server, path, messages=history, **body, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["total_tokens"] - 1


def test_a_cut_off_call_is_accepted_in_a_responses_history(tool_server: Running) -> None:
    path, tool = "/v1/responses", {"type": "function", "name": "write", "parameters": WRITE}
    body: dict[str, Any] = {"tools": [tool], "temperature": 0}
    first = post(
        tool_server, path, input="Hi", **body, tool_choice="required", max_output_tokens=60
    )
    [call] = first["output"]
    assert first["status"] == "incomplete" and not is_json(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut off"}
    for history in (
        {"previous_response_id": first["id"], "input": [result]},
        {"input": [{"role": "user", "content": "Hi"}, call, result]},
    ):
        usage = post(tool_server, path, **history, **body, max_output_tokens=1)["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 1


def test_a_cut_off_call_is_accepted_in_a_messages_history(tool_server: Running) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "write", "input": '{"text": "On'}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "cut off"}
    history = [
        QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "write", "input_schema": WRITE}]
    post(tool_server, "/v1/messages", messages=history, tools=tools, max_tokens=1)


def test_a_refusal_of_an_earlier_response_becomes_text(server: Running) -> None:
    counts = [
        post(
            server,
            "/v1/responses",
            input=[
                {"role": "user", "content": "Hi"},
                {"type": "message", "role": "assistant", "content": [part]},
                {"role": "user", "content": "Why?"},
            ],
            max_output_tokens=1,
        )["usage"]["input_tokens"]
        for part in (
            {"type": "refusal", "refusal": "No."},
            {"type": "output_text", "text": "No."},
        )
    ]
    assert counts[0] == counts[1]


def test_any_model_name_and_max_tokens_are_accepted() -> None:
    """Agents request the longest answer of a large model, and name a second model."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    with running(any_model=True, max_model_len=16) as small:
        card = httpx.get(small.url + "/v1/models/claude-haiku-4-5").json()
        assert card["id"] == card["display_name"] == "claude-haiku-4-5" and card["max_tokens"] == 15
        assert httpx.get(small.url + "/v1/models/").json()["object"] == "list"
        for path, field in (
            ("/v1/chat/completions", "max_tokens"),
            ("/v1/chat/completions", "max_completion_tokens"),
            ("/v1/responses", "max_output_tokens"),
            ("/v1/messages", "max_tokens"),
        ):
            key = "input" if path == "/v1/responses" else "messages"
            body = {key: [{"role": "user", "content": "Hello there"}], field: 10**6}
            answer = post(small, path, **body, model="claude-haiku-4-5")
            assert answer["model"] == "claude-haiku-4-5"
            usage = answer["usage"]
            if "total_tokens" not in usage:
                usage["total_tokens"] = sum(usage[name] for name in (*names, "output_tokens"))
            assert usage["total_tokens"] == 16


def is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True
