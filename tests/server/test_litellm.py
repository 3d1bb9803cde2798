"""litellm against the server, over a socket, by its OpenAI and Anthropic routes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.clients import import_quietly
from tests.server.running import Running

# It looks up prices in the network as it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
pytestmark = pytest.mark.skipif(find_spec("litellm") is None, reason="there is no litellm")

QUESTION = [{"role": "user", "content": "Ben is 45 years old. What is the age of Ben?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CHOICE = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import litellm without its telemetry and warnings."""
    litellm = import_quietly("litellm")
    monkeypatch.setattr(litellm, "telemetry", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield litellm


@pytest.fixture(params=["openai", "anthropic"])
def route(request: pytest.FixtureRequest, tool_server: Running) -> dict[str, Any]:
    base = tool_server.url + ("/v1" if request.param == "openai" else "")
    return {"model": f"{request.param}/tiny", "api_base": base, "api_key": "none"}


def test_a_streamed_answer_matches_the_whole(litellm: Any, route: dict[str, Any]) -> None:
    body = {**route, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    answer = litellm.completion(**body)
    text = answer.choices[0].message.content
    assert text and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_a_function_is_called(litellm: Any, route: dict[str, Any]) -> None:
    body = {**route, "messages": QUESTION, "max_tokens": 99, "tools": [WEATHER]}
    body |= {"tool_choice": CHOICE, "temperature": 0}
    answer = litellm.completion(**body)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = list(litellm.completion(**body, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    [streamed] = whole.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    for message in (answer.choices[0].message, whole.choices[0].message):
        for form in (message.model_dump(), message.model_dump(exclude_none=True), message.json()):
            result = {"role": "tool", "tool_call_id": form["tool_calls"][0]["id"], "content": "ok"}
            turn = {**body, "messages": [*QUESTION, form, result], "tool_choice": "auto"}
            assert litellm.completion(**turn).choices[0].finish_reason


def test_errors_have_litellms_types(litellm: Any, route: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**route, "model": route["model"] + "x"}, messages=QUESTION)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**route, messages=QUESTION, temperature=-1)


def test_a_too_long_prompt_raises_a_context_window_error(
    litellm: Any, route: dict[str, Any]
) -> None:
    """Programs shorten their conversations on this error."""
    for text in ("x " * 5_000, "x" * 1_000_000):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**route, messages=[{"role": "user", "content": text}], max_retries=0)
