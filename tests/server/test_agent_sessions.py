"""Sessions of coding agents over HTTP: each request is answered, and hits the earlier turns.

The model is real. Grammars force its answers to the texts of a script, in tokens that it chooses.
A client sends them back as text, with the changes that the agent makes.
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
    (PROSE + "  \n", (), "question"),
    ("I write.", (WRITE,), "cut"),
    (PROSE + " So I fix it.", (), "stops"),
    ("", (WRITE,), "results"),
)
"""Answers with their calls, and the kind of the next message."""


@dataclass
class Turn:
    """A prompt of a session, its cached tokens, and the tokens of the answer."""

    prompt: list[int]
    cached: int
    answer: list[int]


@contextmanager
def recorded(server: Running, script: dict[str, Any]) -> Iterator[list[Turn]]:
    """Force answers to the text in `script`, or a part of it, and record each request's tokens."""
    turns: list[Turn] = []
    params, run = server.service.params, server.service.run

    def force(fields: dict[str, Any], *, stream: bool) -> Any:
        fields = {**fields, "temperature": 0, "max_tokens": 4}
        if script["text"]:
            length = len(server.llm.tokenizer.encode(script["text"])) * 3 // 4
            fields["max_tokens"] = length if script["is_cut"] else None
            fields["structured_outputs"] = StructuredOutputsParams(choice=[script["text"]])
        return params(fields, stream=stream)

    async def note(request: Any) -> AsyncGenerator[Any]:
        turn = Turn(list(request.prompt_token_ids), 0, [])
        turns.append(turn)
        async for output in run(request):
            turn.cached = output.num_cached_tokens
            turn.answer += output.outputs[0].token_ids
            yield output

    server.service.params = force  # type: ignore[method-assign]
    server.service.run = note  # type: ignore[method-assign, assignment]
    try:
        yield turns
    finally:
        del server.service.params, server.service.run


def lengthened(folder: Path) -> Path:
    """Extend the context of a model, and return its folder."""
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
def vision_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
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
    """Send the next request; disconnect after `most` events if it is set."""
    with client.stream("POST", agent.path, json=agent.body()) as response:
        assert response.status_code == 200, response.read()
        return agent.read(islice(events_of(response.iter_lines()), most))


def play(
    client: httpx.Client, agent: Agent, script: dict[str, Any], count: int, thought: str
) -> None:
    """Play `count` turns of a session whose first question was added."""
    for turn in range(count):
        text, calls, then = SCRIPT[turn % len(SCRIPT)]
        script |= {"text": thought + agent.write(text, calls), "is_cut": then == "cut"}
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
    script: dict[str, Any] = {"text": None}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        recorded(server, script) as turns,
    ):
        agent.ask("Fix the tests, please.", image)
        for path, body in agent.background():
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        turns.clear()
        play(client, agent, script, count, thought)
    assert len(turns) == count
    return turns


def hit_rate(turns: list[Turn]) -> float:
    """Return the share of cached tokens in the prompts after the first."""
    later = turns[1:]
    return sum(turn.cached for turn in later) / sum(len(turn.prompt) for turn in later)


def count_same(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    sizes = range(1, min(len(first), len(second)) + 1)
    return bisect_left(sizes, True, key=lambda size: first[:size] != second[:size])


def check_hits(server: Running, agent: Agent, turns: list[Turn]) -> None:
    """Check that each prompt hits the text that it shares with an earlier prompt and answer.

    Texts are compared, as a client's text may have other tokens than the answer had.
    """
    decode = server.llm.tokenizer.decode
    texts: list[str] = []
    for place, turn in enumerate(turns):
        prompt, hit = decode(turn.prompt), len(decode(turn.prompt[: turn.cached]))
        common = max((count_same(prompt, text) for text in texts), default=0)
        then = SCRIPT[(place - 1) % len(SCRIPT)][2]
        # The last characters may be part of another token in the next prompt.
        assert hit >= common - 8, (place, then, prompt[hit:common])
        if place and agent.keeps_prompt and then not in ("cut", "stops"):
            assert common >= len(texts[-1].rstrip()), (place, then, texts[-1][common:])
        texts.append(decode(turn.prompt + turn.answer))


@pytest.mark.parametrize("make", AGENTS)
def test_a_session_hits_its_earlier_turns(agent_server: Running, make: type[Agent]) -> None:
    agent = make()
    turns = session(agent_server, agent, TURNS)
    check_hits(agent_server, agent, turns)
    assert hit_rate(turns) >= 0.95


@pytest.mark.parametrize("make", [ClaudeCode, OpenCode, Cline])
def test_a_session_with_an_image(vision_server: Running, make: type[Agent]) -> None:
    agent = make()
    turns = session(vision_server, agent, len(SCRIPT), image=png_of(1))
    check_hits(vision_server, agent, turns)
    assert hit_rate(turns) >= 0.95


@pytest.mark.parametrize("make", [Codex])
def test_reasoning_is_sent_back(reasoning_server: Running, make: type[Agent]) -> None:
    """Codex sends back encrypted reasoning instead of its text."""
    agent = make()
    thought = "I think \u00e9.\n</think>\n\n"
    turns = session(reasoning_server, agent, len(SCRIPT), thought=thought)
    check_hits(reasoning_server, agent, turns)
