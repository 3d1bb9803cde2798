"""OpenAI's client of the Responses API against the server, over a socket."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headstart import EngineError
from headstart.server.responses.items import CallKind, CustomTool
from headstart.server.stores import ResponseStore
from tests.clients import openai
from tests.server.running import Running
from tests.server.scripted import scripted
from tests.server.templates import png_of

if TYPE_CHECKING:
    from openai.types.responses import Response

PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 4
QUESTION = PEOPLE + "What is the age of Ben?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


def connect(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def caller(tool_server: Running) -> Iterator[openai.OpenAI]:
    with connect(tool_server) as client:
        yield client


def ask(client: openai.OpenAI, question: Any = QUESTION, **change: Any) -> Response:
    """Return the whole response, after a check that the streamed one and its events agree."""
    body: dict[str, Any] = {
        "model": "tiny",
        "input": question,
        "max_output_tokens": 64,
        "temperature": 0,
        **change,
    }
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    streamed = events[-1].response
    assert events[-1].type == f"response.{streamed.status}" and streamed.status == whole.status
    assert items_of(streamed) == items_of(whole)
    assert read_items(events) == items_of(streamed)
    assert isinstance(whole, openai.types.responses.Response)
    return whole


def items_of(response: Response) -> list[dict[str, Any]]:
    items = [item.to_dict() for item in response.output]
    assert len({item.pop("id") for item in items}) == len(items)
    for item in items:
        item.pop("call_id", None)
    return items


def read_items(events: Any) -> list[dict[str, Any]]:
    """Return the items that the deltas add up to."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event.type == "response.output_item.added":
            items.append({**event.item.to_dict(), "text": ""})
        elif event.type.endswith(".delta"):
            assert event.item_id == items[event.output_index]["id"]
            items[event.output_index]["text"] += event.delta
        elif event.type == "response.output_item.done":
            items[event.output_index]["status"] = event.item.status
    for item in items:
        text = item.pop("text")
        item.pop("id")
        item.pop("call_id", None)
        if item["type"] == "function_call":
            item["arguments"] = text
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
    return items


def test_a_response_matches_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=64, temperature=0
    )
    response = ask(client)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "completed" and response.incomplete_details is None
    usage = response.usage
    assert usage is not None and chat.usage is not None
    assert usage.input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
    assert usage.input_tokens_details.to_dict()["cache_write_tokens"] == 0
    with client.responses.stream(model="tiny", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == response.output_text


def test_instructions_and_messages(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
    ]
    parts = [{"type": "input_text", "text": QUESTION}]
    typed = [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
    ]
    for same in (messages, typed):
        other = ask(client, same)
        assert other.usage is not None and first.usage is not None
        assert other.usage.input_tokens == first.usage.input_tokens
        assert other.output_text == first.output_text


@pytest.mark.parametrize("flag", [True, False, None])
def test_a_response_repeats_its_request(client: openai.OpenAI, flag: bool | None) -> None:
    """By default, a response is stored and may call several tools."""
    change: Any = {"max_output_tokens": 1, "store": flag, "parallel_tool_calls": flag}
    fields = client.responses.create(model="tiny", input="Hi", **change).to_dict()
    expected = flag is not False
    assert fields["store"] is expected and fields["parallel_tool_calls"] is expected
    assert fields["background"] is False and fields["error"] is None
    assert fields["tool_choice"] == "auto" and fields["tools"] == []
    assert fields["max_output_tokens"] == 1 and fields["status"] == "incomplete"


def test_an_answer_that_is_too_long_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_response_follows_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    assert json.loads(ask(client, text={"format": form}).output_text)["city"] in ("Rome", "Oslo")


def test_json_without_a_schema(client: openai.OpenAI) -> None:
    plain = ask(client).output_text
    assert ask(client, text={"format": {"type": "text"}}).output_text == plain
    assert ask(client, text={"format": {"type": "json_object"}}).output_text.startswith("{")
    assert not plain.startswith("{")


def test_a_conversation_continues(client: openai.OpenAI, server: Running) -> None:
    first = ask(client)
    second = ask(client, "And Carl?", previous_response_id=first.id)
    turns = [
        {"role": "user", "content": QUESTION},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "And Carl?"},
    ]
    again = ask(client, turns, store=False)
    assert again.usage is not None and second.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens
    assert again.output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: ask(client, "And Anna?", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            call()
    third = ask(client, "And Anna?", previous_response_id=second.id)  # which contains all turns
    assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens


def test_a_stored_response_is_returned_whole(client: openai.OpenAI) -> None:
    """Regression: a client that requested events got none, without an error."""
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=1)
    included: Any = ["reasoning.encrypted_content"]
    same = client.responses.retrieve(first.id, stream=False, include=included)
    assert same == first == client.responses.retrieve(first.id, include_obfuscation=False)
    refused: dict[str, Any] = {"stream": True, "starting_after": 3, "x": 1}
    refused["include"] = ["message.output_text.logprobs"]
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is .* sent whole") as error:
            client.responses.retrieve(first.id, extra_query={name: value})
        assert error.value.param == name


def test_a_function_is_called_and_its_output_read(caller: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    first = ask(caller, tools=[WEATHER], tool_choice=choice)
    [call] = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
    change: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "none"}
    reply = ask(caller, [output], previous_response_id=first.id, **change)
    user = {"role": "user", "content": QUESTION}
    whole = ask(caller, [user, call.to_dict(), output], **change)
    assert whole.output_text == reply.output_text
    assert whole.usage is not None and reply.usage is not None and first.usage is not None
    assert whole.usage.input_tokens == reply.usage.input_tokens
    cached = reply.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 2


def test_a_custom_tool_is_shown_with_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: LINE"}
    fields: Any = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    kind, tool = CustomTool(**fields).read("files")
    assert kind == CallKind("custom_tool_call", "patch", "files")
    assert tool.name == "files.patch"
    assert tool.description == "Edits.\n\nThe input follows this lark grammar:\nstart: LINE"
    assert CustomTool(type="custom", name="patch").read()[1].description is None


def test_items_are_streamed_one_after_another(thinking_server: Running) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    text = "Hm, Rome.</think>\n\nLet me see.\n" + call + call
    with scripted(thinking_server, text), connect(thinking_server) as client:
        response = ask(client, tools=[WEATHER])
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "Hm, Rome."  # type: ignore[union-attr,index]
    assert response.output_text == "Let me see."
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len("Hm, Rome.")
    with connect(thinking_server) as client:
        turns = [item.to_dict() for item in response.output]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "Sun"}
            for item in turns[2:]
        ]
        assert ask(client, [*turns, *outputs], tools=[WEATHER], max_output_tokens=2).usage


def test_a_failed_stream_ends_with_an_error(
    server: Running, logged: list[logging.LogRecord]
) -> None:
    pieces = ["Hm", EngineError("a step failed")]
    with scripted(server, pieces), connect(server) as client:
        *_, last = client.responses.create(model="tiny", input="Hi", stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.message.startswith("the engine failed")
    assert "a request failed: a step failed" in [record.getMessage() for record in logged]


def test_an_image_may_be_a_data_url(image_server: Running) -> None:
    url = f"data:image/png;base64,{png_of(3)}"
    content = [{"type": "input_image", "image_url": url, "detail": "auto"}]
    content.append({"type": "input_text", "text": "What is it?"})
    with connect(image_server) as client:
        turns = [{"role": "user", "content": content}]
        ask(client, turns, max_output_tokens=4)
        response = ask(client, turns, max_output_tokens=4)
        assert response.usage is not None and response.usage.input_tokens_details.cached_tokens > 0


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_values=2, max_bytes=4000)
    for name in "abc":
        store.add(name, b"{}", [], "x")
    assert store.get("a", "x") is None and store.get("c", "x") is not None
    assert store.get("c", None) is None and not store.remove("c", "y")
    store.add("d", b"{}", [{"content": "x" * 3580}], "x")
    assert store.get("b", "x") is None and store.get("c", "x") is None and len(store) == 1
    store.add("e", b"{}", [{"content": "x" * 4000}], "x")
    assert store.get("e", "x") is None and store.get("d", "x") is not None
    assert store.remove("d", "x") and len(store) == 0 == store.num_bytes


def test_only_its_tenant_finds_an_item() -> None:
    store = ResponseStore()
    item = {"id": "msg_1", "type": "message"}
    store.add("a", json.dumps({"output": [item]}).encode(), [], "x")
    many = {f"msg_{number}" for number in range(20)}
    for ids in ({"msg_1"}, {"msg_1", "msg"}, many):
        assert store.find_items(ids, "x") == {"msg_1": item}
        assert not store.find_items(ids, "y") and not store.find_items(ids, None)
    assert not store.find_items({"msg"}, "x")


def test_a_response_replaces_one_with_its_id() -> None:
    """Regression: the replaced response's bytes stayed counted, so the capacity shrank."""
    store = ResponseStore(max_bytes=4000)
    for content in (b"x" * 3000, b"y"):
        store.add("a", content, [], "x")
    entry = store.get("a", "x")
    assert entry is not None and entry.response == b"y" and len(store) == 1
    assert 0 < store.num_bytes < 1000
    store.add("a", b"z" * 4000, [], "x")  # too large, so that neither is stored
    assert store.get("a", "x") is None and len(store) == 0 == store.num_bytes


@pytest.mark.parametrize("text", ["", "x" * 1000])
def test_a_flood_of_responses_evicts_only_its_tenants(text: str) -> None:
    """Regression: one tenant's responses were evicted when another stored many."""
    store = ResponseStore(max_values=50, max_bytes=30_000)
    store.add("mine", b"{}", [], "a")
    for number in range(200):
        store.add(f"{number}", b"{}", [{"content": text}], "b")
    assert store.get("mine", "a") is not None
    assert store.get("199", "b") is not None and store.get("0", "b") is None
    assert 10 < len(store) <= 50 and store.num_bytes <= 30_000
    for number in range(200):
        store.add(f"{number}", b"{}", [{"content": text}], "c")
    counts = [sum(store.get(f"{i}", owner) is not None for i in range(200)) for owner in "bc"]
    assert abs(counts[0] - counts[1]) <= 1 < min(counts)


DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(400), {})
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"input": []}, 400, "input is empty; allowed: a string, or a list of items"),
        ({"input": [], "instructions": "Be brief."}, 400, "input is empty"),
        ({"input": 7}, 400, "input"),
        ({"model": "x"}, 404, "does not exist"),
        ({"previous_response_id": "resp-x"}, 404, "is not stored"),
        ({"background": True}, 400, "background"),
        ({"conversation": "c"}, 400, "conversation"),
        (
            {"tools": [{"type": "file_search", "vector_store_ids": []}]},
            400,
            "tools[0].type: 'file_",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 404, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "'audio'"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens is 0"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "schema"),
        ({"instructions": "\ud800"}, 400, "surrogate"),
        ({"tools": [TOOL | {"parameters": DEEP}], "tool_choice": "none"}, 400, "nested"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused(
    server: Running, change: dict[str, Any], status: int, says: str, stream: bool
) -> None:
    content = json.dumps({"model": "tiny", "input": "Hi", "stream": stream} | change).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/v1/responses", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    blocks, free = server.pool()
    assert blocks == free


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {f"{i}": "a" for i in range(17)}}, "metadata"),
        ({"user": "x" * 4097}, "user"),
        ({"cache_salt": "x" * 4097}, "cache_salt"),
        ({"reasoning": {"effort": "x" * 4097}}, "reasoning.effort"),
    ],
)
def test_repeated_fields_are_bounded(server: Running, fields: dict[str, Any], says: str) -> None:
    """Regression: 30 MB of metadata, repeated in the response, blocked every stream for 0.3 s."""
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 1}
    answer = httpx.post(server.url + "/v1/responses", json=body | fields, timeout=60)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    metadata = {"x" * 60 + f"{i}": "x" * 512 for i in range(16)}
    answer = httpx.post(server.url + "/v1/responses", json=body | {"metadata": metadata})
    assert answer.status_code == 200 and answer.json()["metadata"] == metadata


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("metadata", [DEEP, {"a": {"\ud800": 1}}])
def test_client_metadata_may_be_any_json(
    server: Running, metadata: dict[str, Any], stream: bool
) -> None:
    """Regression: the status was 500, as the whole request was copied into its response."""
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 1, "stream": stream}
    content = json.dumps(body | {"client_metadata": metadata}).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/v1/responses", content=content, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
