"""Long work runs in threads, as it would block all streams in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from headstart.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from headstart.frontend.grammar import GrammarCompiler
from headstart.server import app, chats
from headstart.server.answers import AnswerParser
from headstart.server.anthropic import messages as breakpoints
from headstart.server.anthropic.schema import CountTokensRequest
from headstart.server.openai import api as openai_api
from headstart.server.responses import api as responses_api
from headstart.server.responses.schema import InputTokensRequest
from headstart.server.stores import ResponseStore
from tests.server.running import Running
from tests.server.scripted import scripted
from tests.server.tenants.test_isolation import picture

PADDING = "Anna is 31 years old. " * 2000  # a body that is long
BODY = {"model": "tiny", "max_tokens": 1}


class Watched:
    """Records the threads in which a function runs, and the event loop's thread."""

    def __init__(self, server: Running, patch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.loops: set[int] = set()
        self._patch = patch
        of = server.service.tenants.of  # which the loop calls for every request
        patch.setattr(server.service.tenants, "of", self._noting(self.loops.add, of))

    def _noting(self, note: Callable[[int], object], run: Callable[..., Any]) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            note(threading.get_ident())
            return run(*args, **options)

        return noted

    def watch(self, where: object, name: str) -> None:
        noted = self._noting(self.threads.append, getattr(where, name))
        self._patch.setattr(where, name, noted)

    def ran_outside(self) -> bool:
        return bool(self.threads) and bool(self.loops) and not self.loops & set(self.threads)


@pytest.fixture()
def watched(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    yield Watched(server, monkeypatch)


def post(server: Running, path: str, **change: object) -> httpx.Response:
    return httpx.post(server.url + path, json={**BODY, **change}, timeout=60)


def chat(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [5] * 20_000}, 400),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": list(range(2000)) * 20}, 200),
        ("/v1/chat/completions", {"messages": chat([{"type": "text", "text": "a"}] * 1500)}, 200),
        ("/v1/messages", {"messages": chat(PADDING)}, 400),
        ("/v1/responses", {"input": PADDING, "max_output_tokens": 16}, 400),
        ("/tokenize", {"prompt": PADDING}, 200),
        ("/detokenize", {"tokens": [5] * 20_000}, 400),
        ("/cache/explain", {"prompt": PADDING}, 400),
        ("/cache/reset", {"what": PADDING}, 400),
        ("/v1/completions%0A", {"prompt": [5] * 20_000}, 400),  # FastAPI's routes take it
    ],
)
def test_long_bodies_are_read_in_threads(
    server: Running,
    watched: Watched,
    path: str,
    body: dict[str, object],
    status: int,
) -> None:
    watched.watch(app, "_parse_body")
    complete = {"/tokenize", "/detokenize", "/cache/explain", "/cache/reset", "/v1/responses"}
    fields = {} if path in complete else BODY
    model = {"model": "tiny"} if path == "/v1/responses" else {}
    answer = httpx.post(server.url + path, json={**fields, **model, **body}, timeout=60)
    assert answer.status_code == status, answer.text
    assert watched.ran_outside()


def test_a_short_body_is_read_without_a_thread(server: Running, watched: Watched) -> None:
    """This also shows that `Watched` detects calls in the loop."""
    watched.watch(app, "_parse_body")
    assert post(server, "/v1/completions", prompt="a").status_code == 200
    assert set(watched.threads) == watched.loops


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_prompts_are_tokenized_in_threads(server: Running, watched: Watched, path: str) -> None:
    watched.watch(server.llm.tokenizer, "encode")
    body = {"prompt": PADDING[:5000]}
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert watched.ran_outside()


def test_other_work_runs_between_two_prompts_of_a_call(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: preparing 85 prompts of 4,000 token ids blocked every stream for 0.14 s."""
    iterations: list[int] = []
    counts: list[int] = []
    prepare = server.service.prepare

    async def note(*args: Any, **options: Any) -> Any:
        counts.append(len(iterations))
        asyncio.get_running_loop().call_soon(iterations.append, 1)
        return await prepare(*args, **options)

    monkeypatch.setattr(server.service, "prepare", note)
    assert post(server, "/v1/completions", prompt=[[5, i] for i in range(4)]).status_code == 200
    assert counts == [0, 1, 2, 3]


def test_token_ids_are_decoded_in_threads(server: Running, watched: Watched) -> None:
    watched.watch(server.llm.tokenizer, "decode")
    answer = httpx.post(server.url + "/detokenize", json={"tokens": [5, 6]}, timeout=60)
    assert answer.status_code == 200 and watched.ran_outside()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_chats_are_rendered_in_threads(server: Running, watched: Watched, path: str) -> None:
    watched.watch(server.llm.tokenizer, "apply_chat_template")
    body: dict[str, object] = {"messages": chat("Hello")} | BODY
    if path == "/v1/responses":
        body = {"model": "tiny", "input": "Hello", "max_output_tokens": 16}
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert watched.ran_outside()


@pytest.mark.parametrize(
    ("where", "step", "path", "more"),
    [
        (InputTokensRequest, "read_messages", "/v1/responses", {}),
        (ResponseStore, "add", "/v1/responses", {}),
        (CountTokensRequest, "read_messages", "/v1/messages", {"max_tokens": 1}),
        (breakpoints, "read_breakpoints", "/v1/messages", {"max_tokens": 1}),
        (CountTokensRequest, "read_messages", "/v1/messages/count_tokens", {}),
    ],
)
@pytest.mark.parametrize("count", [3, 5])
def test_many_messages_are_read_and_stored_in_threads(
    server: Running,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    step: str,
    path: str,
    more: dict[str, object],
    count: int,
) -> None:
    """Regression: 20,000 items blocked every stream for 28 ms, and storing them for 56 ms."""
    monkeypatch.setattr(chats, "_MANY", 3)
    watched.watch(where, step)
    messages = chat("Hi") * count
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages}
    answer = httpx.post(server.url + path, json={"model": "tiny", **body, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert watched.ran_outside() == (count == 5)


def test_many_parts_of_a_message_are_read_in_a_thread(
    server: Running, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "_MANY", 3)
    watched.watch(CountTokensRequest, "read_messages")
    content = [{"type": "text", "text": "a"}] * 3
    assert post(server, "/v1/messages", messages=chat(content)).status_code == 200
    assert watched.ran_outside()


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_openapi_description_is_built_in_a_thread(
    server: Running, watched: Watched, path: str
) -> None:
    """Regression: the first request, even without a key, blocked every stream for 0.3 s."""
    watched.watch(server.app, "openapi")
    assert httpx.get(server.url + "/v1/models").status_code == 200  # which shows the loop's thread
    assert httpx.get(server.url + path, timeout=60).status_code == 200
    assert watched.ran_outside()


def test_grammars_are_compiled_in_threads(server: Running, watched: Watched) -> None:
    watched.watch(GrammarCompiler, "matcher")
    schema = {"type": "object", "properties": {"never compiled before": {"type": "null"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = post(server, "/v1/chat/completions", messages=chat("Hi"), response_format=form)
    assert answer.status_code == 200, answer.text
    assert watched.ran_outside()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_read_in_threads(
    server: Running, watched: Watched, path: str, is_long: bool, stream: bool
) -> None:
    """Regression: 40,000 characters blocked every stream for 60 ms.

    A stream has as many at once when its client has not read for a while."""
    watched.watch(AnswerParser, "feed")
    body: dict[str, object] = {"messages": chat("Hello")} | BODY
    if path == "/v1/responses":
        body = {"model": "tiny", "input": "Hello"}
    text = PADDING.strip() if is_long else "Anna"
    with scripted(server, [text]):
        answer = httpx.post(server.url + path, json=body | {"stream": stream}, timeout=60)
    assert answer.status_code == 200 and text in answer.text
    assert watched.ran_outside() == is_long


@pytest.mark.parametrize("count", [8, 300])
def test_many_log_probabilities_of_a_streamed_chat_are_built_in_threads(
    server: Running, watched: Watched, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Regression: a client that resumed after a thousand tokens blocked every stream for 40 ms."""
    rows: list[Logprobs] = [{i: Logprob(-1.0, i + 1, "a") for i in range(20)}] * count

    async def run(request: Any) -> AsyncGenerator[RequestOutput]:
        answer = CompletionOutput(0, "a" * count, [0] * count, None, rows, "stop")
        yield RequestOutput(request.request_id, None, [5], None, [answer], finished=True)

    monkeypatch.setattr(server.service, "run", run)
    watched.watch(openai_api, "chat_logprobs")
    more = {"messages": chat("Hi"), "logprobs": True, "top_logprobs": 20, "stream": True}
    events = post(server, "/v1/chat/completions", **more).text.split("\n\n")
    tokens = [entry for event in events for entry in event.split('"top_logprobs":')[1:]]
    assert len(tokens) == count and events[-2:] == ["data: [DONE]", ""]
    assert watched.ran_outside() == (count == 300)


def test_many_log_probabilities_are_built_in_threads(
    server: Running, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: log-probabilities of 8,000 tokens blocked every stream for 0.3 s."""
    for count in (8, 300):
        watched.threads.clear()
        watched.watch(openai_api, "prompt_logprobs")
        answer = post(server, "/v1/completions", prompt=[5] * count, prompt_logprobs=20)
        assert len(answer.json()["choices"][0]["prompt_logprobs"]) == count
        assert watched.ran_outside() == (count == 300)


def test_a_long_prompt_is_echoed_into_a_stream_in_a_thread(
    server: Running, watched: Watched
) -> None:
    watched.watch(openai_api, "completion_logprobs")
    more = {"logprobs": 20, "echo": True, "stream": True, "max_tokens": 1}
    answer = post(server, "/v1/completions", prompt=[5] * 300, **more)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert watched.ran_outside()


def test_the_end_of_a_streamed_response_is_built_in_a_thread(
    thinking_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the tokens of the reasoning, which takes 1 ms for a thousand characters."""
    watched = Watched(thinking_server, monkeypatch)
    watched.watch(thinking_server.llm.tokenizer, "encode")
    body = {"model": "tiny", "input": "Hello", "stream": True}
    with scripted(thinking_server, ["Hm. ", "</think>", "Yes"]):
        answer = httpx.post(thinking_server.url + "/v1/responses", json=body, timeout=60)
    assert '"reasoning_tokens":0' not in answer.text and "response.completed" in answer.text
    assert watched.ran_outside()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("where", "step"),
    [(responses_api, "_repeat"), (responses_api, "encode"), (ResponseStore, "add")],
)
def test_long_tools_are_encoded_once_and_in_threads(
    server: Running, watched: Watched, where: object, step: str, stream: bool
) -> None:
    """Regression: 2 MB of tools blocked every stream for 64 ms, as they were encoded repeatedly."""
    watched.watch(where, step)
    tools = [{"type": "function", "name": f"f{i}", "description": "x" * 2000} for i in range(40)]
    body = {"model": "tiny", "input": "Hi", "tools": tools, "tool_choice": "none"}
    response = httpx.post(server.url + "/v1/responses", json=body | {"stream": stream}, timeout=60)
    assert response.status_code == 200 and response.text.count('"f39"') == (3 if stream else 1)
    assert watched.ran_outside()
    assert step == "add" or len(watched.threads) == 1


def test_images_are_decoded_in_threads(
    image_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(image_server, monkeypatch)
    watched.watch(Image, "open")
    content = [{"type": "image_url", "image_url": {"url": picture(7)}}]
    answer = post(image_server, "/v1/chat/completions", messages=chat(content))
    assert answer.status_code == 200, answer.text
    assert watched.ran_outside()


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_entries_of_sampling_options_are_bounded(server: Running, name: str) -> None:
    def ask(count: int) -> httpx.Response:
        ids = [i % 2000 for i in range(count)]
        bias = {f"{i:06}": 1 for i in range(count)}
        entries = ids if name == "stop_token_ids" else bias
        return post(server, "/v1/completions", prompt="a", **{name: entries})

    refused = ask(16_385)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    assert (
        refused.json()["error"]["message"] == f"{name} has 16,385 entries; allowed: 16,384 at most"
    )
    assert ask(2000).status_code == 200


def test_excessive_bodies_are_refused_before_parsing(server: Running) -> None:
    """Regression: refusing ten million token ids blocked every stream for half a second."""

    def ask(body: bytes) -> Any:
        kind = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=kind, timeout=60)
        assert answer.status_code == 400
        return answer.json()["error"]

    ids = ask(b'{"model": "tiny", "prompt": [%s]}' % b",".join([b"5"] * 300_000))
    assert ids["code"] == "context_length_exceeded"
    endless = ask(b'{"model": "tiny", "prompt": [%s' % (b"5," * (1 << 20)))
    assert endless["message"].startswith("the body has more than 1,048,576 values")
    objects = ask(b'{"model": "tiny", "prompt": [%s]}' % b",".join([b"{}"] * 40_000))
    assert objects["message"].startswith("the body has more than 20,000 objects")
    text = ask(b'{"model": "tiny", "prompt": "%s"}' % (b"{" * 50_000))  # no objects
    assert text["code"] == "context_length_exceeded"
