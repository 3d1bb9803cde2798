"""Progress of a prompt in the stream of its answer."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headstart.server.openai import api
from tests.server.running import Running, running

PROMPT = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 40


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_num_batched_tokens=32) as server:
        yield server


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_PROGRESS_SECONDS", 0.0005)


def body(**fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": PROMPT + "How old is Ben?"}
    return {"messages": [message], "temperature": 0, "max_tokens": 4, "stream": True, **fields}


def stream(server: Running, **fields: Any) -> list[dict[str, Any]]:
    url = f"{server.url}/v1/chat/completions"
    text = httpx.post(url, json=body(**fields), timeout=60).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_progress_grows_to_the_prompts_length_before_the_answer(server: Running) -> None:
    options = {"stream_options": {"include_usage": True}}
    events = stream(server, return_progress=True, **options)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    total = events[-1]["usage"]["prompt_tokens"]
    assert len(progress) > 2
    assert all(event["choices"] == [] for event in events[: len(progress)])
    processed = [event["processed"] for event in progress]
    assert processed == sorted(set(processed))
    assert 0 < processed[0] < processed[-1] <= total
    assert {(event["total"], event["cache"]) for event in progress} == {(total, 0)}
    plain = stream(server, no_read=True, **options)
    assert all("prompt_progress" not in event for event in plain)
    assert text_of(events) == text_of(plain) != ""


def test_a_client_that_disconnects_during_prefill_ends_its_request(server: Running) -> None:
    url = f"{server.url}/v1/chat/completions"
    request = body(return_progress=True, no_read=True)
    with httpx.stream("POST", url, json=request, timeout=60) as response:
        assert "prompt_progress" in next(response.iter_lines())
    stream(server)  # which is answered after the disconnected one
    num_blocks, num_free = server.pool()
    assert num_free == num_blocks
