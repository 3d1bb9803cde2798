"""Sessions of coding agents over HTTP: every request is answered, and hits what came before.

The model is a real one. Its answers are led to the texts of a script, which it spells in tokens of
its own choice: a client brings them back as text, changed as the agent changes them.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.engine.structured_outputs import StructuredOutputsParams
from tests.server.agent_clients import (
    AGENTS,
    Agent,
    Call,
    ClaudeCode,
    Cline,
    Codex,
    OpenCode,
    Reply,
)
from tests.server.running import Running, running
from tests.server.templates import HERMES, THINKING, model_with, png_of
from tests.tiny_vision import save_tiny_vision

TURNS = 8  # through the script, and once more
HEARD = 12
"""Events that a client receives before its user stops the answer."""
PROSE = "The test fails since x is 1."
READ: Call = ("read", {"file_path": "/a/b.py"})
RUN: Call = ("run", {"command": "ls \u00e9"})
WRITE: Call = ("write", {"file_path": "/a/b.py", "content": 'print("a\\n")\n'})

SCRIPT: tuple[tuple[str, tuple[Call, ...], str], ...] = (
    (PROSE, (READ,), "results"),
    ("", (READ,), "errors"),
    ("Now both.", (READ, RUN), "results"),
    (PROSE + "  \n", (), "asks"),
    ("I write.", (WRITE,), "cut"),
    (PROSE + " So I fix it.", (), "stops"),
    ("", (WRITE,), "results"),
)
"""Answers with their calls, and what comes next."""


@dataclass
class Turn:
    """A prompt of a session, its cached tokens, and the tokens of the answer."""

    prompt: list[int]
    cached: int
    answer: list[int]


@contextmanager
def recorded(server: Running, said: dict[str, Any]) -> Iterator[list[Turn]]:
    """Lead answers to the text in `said`, or a part of it, and note the tokens of each request."""
    turns: list[Turn] = []
    params, run = server.service.params, server.service.run

    def lead(given: dict[str, Any], *, stream: bool) -> Any:
        given = {**given, "temperature": 0, "max_tokens": 4}
        if said["text"]:
            length = len(server.llm.tokenizer.encode(said["text"])) * 3 // 4
            given["max_tokens"] = length if said["is_cut"] else None
            given["structured_outputs"] = StructuredOutputsParams(choice=[said["text"]])
        return params(given, stream=stream)

    async def note(request: Any) -> AsyncGenerator[Any]:
        turn = Turn(list(request.prompt_token_ids), 0, [])
        turns.append(turn)
        async for output in run(request):
            turn.cached = output.num_cached_tokens
            turn.answer += output.outputs[0].token_ids
            yield output

    server.service.params = lead  # type: ignore[method-assign]
    server.service.run = note  # type: ignore[method-assign, assignment]
    try:
        yield turns
    finally:
        del server.service.params, server.service.run


def lengthened(folder: Path) -> Path:
    """Have a model take longer prompts."""
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 32768
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = lengthened(model_with(HERMES, tmp_path_factory.mktemp("agents")))
    with running(folder, any_model=True, num_blocks=2048) as server:
        yield server


@pytest.fixture(scope="module")
def reasoning_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model whose prompts begin its reasoning."""
    folder = lengthened(model_with(THINKING, tmp_path_factory.mktemp("reasoning")))
    with running(folder, any_model=True, num_blocks=2048) as server:
        yield server


@pytest.fixture(scope="module")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that takes images and calls tools in Hermes' format."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copytree(save_tiny_vision("llava", tmp_path_factory.mktemp("llava")), folder / "model")
    content = "{{- message['content'] -}}"
    parts = (
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}<image>"
        "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    )
    assert content in HERMES
    (folder / "model" / "chat_template.jinja").write_text(HERMES.replace(content, parts))
    with running(lengthened(folder / "model"), any_model=True, num_blocks=4096) as server:
        yield server


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Return the events of a stream."""
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    return (json.loads(text) for text in data if text != "[DONE]")


def send(client: httpx.Client, agent: Agent, most: int | None = None) -> Reply:
    """Send the next request; with `most` the client hangs up after so many events."""
    with client.stream("POST", agent.path, json=agent.body()) as response:
        assert response.status_code == 200, response.read()
        return agent.read(islice(events_of(response.iter_lines()), most))


def play(
    client: httpx.Client, agent: Agent, said: dict[str, Any], count: int, thought: str
) -> None:
    """Have a session of `count` turns, of which the first was asked."""
    for turn in range(count):
        text, calls, then = SCRIPT[turn % len(SCRIPT)]
        said |= {"text": thought + agent.write(text, calls), "is_cut": then == "cut"}
        reply = send(client, agent, HEARD if then == "stops" else None)
        if then == "stops":
            agent.interrupted(reply)
            agent.ask("Go on.")
            continue
        is_cut = reply.end in ("model_context_window_exceeded", "incomplete", "length")
        assert is_cut == (then == "cut") and bool(reply.calls) == bool(calls and agent.names)
        agent.answer(reply)
        num_results = len(reply.calls) if agent.names else len(calls)
        if num_results:
            texts = [f"{n}\tx = {turn}; y = {turn * 37 % 11}" for n in range(num_results)]
            agent.results(reply, texts, failed=then in ("errors", "cut"))
        else:
            agent.ask("Thanks. Now look at the next file.")


def session(
    server: Running, agent: Agent, count: int, *, image: str | None = None, thought: str = ""
) -> list[Turn]:
    """Return the turns of a session, which begins with the agent's background requests.

    thought: text at the beginning of each answer.
    """
    said: dict[str, Any] = {"text": None}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        recorded(server, said) as turns,
    ):
        agent.ask("Fix the tests, please.", image)
        for path, body in agent.background():
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        turns.clear()
        play(client, agent, said, count, thought)
    assert len(turns) == count
    return turns


def hit_rate(turns: list[Turn]) -> float:
    """Return the share of cached tokens in the prompts after the first."""
    later = turns[1:]
    return sum(turn.cached for turn in later) / sum(len(turn.prompt) for turn in later)


def count_same(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    sizes = range(1, min(len(first), len(second)) + 1)
    return bisect_left(sizes, True, key=lambda size: first[:size] != second[:size])


def check_hits(server: Running, agent: Agent, turns: list[Turn]) -> None:
    """Check that each prompt hits the text that it shares with an earlier prompt and answer.

    The texts show what a client sent again, in whatever tokens it was read.
    """
    decode = server.llm.tokenizer.decode
    seen: list[str] = []
    for place, turn in enumerate(turns):
        prompt, hit = decode(turn.prompt), len(decode(turn.prompt[: turn.cached]))
        common = max((count_same(prompt, text) for text in seen), default=0)
        then = SCRIPT[(place - 1) % len(SCRIPT)][2]
        # A part of a token that stands at the end may belong to another in the next prompt.
        assert hit >= common - 8, (place, then, prompt[hit:common])
        if place and agent.keeps_prompt and then not in ("cut", "stops"):
            assert common >= len(seen[-1].rstrip()), (place, then, seen[-1][common:])
        seen.append(decode(turn.prompt + turn.answer))


@pytest.mark.parametrize("make", AGENTS)
def test_a_session_hits_what_came_before(agent_server: Running, make: type[Agent]) -> None:
    agent = make()
    turns = session(agent_server, agent, TURNS)
    check_hits(agent_server, agent, turns)
    assert hit_rate(turns) >= 0.95


@pytest.mark.parametrize("make", [ClaudeCode, OpenCode, Cline])
def test_a_session_with_an_image(seeing_server: Running, make: type[Agent]) -> None:
    agent = make()
    turns = session(seeing_server, agent, len(SCRIPT), image=png_of(1))
    check_hits(seeing_server, agent, turns)
    assert hit_rate(turns) >= 0.95


@pytest.mark.parametrize("make", [Codex])
def test_reasoning_comes_back(reasoning_server: Running, make: type[Agent]) -> None:
    """Codex sends no text of reasoning again, but what it was given as encrypted."""
    agent = make()
    thought = "I think \u00e9.\n</think>\n\n"
    turns = session(reasoning_server, agent, len(SCRIPT), thought=thought)
    check_hits(reasoning_server, agent, turns)
