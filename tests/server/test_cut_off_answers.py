"""Clients of incomplete answers get an error, not a shorter answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from headstart.server.service import Calls
from tests.clients import anthropic, openai
from tests.server.running import Running, running
from tests.server.scripted import scripted

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
ENDLESS = ["word " * 2000] * 10_000  # 10 KB each


@pytest.fixture(scope="module")
def short_time() -> Iterator[Running]:
    """Run a server whose answers may take half a second, without a grace period."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.server.middleware._GRACE", 0.0)
        with running(send_buffer=1 << 16) as server:
            server.service.calls = Calls(8, 8, seconds=0.5)  # but connections live on
            yield server


def complete(url: str) -> Any:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return api.completions.create(model="tiny", prompt="Hello", stream=True)


def chat(url: str) -> Any:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)


def respond(url: str) -> Any:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return api.responses.create(model="tiny", input="Hello", stream=True)


def message(url: str) -> Any:
    api = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    return api.messages.create(model="tiny", messages=MESSAGES, max_tokens=1000, stream=True)


@pytest.mark.parametrize("ask", [complete, chat, respond, message])
def test_a_slow_reader_gets_an_error_for_a_cut_off_stream(
    ask: Callable[[str], Any], short_time: Running
) -> None:
    """The timeout passes while an event waits to be sent, so no event can report it."""
    with scripted(short_time, ENDLESS):
        stream = ask(short_time.url)
        with pytest.raises(Exception, match="incomplete chunked read"):
            for _ in stream:
                if short_time.service.calls.num_slots:
                    time.sleep(0.01)


def test_a_slow_reader_gets_an_error_for_a_cut_off_answer(short_time: Running) -> None:
    """The client compares its length with Content-Length."""
    body = {"model": "tiny", "prompt": "Hello"}
    url = f"{short_time.url}/v1/completions"
    with (
        scripted(short_time, ["word " * 2_000_000]),
        httpx.stream("POST", url, json=body) as answer,
        pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"),
    ):
        assert answer.status_code == 200
        for _ in answer.iter_raw(1 << 14):
            if short_time.service.calls.num_slots:
                time.sleep(0.01)
