"""Anthropic's client against the server, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import TypeAdapter

from headstart import LLM, EngineError, SamplingParams
from tests.clients import anthropic
from tests.server.running import Running, running
from tests.server.scripted import scripted
from tests.server.templates import png_of

if TYPE_CHECKING:
    from anthropic.types import Message

PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 4
QUESTION = [{"role": "user", "content": PEOPLE + "What is the age of Ben?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}


def connect(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def caller(tool_server: Running) -> Iterator[anthropic.Anthropic]:
    with connect(tool_server) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any = QUESTION, **change: Any) -> Message:
    """Return the whole message, after a check that the streamed one is equal."""
    extra = {"temperature": 0, **change.pop("extra_body", {})}
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 64, **change}
    whole = client.messages.create(**body, extra_body=extra)
    with client.messages.stream(**body, extra_body=extra) as stream:
        streamed = stream.get_final_message()
    assert [shown(block) for block in whole.content] == [shown(part) for part in streamed.content]
    assert whole.stop_reason == streamed.stop_reason
    assert whole.stop_sequence == streamed.stop_sequence
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    return whole


def shown(block: Any) -> dict[str, Any]:
    fields: dict[str, Any] = block.model_dump(exclude={"id", "parsed_output"}, exclude_none=True)
    return fields


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    cached, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert cached is not None and created is not None
    return usage.input_tokens + cached + created


def test_a_message_matches_the_engine(client: anthropic.Anthropic) -> None:
    llm = LLM("headstart-tiny", dtype="float32", num_blocks=256)
    [oracle] = llm.chat(QUESTION, SamplingParams(max_tokens=64, temperature=0))  # type: ignore[arg-type]
    llm.close()
    message = ask(client)
    assert [shown(part) for part in message.content] == [
        {"type": "text", "text": oracle.outputs[0].text}
    ]
    assert message.role == "assistant" and message.type == "message"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert prompt_tokens(message) == len(oracle.prompt_token_ids)
    again = ask(client)
    assert again.usage.cache_read_input_tokens == prompt_tokens(message) - 1
    counted = client.messages.count_tokens(model="tiny", messages=QUESTION)  # type: ignore[arg-type]
    assert counted.input_tokens == prompt_tokens(message)


def test_a_stream_has_its_events_in_order(thinking_server: Running) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    text = "Hm, Rome.</think>\n\nLet me see.\n" + call + call
    with scripted(thinking_server, text), connect(thinking_server) as client:
        message = ask(client, tools=[WEATHER], max_tokens=900)
        body: Any = {"model": "tiny", "max_tokens": 900, "messages": QUESTION, "tools": [WEATHER]}
        kinds = [event.type for event in client.messages.create(**body, stream=True)]
    assert [shown(block) for block in message.content] == [
        {"type": "thinking", "thinking": "Hm, Rome.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
    ]
    assert len({block.id for block in message.content[2:]}) == 2  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use" and message.usage.output_tokens == len(text)
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    around = [kind for kind in kinds[1:-2] if kind != "content_block_delta"]
    assert around == ["content_block_start", "content_block_stop"] * 4


def test_a_failed_stream_ends_with_an_error(thinking_server: Running) -> None:
    pieces = ["Hm", EngineError("a step failed")]
    with (
        scripted(thinking_server, pieces),
        connect(thinking_server) as client,
        pytest.raises(anthropic.APIStatusError, match="the engine failed"),
        client.messages.stream(model="tiny", max_tokens=9, messages=QUESTION) as stream,  # type: ignore[arg-type]
    ):
        stream.get_final_message()


def test_the_error_of_a_stream_has_the_request_id(server: Running) -> None:
    """Regression: the error had the message's id instead of the request id of header and log."""
    body = {"model": "tiny", "max_tokens": 9, "messages": QUESTION, "stream": True}
    with scripted(server, ["Hm", EngineError("a step failed")]):
        answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    event = json.loads(answer.text.rpartition("data: ")[2])
    assert event["type"] == "error" and event["request_id"] == answer.headers["request-id"]


def test_a_system_prompt_may_be_text_or_blocks(client: anthropic.Anthropic) -> None:
    blocks: Any = [{"type": "text", "text": "Be brief."}]
    counts = [
        client.messages.count_tokens(model="tiny", messages=QUESTION, system=system).input_tokens  # type: ignore[arg-type]
        for system in (
            "Be brief.",
            blocks,
            [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, *blocks],
        )
    ]
    alone = client.messages.count_tokens(model="tiny", messages=QUESTION).input_tokens  # type: ignore[arg-type]
    assert len(set(counts)) == 1 and counts[0] > alone
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert client.messages.count_tokens(model="tiny", messages=parts).input_tokens == alone  # type: ignore[arg-type]


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    text = ask(client).content[0].text  # type: ignore[union-attr]
    stopped = ask(client, stop_sequences=["zzz", text[2:4]])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text[2:4]
    assert stopped.content[0].text == text[:2]  # type: ignore[union-attr]


def test_an_answer_ends_at_the_end_of_the_context(client: anthropic.Anthropic) -> None:
    """The limit applies to any `max_tokens`, as many clients always send the same large number."""
    used = ask(client, max_tokens=1).usage
    most = used.input_tokens + (used.cache_read_input_tokens or 0)
    most += (used.cache_creation_input_tokens or 0) + 2
    with running(max_model_len=most) as small, connect(small) as client_of_small:
        message = ask(client_of_small, max_tokens=10_000)
    assert (message.stop_reason, message.usage.output_tokens) == (
        "model_context_window_exceeded",
        2,
    )


def test_a_prefilled_answer_continues(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text  # type: ignore[union-attr]
    begin, between, rest = text.partition(" is")
    begun = ask(client, [*QUESTION, {"role": "assistant", "content": begin}])
    assert begun.content[0].text == between + rest  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_used_and_its_result_read(
    caller: anthropic.Anthropic, tool_server: Running, choice: dict[str, Any]
) -> None:
    once = {**choice, "disable_parallel_tool_use": True}
    message = ask(caller, tools=[WEATHER], tool_choice=once)
    [use] = message.content
    assert (
        use.type == "tool_use" and use.name == "get_weather" and message.stop_reason == "tool_use"
    )
    assert use.input in ({"city": "Rome"}, {"city": "Oslo"}) and use.id.startswith("toolu_")
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [part.to_dict() for part in message.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": [{"type": "text", "text": "Sun"}],
                },
                {"type": "text", "text": "And so?"},
            ],
        },
    ]
    next_message = ask(caller, turns, tools=[WEATHER], tool_choice={"type": "none"})
    read = next_message.usage.cache_read_input_tokens
    assert read is not None and read >= prompt_tokens(message) + message.usage.output_tokens - 2
    blocks, free = tool_server.pool()
    assert blocks == free


def test_reasoning_is_a_separate_block(thinking_server: Running) -> None:
    with connect(thinking_server) as client:
        message = ask(client, max_tokens=3, thinking={"type": "enabled", "budget_tokens": 1024})
        [block] = message.content
        assert block.type == "thinking" and block.thinking and message.stop_reason == "max_tokens"
        turns = [
            *QUESTION,
            {"role": "assistant", "content": [block.to_dict(), {"type": "text", "text": "45"}]},
            {"role": "user", "content": "Sure?"},
        ]
        with_it = client.messages.count_tokens(model="tiny", messages=turns).input_tokens  # type: ignore[arg-type]
        turns[1]["content"] = "45"
        without = client.messages.count_tokens(model="tiny", messages=turns).input_tokens  # type: ignore[arg-type]
        assert with_it > without
        hidden = {"type": "redacted_thinking", "data": "x"}
        turns[1]["content"] = [hidden, {"type": "text", "text": "45"}]
        assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens == without  # type: ignore[arg-type]


def mark(text: str, **control: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **control}}


def test_partial_blocks_are_not_reported_as_created(client: anthropic.Anthropic) -> None:
    first = [mark("Ab"), {"type": "text", "text": "cd"}]
    message = ask(client, [{"role": "user", "content": first}], max_tokens=1)
    assert prompt_tokens(message) < 16 and message.usage.cache_creation_input_tokens == 0


def test_a_repeated_prompt_creates_nothing_at_any_length(client: anthropic.Anthropic) -> None:
    """One of sixteen lengths fills its last block, of which a hit computes one token again."""
    lengths = set()
    for end in range(16):
        turn = [{"role": "user", "content": [mark(f"{end} {PEOPLE}" + "a b c d e f g h "[:end])]}]
        _, again = ask(client, turn, max_tokens=1), ask(client, turn, max_tokens=1)
        assert again.usage.cache_creation_input_tokens == 0
        lengths.add(prompt_tokens(again) % 16)
    assert 0 in lengths


def test_a_mark_of_the_whole_request_creates_all_full_blocks(client: anthropic.Anthropic) -> None:
    """The mark is after the text that the template adds to the last message."""
    for end in range(16):
        turns = [{"role": "user", "content": f"whole {end} {PEOPLE}" + "a b c d e f g h "[:end]}]
        message = ask(client, turns, max_tokens=1, cache_control={"type": "ephemeral"})
        usage = message.usage
        full = prompt_tokens(message) - prompt_tokens(message) % 16
        assert usage.cache_creation_input_tokens == full - (usage.cache_read_input_tokens or 0)


def test_usage_splits_into_read_created_and_other_tokens(
    client: anthropic.Anthropic, server: Running
) -> None:
    # Other tests' prompts may have a common prefix with these, such as the first token.
    httpx.post(f"{server.url}/cache/reset").raise_for_status()

    def send(question: str) -> Any:
        system = [mark("These are people. " + PEOPLE * 2, ttl="1h")]
        first = [mark("Remember: " + PEOPLE), {"type": "text", "text": question}]
        body: Any = {"messages": [{"role": "user", "content": first}], "system": system}
        count = client.messages.count_tokens(model="tiny", **body).input_tokens
        usage = client.messages.create(model="tiny", max_tokens=4, **body).usage
        created = usage.cache_creation
        assert created is not None
        both = created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
        assert both == usage.cache_creation_input_tokens
        assert usage.input_tokens + both + (usage.cache_read_input_tokens or 0) == count
        return usage, created

    usage, created = send("What is the age of Anna? Tell me in one word, and no more, please.")
    assert usage.cache_read_input_tokens == 0
    assert created.ephemeral_1h_input_tokens > created.ephemeral_5m_input_tokens > 0
    assert usage.input_tokens > 0
    again, repeated = send("Who is old?")
    read = again.cache_read_input_tokens or 0
    assert read >= usage.cache_creation_input_tokens
    assert repeated.ephemeral_1h_input_tokens == repeated.ephemeral_5m_input_tokens == 0


def image(seed: int) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": png_of(seed)}
    return {"type": "image", "source": source}


def test_an_image_matches_one_of_openais_api(image_server: Running) -> None:
    text = {"type": "text", "text": "What is it?"}
    url = f"data:image/png;base64,{png_of(1)}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, text]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    body["messages"] = [{"role": "user", "content": parts}]
    answer = httpx.post(image_server.url + "/v1/chat/completions", json=body, timeout=60).json()
    with connect(image_server) as client:
        turns = [{"role": "user", "content": [image(1), text]}]
        message = ask(client, turns, max_tokens=8)
        assert message.content[0].text == answer["choices"][0]["message"]["content"]  # type: ignore[union-attr]
        assert prompt_tokens(message) == answer["usage"]["prompt_tokens"]
        assert message.usage.cache_read_input_tokens == prompt_tokens(message) - 1
        result = {"type": "tool_result", "tool_use_id": "x", "content": [image(2)]}
        turns[0]["content"] = [result, text]
        assert ask(client, turns, max_tokens=1).usage.input_tokens > 0


def test_models_have_anthropics_format(client: anthropic.Anthropic) -> None:
    """Regression: pages lacked `has_more`, and models a display name."""
    page = client.models.list()
    assert [entry.id for entry in client.models.list()] == ["tiny"] == [page.first_id]
    assert page.has_more is False
    for model in (page.data[0], client.models.retrieve("tiny")):
        TypeAdapter(anthropic.types.ModelInfo).validate_python(model.to_dict())
        assert (model.display_name, model.type) == ("tiny", "model")


BAD = [
    ({"messages": []}, 400, "messages: List should have at least 1 item"),
    (
        {"messages": [], "system": "Hi", "cache_control": {"type": "ephemeral"}},
        400,
        "at least 1 item",
    ),  # was a 500
    ({"model": "x"}, 404, "does not exist"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"frobnicate": 1}, 400, "frobnicate"),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        400,
        "messages.0.content.0: the type is 'audio'; allowed: 'text', ",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"url": "u"}}]}]},
        400,
        "url is a string; allowed: null; send the image itself, as `data` in base64",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages.0.content.0.text: Field required",  # was reported twice, once as the block's type
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
        400,
        "block of type 'thinking'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
        400,
        "messages.0.content.0: an object has no 'type'",  # was a 500
    ),
    (
        {"messages": [*QUESTION, {"role": "assistant", "content": [image(1)]}]},
        400,
        "a message of role 'assistant' has a block of type 'image'",
    ),
    ({"messages": [{"role": "user", "content": [mark("a")] * 5}]}, 400, "allowed: 4"),
    (
        {"messages": [{"role": "user", "content": [mark("a"), mark("b", ttl="1h")]}]},
        400,
        'before "5m"',
    ),
    ({"system": [mark("a", ttl="2h")]}, 400, "ttl"),
    ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, 400, "and no name"),
    ({"tool_choice": {"type": "any"}}, 400, "no tools"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        400,
        "tools.0.type: 'web_search_20250305' does not run here; allowed: 'custom' (your own tool)",
    ),
    ({"cache_salt": "\ud800"}, 400, "cache_salt: Input should be a valid string, unable to parse"),
]


@pytest.mark.parametrize(("change", "status", "says"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused_with_anthropics_errors(
    server: Running, change: dict[str, Any], status: int, says: str, stream: bool
) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": QUESTION, "stream": stream} | change
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/v1/messages", content=content, headers=headers, timeout=60)
    event = answer.json()
    assert answer.status_code == status and event["type"] == "error"
    assert says in event["error"]["message"] and event["request_id"] == answer.headers["request-id"]
    assert event["error"]["type"] == (
        "not_found_error" if status == 404 else "invalid_request_error"
    )
    blocks, free = server.pool()
    assert blocks == free


def test_images_are_refused_by_a_text_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="the model takes only text"):
        ask(client, [{"role": "user", "content": [image(1)]}])


def test_cache_marks_need_no_slots() -> None:
    with running(max_num_seqs=1, max_waiting=1) as server, connect(server) as client:
        parts = [
            mark("Remember: " + PEOPLE, ttl="1h"),
            mark("And so."),
            {"type": "text", "text": "?"},
        ]
        message = ask(client, [{"role": "user", "content": parts}], max_tokens=1)
        assert message.usage.cache_read_input_tokens == 0
