"""Requests of coding agents, some of which other servers refuse or misread."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from headstart.server.chats import check_fields
from headstart.server.errors import ApiError
from tests.clients import anthropic, openai
from tests.server.running import Running
from tests.server.scripted import scripted

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
def test_blocks_that_become_text(tool_server: Running, block: dict[str, Any], text: str) -> None:
    in_result = count(tool_server, with_result([block]), tools=[READ])
    assert in_result == count(tool_server, with_result(text), tools=[READ])
    if block["type"] != "tool_reference":
        messages = [{"role": "user", "content": [block]}]
        assert count(tool_server, messages) == count(
            tool_server, [{"role": "user", "content": text}]
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "text", "data": "a", "url": "b"}, "source has the unknown field 'url'"),
        ({"type": "url", "url": "a", "data": "b"}, "source has the unknown field 'data'"),
        ({"type": "text"}, "source.data: Field required"),
        ({"type": "content"}, "source.content: Field required"),
        ({"type": "url"}, "source.url: Field required"),
        ({"type": "file"}, "source.file_id: Field required"),
        ({"type": "pdf"}, "'text', 'base64', 'content', 'url', 'file'"),
    ],
)
def test_a_document_has_the_fields_of_its_type(
    tool_server: Running, source: dict[str, Any], message: str
) -> None:
    turn = {"role": "user", "content": [{"type": "document", "source": source}]}
    answer = post(tool_server, "/v1/messages/count_tokens", {"messages": [turn]})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_scope_of_a_cache_mark_is_accepted(tool_server: Running) -> None:
    mark = {"type": "ephemeral", "scope": "global"}
    system = [{"type": "text", "text": "x", "cache_control": mark}]
    messages = [{"role": "user", "content": "a"}]
    assert count(tool_server, messages, system=system) == count(tool_server, messages, system="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_hosted_tool_next_to_own_tools_is_named_in_a_header(
    tool_server: Running, stream: bool
) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 2, "tools": [READ, SEARCH], "stream": stream}
    answer = post(tool_server, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headstart-ignored"] == "tools[1] web_search_20250305"
    assert count(tool_server, messages, tools=[READ, SEARCH]) == count(
        tool_server, messages, tools=[READ]
    )
    alone = post(tool_server, "/v1/messages", {**body, "tools": [SEARCH]})
    assert alone.status_code == 400 and "does not run here" in alone.json()["error"]["message"]


SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "p",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [SHELL, PATCH]}
TOOLS = [SHELL, PATCH, {"type": "local_shell"}, SPACE]


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def respond(server: Running, text: str, **change: Any) -> tuple[Any, list[Any]]:
    """Return the response and its stream's events, after a check that their items agree."""
    body = {"model": "tiny", "input": "a", "tools": TOOLS, **change}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client, scripted(server, [*text, ""]):
        whole = client.responses.create(**body)
        events = list(client.responses.create(**body, stream=True))
    last = events[-1].response.output[-1].to_dict()
    ids = {"id": "", "call_id": ""}
    assert whole.output[-1].to_dict() | ids == last | ids
    return whole, events


def test_a_call_of_a_custom_tool(tool_server: Running) -> None:
    patch = '*** Begin "Patch"\n+é😀\n'
    arguments = '{"input": "*** Begin \\"Patch\\"\\n+é\\ud83d\\ude00\\n"}'
    response, events = respond(tool_server, call_text("apply_patch", arguments))
    [item] = response.output
    assert item.type == "custom_tool_call" and item.name == "apply_patch" and item.input == patch
    kinds = [event.type for event in events]
    assert kinds[-3:-1] == ["response.custom_tool_call_input.done", "response.output_item.done"]
    deltas = [event.delta for event in events if event.type.endswith("input.delta")]
    assert "".join(deltas) == events[-3].input == patch and len(deltas) > 5


def test_calls_of_the_shell_and_of_a_namespace(tool_server: Running) -> None:
    arguments = '{"command": ["ls", "-l"], "working_directory": "/a", "timeout_ms": 5}'
    response, _ = respond(tool_server, call_text("local_shell", arguments))
    [item] = response.output
    assert item.type == "local_shell_call" and item.action.command == ["ls", "-l"]
    assert item.action.working_directory == "/a" and item.action.timeout_ms == 5
    [item] = respond(tool_server, call_text("mcp.shell", "{}"))[0].output
    assert (item.type, item.name, item.namespace) == ("function_call", "shell", "mcp")
    [item] = respond(tool_server, call_text("mcp.apply_patch", '{"input": "x"}'))[0].output
    assert (item.type, item.namespace, item.input) == ("custom_tool_call", "mcp", "x")


def test_a_call_of_an_unknown_tool_is_a_function_call(tool_server: Running) -> None:
    [item] = respond(tool_server, call_text("nope", "{}"))[0].output
    assert (item.type, item.name) == ("function_call", "nope")


def test_a_required_call_is_of_an_allowed_tool(tool_server: Running) -> None:
    tools = [{"type": "custom", "name": "apply_patch"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    body = {"input": "a", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 60}
    items = post(tool_server, "/v1/responses", body).json()["output"]
    assert items and {item["type"] for item in items} == {"custom_tool_call"}
    tools[0]["name"] = "nope"
    assert "'nope'" in post(tool_server, "/v1/responses", body).json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", '{"a": 1}'),
        ("apply_patch", '{"input": "x"}'),
        ("local_shell", '{"command": ["ls"]}'),
        ("mcp.shell", "{}"),
    ],
)
def test_every_form_of_a_call_renders_the_same_prompt(
    tool_server: Running, name: str, arguments: str
) -> None:
    text = call_text(name, arguments)
    response, _ = respond(tool_server, text)
    [item] = response.output
    kind = "function_call_output"
    output = {"type": kind, "call_id": item.call_id, "output": "ok"}
    outputs = {
        "custom_tool_call": [output, {**output, "type": "custom_tool_call_output"}],
        "local_shell_call": [
            output,
            {"type": "local_shell_call_output", "id": item.call_id, "output": "ok"},
        ],
    }.get(item.type, [output])
    forms = [
        item.model_dump(),
        item.model_dump(mode="json"),
        item.model_dump(exclude_none=True),
        item.model_dump(exclude_unset=True),
        item.to_dict(),
        {"type": "item_reference", "id": item.id},
        {"id": item.id},
    ]
    messages = [{"role": "user", "content": "a"}]
    bodies = [{"input": [*messages, form, result]} for form in forms for result in outputs]
    bodies += [{"input": outputs, "previous_response_id": response.id}]
    bodies[-1]["input"] = outputs[:1]
    counts = set()
    for body in bodies:
        answer = post(tool_server, "/v1/responses/input_tokens", {"tools": TOOLS, **body})
        assert answer.status_code == 200, answer.text
        counts.add(answer.json()["input_tokens"])
    assert len(counts) == 1


def test_an_item_that_is_not_stored_is_not_found(tool_server: Running) -> None:
    answer = post(tool_server, "/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "input[0].id"


def test_fields_of_codex_are_accepted(tool_server: Running) -> None:
    body = {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        ],
        "instructions": "b",
        "tools": [*TOOLS, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "c",
        "client_metadata": {"d": "e"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "service_tier": "priority",
        "max_output_tokens": 2,
    }
    answer = post(tool_server, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headstart-ignored"] == "tools[4] web_search"
    assert answer.json()["service_tier"] == "default"
    options = {"prompt_cache_options": {"nonsense": 1}}
    assert post(tool_server, "/v1/responses", body | options).status_code == 400
    count = {key: body[key] for key in ("input", "instructions", "tools", "reasoning")}
    report = post(tool_server, "/v1/responses/input_tokens", count).json()
    assert report == {
        "object": "response.input_tokens",
        "input_tokens": answer.json()["usage"]["input_tokens"],
    }
    assert post(tool_server, "/v1/responses/compact", {"input": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"x": 1}, "messages[0].x"),
        ({"content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "", "x": 1}}]},
            "messages[0].content[0].image_url.x",
        ),
        ({"tool_calls": [{"x": 1}]}, "messages[0].tool_calls[0].x"),
        (
            {"tool_calls": [{"function": {"name": "a", "x": 1}}]},
            "messages[0].tool_calls[0].function.x",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_an_unused_field_of_a_message_is_refused(
    tool_server: Running, change: dict[str, Any], param: str, path: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a", **change}]}
    answer = post(tool_server, path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "has the unknown field 'x'" in answer.json()["error"]["message"]
    field = param.rpartition(".")[2]
    null = json.loads(json.dumps(body).replace(f'"{field}": 1', f'"{field}": null'))
    answer = post(tool_server, path, null)
    assert "unknown field" not in answer.text


def test_an_image_may_have_an_id() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}, "uuid": "a"}
    message = {"role": "user", "content": [image]}
    assert check_fields(message, 0, "") == message
    text = {"type": "text", "text": "a", "uuid": "a"}
    with pytest.raises(ApiError, match="has the unknown field 'uuid'"):
        check_fields({"role": "user", "content": [text]}, 0, "")


def test_a_null_is_absent_except_for_the_content() -> None:
    message = {"role": "user", "content": None, "name": None}
    assert check_fields(message, 0, "") == {"role": "user", "content": None}


def test_a_template_may_read_a_custom_field() -> None:
    message = {"role": "user", "content": "a", "mood": "b", "name": None}
    read = {"role": "user", "content": "a", "mood": "b"}
    for template in ("{{ m.mood }}", "{{ m['mood'] }}", '{{ m["mood"] }}'):
        assert check_fields(message, 0, template) == read
    with pytest.raises(ApiError, match="has the unknown field 'mood'"):
        check_fields(message, 0, "{{ m.moods }} mood")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
         {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("speed", "standard", "fast"),
        ("service_tier", "auto", "gold"),
        ("inference_geo", "global", "us"),
        ("diagnostics", {"previous_message_id": "msg_1"}, {"x": 1}),
        ("metadata", {"user_id": "a"}, {"x": 1}),
        ("container", None, "c"),
    ],
)  # fmt: skip
def test_fields_of_anthropic_are_followed_or_refused(
    tool_server: Running, name: str, good: Any, bad: Any
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for value, status in ((good, 200), (None, 200), (bad, 400)):
        answer = post(tool_server, "/v1/messages", body | {name: value})
        assert answer.status_code == status, answer.text
    assert name in answer.json()["error"]["message"]


def test_an_empty_stop_stops_nothing(tool_server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    plain = post(tool_server, "/v1/completions", body).json()["choices"][0]["text"]
    for stop in ("", [""], []):
        answer = post(tool_server, "/v1/completions", body | {"stop": stop})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == plain


def forms_of(message: Any) -> list[dict[str, Any]]:
    """Return a client's object in every form that it can be dumped."""
    forms = [
        message.model_dump(),
        message.model_dump(mode="json"),
        message.model_dump(exclude_none=True),
        message.model_dump(exclude_unset=True),
    ]
    return [*forms, message.to_dict()] if hasattr(message, "to_dict") else forms


CALL = call_text("shell", '{"a": 1}')


def test_every_form_of_an_openai_turn_is_accepted(tool_server: Running) -> None:
    tool = {"type": "function", "function": {"name": "shell"}}
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "tiny", "messages": messages, "tools": [tool]}
    client = openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)
    with client, scripted(tool_server, [*f"b {CALL}", ""]):
        completion = client.chat.completions.create(**body)
        parsed = client.chat.completions.parse(model="tiny", messages=messages)
    counts = set()
    for form in forms_of(completion.choices[0].message):
        [call] = form["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        answer = post(tool_server, "/tokenize", {**body, "messages": [*messages, form, result]})
        assert answer.status_code == 200, answer.text
        counts.add(answer.json()["count"])
    assert len(counts) == 1
    for form in forms_of(parsed.choices[0].message):
        answer = post(tool_server, "/tokenize", {"messages": [*messages, form]})
        assert answer.status_code == 200, answer.text


def test_every_form_of_an_anthropic_turn_is_accepted(tool_server: Running) -> None:
    messages = [{"role": "user", "content": "a"}]
    tool = {**READ, "name": "shell"}
    client = anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0)
    with client, scripted(tool_server, [*f"b {CALL}", ""]):
        message = client.messages.create(
            model="tiny", max_tokens=9, messages=messages, tools=[tool]
        )
        body = {"model": "tiny", "max_tokens": 9, "messages": messages, "tools": [tool]}
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
    counts = set()
    for form in [*forms_of(message), *forms_of(streamed)]:
        result = {"type": "tool_result", "tool_use_id": form["content"][-1]["id"], "content": "ok"}
        turns = [{"role": "assistant", "content": form["content"]}]
        turns.append({"role": "user", "content": [result]})
        counts.add(count(tool_server, [*messages, *turns], tools=[tool]))
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "mcp"}, "tools[0].type"),
        ({"type": ["mcp"]}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "custom", "name": "a", "x": 1}, "tools[0].x"),
        ({"type": "local_shell", "x": 1}, "tools[0].x"),
        ({"type": "namespace", "name": "a", "tools": [], "x": 1}, "tools[0].x"),
    ],
)
def test_an_error_of_a_tool_names_its_field(
    tool_server: Running, tool: dict[str, Any], param: str
) -> None:
    answer = post(tool_server, "/v1/responses", {"input": "a", "tools": [tool]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    message = post(tool_server, "/v1/messages", {"messages": [], "tools": [{"type": "bash"}]})
    assert "tools.0.type: 'bash' does not run here" in message.text


def test_an_error_of_a_message_names_the_item(tool_server: Running) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    turn = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "a"}
    wrong = {"role": "user", "content": [image]}
    for body, param in (
        ({"input": [wrong]}, "input[0]"),
        ({"input": [turn, answer, answer, wrong], "instructions": "b"}, "input[3]"),
        ({"input": [turn, wrong]}, "input[1]"),
    ):
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            error = post(tool_server, path, body).json()["error"]
            assert error["param"] == param and error["message"].startswith(f"{param} has an image")
