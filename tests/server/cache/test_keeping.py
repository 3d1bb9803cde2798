"""Requests for longer retention of their prefix, or for none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients import anthropic, openai
from tests.server.running import Running, running
from tests.small_demos import shallow_built_in

PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 27 years old. " * 6
MODEL: dict[str, Any] = {"model": "tiny", "max_tokens": 1}


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "headstart.server.cache.live._PAUSE_RATIO", 0
        )  # without pauses between queries of the pool
        with running(shallow_built_in(), num_blocks=32, max_model_len=512) as server:
            yield server


@pytest.fixture
def client(small: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=60) as client:
        client.post("/cache/reset").raise_for_status()
        yield client


def flood(client: httpx.Client) -> None:
    """Send prompts with twice the size of the pool."""
    drawn = random.Random(5)
    for _ in range(8):
        prompt = [drawn.randrange(300, 2000) for _ in range(128)]
        client.post("/v1/completions", json=MODEL | {"prompt": prompt}).raise_for_status()


def cached(client: httpx.Client, **prompt: Any) -> int:
    """Return the number of cached tokens of a prompt."""
    answer = client.post("/cache/explain", json=prompt)
    return int(answer.raise_for_status().json()["cached_tokens"])


@pytest.mark.parametrize("ttl", ["5m", "1h", None])
def test_prefixes_with_anthropics_marks_survive_a_flood(
    client: httpx.Client, small: Running, ttl: str | None
) -> None:
    mark: Any = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    system: Any = [{"type": "text", "text": PEOPLE} | mark]
    with anthropic.Anthropic(base_url=small.url, api_key="none") as asker:

        def read() -> int:
            turns: Any = [{"role": "user", "content": "Who?"}]
            answer = asker.messages.create(**MODEL, system=system, messages=turns)
            return answer.usage.cache_read_input_tokens or 0

        assert read() == 0
        whole = read()
        flood(client)
        assert whole > 100
        assert read() == (pytest.approx(whole, abs=32) if ttl else 0)


def test_a_response_with_a_ttl_survives_a_flood(client: httpx.Client, small: Running) -> None:
    body = {"model": "tiny", "max_output_tokens": 1, "input": PEOPLE}
    options = {"prompt_cache_options": {"ttl": "30m"}}
    assert client.post("/v1/responses", json=body | options).status_code == 200
    prompt = {"messages": [{"role": "user", "content": PEOPLE}]}
    whole = cached(client, **prompt)
    flood(client)
    assert cached(client, **prompt) == whole - whole % 16 > 100


@pytest.mark.parametrize("retention", ["24h", "in_memory", None])
@pytest.mark.parametrize("path", ["completions", "chat", "responses"])
def test_prefixes_with_openais_retention_survive_a_flood(
    client: httpx.Client, small: Running, path: str, retention: Any
) -> None:
    more: Any = {"prompt_cache_retention": retention} if retention else {}
    turns: Any = [{"role": "user", "content": PEOPLE}]
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none") as asker:
        if path == "completions":
            asker.completions.create(**MODEL, prompt=PEOPLE, extra_body=more)
        elif path == "chat":
            asker.chat.completions.create(**MODEL, messages=turns, **more)
        else:
            asker.responses.create(model="tiny", max_output_tokens=1, input=PEOPLE, **more)
    prompt: Any = {"prompt": PEOPLE} if path == "completions" else {"messages": turns}
    whole = cached(client, **prompt)
    flood(client)
    assert whole > 100
    assert cached(client, **prompt) == (whole - whole % 16 if retention == "24h" else 0)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_no_store_leaves_nothing_in_the_cache(client: httpx.Client, path: str) -> None:
    turns = [{"role": "user", "content": PEOPLE}]
    body = {
        "completions": MODEL | {"prompt": PEOPLE},
        "chat/completions": MODEL | {"messages": turns},
        "responses": {"model": "tiny", "max_output_tokens": 1, "input": PEOPLE},
        "messages": MODEL | {"messages": turns, "cache_control": {"type": "ephemeral"}},
    }[path]
    prompt: Any = {"prompt": PEOPLE} if path == "completions" else {"messages": turns}
    answer = client.post(f"/v1/{path}", json=body | {"no_store": True})
    result = answer.raise_for_status().json()
    assert cached(client, **prompt) == 0
    assert client.get("/cache").json()["cached"] == 0
    assert client.post("/cache/explain", json=prompt).json()["closest"] is None
    if path == "responses":
        assert result["store"] is False
        assert client.get(f"/v1/responses/{result['id']}").status_code == 404
        assert result["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    if path == "messages":
        assert result["usage"]["cache_creation_input_tokens"] == 0
    client.post(f"/v1/{path}", json=body).raise_for_status()
    before = client.get("/cache").json()["cached"]
    hits = client.post(f"/v1/{path}", json=body | {"no_store": True}).json()["usage"]
    details = hits.get("prompt_tokens_details") or hits.get("input_tokens_details") or hits
    assert details.get("cached_tokens") or details["cache_read_input_tokens"], "it reads"
    assert client.get("/cache").json()["cached"] == before
