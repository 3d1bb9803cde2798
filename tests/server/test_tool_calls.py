"""Tools with OpenAI's client: forced calls, calls that a model writes, and results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients import openai
from tests.server.running import Running, running
from tests.server.templates import HERMES, LLAMA, MISTRAL, model_with

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
MESSAGES = [{"role": "user", "content": "How is the weather in Rome?"}]
ARGUMENTS = '{"city": "Rome", "days": 2}'
NAMED = {"type": "function", "function": {"name": "get_weather"}}

WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
}
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tools(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    special = ("[TOOL_CALLS]",) if request.param == "mistral" else ()
    folder = model_with(TEMPLATES[request.param], tmp_path_factory.mktemp("model"), special)
    with running(folder) as server, connect(server) as client:
        yield request.param, client, server


def connect(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **change: Any) -> ChatCompletion:
    """Return the whole answer, after a check that the streamed one is equal."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": [WEATHER, TIME],
        "max_tokens": 160,
        "temperature": 0,
        **change,
    }
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion()
    for choice, other in zip(whole.choices, streamed.choices, strict=True):
        assert choice.finish_reason == other.finish_reason
        assert (choice.message.content or "") == (other.message.content or "")
        assert calls_of(choice.message) == calls_of(other.message)
    return whole


def calls_of(message: Any) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def check(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    assert isinstance(values, dict)
    if name == "get_weather":
        assert values["city"] in ("Rome", "Oslo") and 1 <= values["days"] <= 9
        assert set(values) == {"city", "days"}


def test_a_named_function_is_called(tools: Any) -> None:
    _, client, server = tools
    answer = ask(client, tool_choice=NAMED)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [(name, arguments)] = calls_of(choice.message)
    assert name == "get_weather"
    check(name, arguments)
    blocks, free = server.pool()
    assert blocks == free


def test_a_required_call_follows_its_schema(tools: Any) -> None:
    _, client, _ = tools
    other = {"type": "function", "function": {"name": "other", "parameters": SCHEMA}}
    options = {"tools": [WEATHER, other], "tool_choice": "required", "parallel_tool_calls": False}
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(ask, client, temperature=1, seed=s, **options) for s in range(3)]
    for answer in (future.result() for future in answers):
        [(name, arguments)] = calls_of(answer.choices[0].message)
        assert answer.choices[0].finish_reason == "tool_calls" and name in ("get_weather", "other")
        check("get_weather", arguments)


def test_a_call_that_the_model_writes_is_parsed(tools: Any) -> None:
    form, client, _ = tools
    text = WRITTEN[form]
    exactly = {"structured_outputs": {"grammar": f"start: {spelled(form, text)}"}}
    answer = ask(client, extra_body=exactly)
    message = answer.choices[0].message
    assert calls_of(message) == [("get_weather", ARGUMENTS)]
    assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
    length = len(message.tool_calls[0].id)  # type: ignore[index]
    assert length == (9 if form == "mistral" else 29)


def spelled(form: str, text: str) -> str:
    """Return a text for a grammar. Mistral's mark is the last token of the vocabulary."""
    if form == "mistral":
        return f"<[2047]> {json.dumps(text.removeprefix('[TOOL_CALLS]'))}"
    return json.dumps(text)


def test_calls_are_not_parsed_with_tool_choice_none(tools: Any) -> None:
    _, client, _ = tools
    exactly = {"structured_outputs": {"choice": ['{"name": "get_time", "parameters": {}}']}}
    answer = ask(client, tool_choice="none", extra_body=exactly)
    assert answer.choices[0].message.content == '{"name": "get_time", "parameters": {}}'
    assert answer.choices[0].finish_reason == "stop"


def test_the_next_turn_hits_the_call(tools: Any) -> None:
    _, client, _ = tools
    answer = ask(client, tool_choice=NAMED)
    [call] = answer.choices[0].message.tool_calls or []
    turns = [
        *MESSAGES,
        answer.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "Sun, 25 degrees"},
    ]
    body: Any = {"model": "tiny", "messages": turns, "tools": [WEATHER, TIME], "max_tokens": 4}
    usage = client.chat.completions.create(**body).usage
    assert (
        answer.usage is not None and usage is not None and usage.prompt_tokens_details is not None
    )
    assert usage.prompt_tokens_details.cached_tokens >= answer.usage.total_tokens - 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "not one of the tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "the same name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "allowed: 1 to 128"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "allowed: 1 to 128"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "x", "parameters": {"type": 7}}}
                ],
            },
            "cannot be followed",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "allowed: one"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "a tool call is",
        ),
    ],
)
def test_bad_tools_are_refused(tools: Any, change: dict[str, Any], says: str) -> None:
    _, client, server = tools
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], **change}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body, stream=stream)
        assert says in caught.value.message
    blocks, free = server.pool()
    assert blocks == free


def test_tools_are_refused_by_a_model_without_tools(server: Running) -> None:
    with connect(server) as client:
        with pytest.raises(openai.BadRequestError, match="has no known tool call format"):
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,  # type: ignore[arg-type]
                tools=[WEATHER],  # type: ignore[list-item]
            )
        forced = ask(client, tool_choice=NAMED)
        check(*calls_of(forced.choices[0].message)[0])


@pytest.fixture(scope="module")
def thinker(thinking_server: Running) -> Iterator[openai.OpenAI]:
    with connect(thinking_server) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_separate_from_content(thinker: openai.OpenAI, stream: bool) -> None:
    grammar = 'start: "<think>\\nSun, I think.\\n</think>\\n\\nIt is sunny."'
    parts = read_parts(thinker, stream, structured_outputs={"grammar": grammar})
    assert parts == ("Sun, I think.", "It is sunny.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_may_start_the_reasoning(thinker: openai.OpenAI, stream: bool) -> None:
    reasoning, content, reason = read_parts(thinker, stream, min_tokens=9)
    assert reasoning and not content and reason == "length"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    assert read_parts(thinker, stream, min_tokens=9, response_format=schema)[1] == ""


def read_parts(client: openai.OpenAI, stream: bool, **more: Any) -> tuple[str, str, str | None]:
    """Return the reasoning, the content and the finish reason."""
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 64, "extra_body": more}
    answer = client.chat.completions.create(model="tiny", temperature=0, stream=stream, **body)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        parts = [choice.delta for choice in choices]
    else:
        choices = answer.choices
        parts = [choice.message for choice in choices]
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    return reasoning, "".join(part.content or "" for part in parts), choices[-1].finish_reason


def test_a_forced_call_cut_off_before_its_name_is_not_content(tools: Any) -> None:
    _, client, _ = tools
    body = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 2}
    choice = client.chat.completions.create(**body, tool_choice="required").choices[0]
    assert choice.finish_reason == "length" and calls_of(choice.message) == []
    assert not choice.message.content
    chunks = client.chat.completions.create(**body, tool_choice="required", stream=True)
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_legacy_functions(tools: Any) -> None:
    """The predecessor of tools: an answer has one `function_call`, whole and streamed."""
    _, client, _ = tools
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "functions": [WEATHER["function"], TIME["function"]],
        "function_call": {"name": "get_weather"},
        "max_tokens": 160,
        "temperature": 0,
    }
    choice = client.chat.completions.create(**body).choices[0]
    call = choice.message.function_call
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    check(call.name, call.arguments)
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    pieces = [chunk.delta.function_call for chunk in deltas if chunk.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
    assert "".join(piece.arguments for piece in pieces) == call.arguments
    assert deltas[-1].finish_reason == "function_call"
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    history = [*MESSAGES, choice.message.model_dump(), result]
    client.chat.completions.create(**body | {"messages": history, "max_tokens": 2})
    with pytest.raises(openai.BadRequestError, match="both set"):
        client.chat.completions.create(**body, tools=[WEATHER])
