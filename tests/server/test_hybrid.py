"""Chats, forks, aborts and checkpoints of a model with recurrent layers behind a server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.server.running import Running, running
from tests.tiny_models import save_chatting, tiny_config

TEXT = "the other day they went there together, then rather later than the weather let them "
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture(params=["lfm2", "qwen3_5_text"])
def hybrid(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """Run a server of a tiny model that checks its invariants after every step."""
    folder = save_chatting(request.param, tmp_path)
    with running(folder, num_blocks=64, num_states=16, debug=True) as server:
        yield server
        blocks, free = server.pool()
        assert blocks == free


def read_metrics(url: str) -> dict[str, float]:
    """Return the values of headstart's metrics, without the model's label."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    values = (re.fullmatch(r'headstart:(\S+?)\{model_name="tiny",?(.*)\} (.*)', x) for x in lines)
    return {f"{m[1]} {m[2]}".strip(): float(m[3]) for m in values if m is not None}


def test_a_chat_resumes_where_its_last_turn_ended(hybrid: Running) -> None:
    client = OpenAI(base_url=f"{hybrid.url}/v1", api_key="none", max_retries=0)
    chat: list[Any] = list(CHAT)
    # Only letters, since a reply of unfinished characters is tokenized again.
    letters = {"logit_bias": {str(token): 100 for token in (69, 70, 71)}}
    cached = 0
    for _ in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=chat, max_tokens=10, temperature=0, extra_body=letters
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
        cached = answer.usage.total_tokens - 1  # the last token of a reply is not computed
        reply = answer.choices[0].message.content
        chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then"}]


def test_several_answers_and_disconnected_clients(hybrid: Running) -> None:
    client = OpenAI(base_url=f"{hybrid.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0, "seed": 1}
    first = client.chat.completions.create(**body, max_tokens=8, n=3)
    assert len({choice.message.content for choice in first.choices}) == 1
    for count in range(3):
        stream = client.chat.completions.create(
            **body, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        for _, _ in zip(range(count), stream, strict=False):
            pass
        stream.close()
    again = client.chat.completions.create(**body, max_tokens=8)
    assert again.choices[0].message.content == first.choices[0].message.content
    deadline = time.monotonic() + 60
    while read_metrics(hybrid.url)['state_slots use="running"']:
        assert time.monotonic() < deadline


def test_salts_do_not_share_states(hybrid: Running) -> None:
    def ask(salt: str) -> int:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "cache_salt": salt}
        usage = httpx.post(f"{hybrid.url}/v1/chat/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert ask("a") == 0 and ask("a") > 20 and ask("b") == 0


def test_checkpoints_in_reports(hybrid: Running) -> None:
    def ask(prompt: str, path: str = "/v1/completions") -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return httpx.post(hybrid.url + path, json=body).json()

    ask(3 * TEXT)
    fork = 2 * TEXT + "x"
    missed = ask(fork, "/cache/explain")
    assert missed["reason"] == "state" and missed["cached_tokens"] == 0
    [num_computed] = re.findall(
        r"cached up to token (\d+), but no checkpoint to resume from", missed["text"]
    )
    ask(fork)
    assert ask(fork, "/cache/explain")["reason"] == "none"
    look = httpx.get(f"{hybrid.url}/cache").json()
    states = look["states"]
    assert states["slots"] == 16 == states["checkpoints"] + states["free"]
    assert states["running"] == states["dropped"] == 0
    assert look["recomputed_tokens"] == int(num_computed)
    assert sum(prefix["checkpoints"] for prefix in look["prefixes"]) == states["checkpoints"] > 2
    metrics = read_metrics(hybrid.url)
    assert metrics['state_slots use="checkpoint"'] == states["checkpoints"]
    assert metrics['state_slots use="free"'] == states["free"]
    assert metrics["checkpoints_dropped_total"] == 0
    assert metrics["recomputed_tokens_total"] == int(num_computed)
    assert metrics['prefix_cache_misses_total reason="state"'] == 1


def test_window_blocks_in_reports(tmp_path: Path) -> None:
    """Blocks of sliding-window layers are counted by use."""
    folder = save_chatting("gemma3", tmp_path)
    with running(folder, num_blocks=256, debug=True) as server:
        body = {"model": "tiny", "prompt": 3 * TEXT, "max_tokens": 1}
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
        windows = httpx.get(f"{server.url}/cache").json()["windows"]
        metrics = read_metrics(server.url)
    assert windows["tokens"] == tiny_config("gemma3").sliding_window
    assert windows["held"] == 0 < windows["cached"] == windows["blocks"] - windows["empty"]
    for use in ("held", "cached", "empty"):
        assert metrics[f'window_blocks use="{use}"'] == windows[use]
    assert metrics["window_blocks_evicted_total"] == windows["evicted"]


def test_images_are_refused(hybrid: Running) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    answer = httpx.post(f"{hybrid.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "the model takes only text" in answer.json()["error"]["message"]
