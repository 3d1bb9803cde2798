"""Two replicas of a vision model, on a separate Ray, match one engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cluster.options import ReplicaConfig
from headstart.engine.params import RequestOutputKind
from tests.cluster.serving.in_process import prompt
from tests.cluster.serving.ray_processes import process_of, wait_until
from tests.server.running import Running, running, serving
from tests.server.templates import png_of
from tests.tiny_vision import make_image

if TYPE_CHECKING:
    from headstart.cluster.serving.cluster import ReplicaCluster

pytest.importorskip("ray", reason="replicas need Ray")
# Warnings of Ray and its dependencies in this process.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

OPTIONS = {"num_blocks": 256, "dtype": "float32", "debug": True}
NAME = "llava"
# Long enough that the router prefers the replica that cached it, despite its slack.
DOCUMENT = "Anna is 31. Ben is 45. Carl is 28. Dora is 52. " * 8


class Servers(NamedTuple):
    """A server with two replicas, and a server with a local engine."""

    server: Running
    alone: Running
    replicas: ReplicaCluster


@pytest.fixture(scope="module")
def servers(demo_vision: Path) -> Iterator[Servers]:
    from headstart.cluster.serving.cluster import ReplicaCluster
    from headstart.cluster.serving.llm import router

    cluster = ReplicaCluster(
        str(demo_vision), OPTIONS, ReplicaConfig(replicas=2, replica_cpus=0.25), drain_seconds=5.0
    )
    try:
        with (
            serving(cluster.llm, "tiny", {}, cache_api=router) as server,
            running(demo_vision, **OPTIONS) as alone,
        ):
            yield Servers(server, alone, cluster)
    finally:
        cluster.close()


def _chat(question: str) -> tuple[str, dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_of(1)}"}}
    turn = {"role": "user", "content": [image, {"type": "text", "text": question}]}
    return "/v1/chat/completions", {"messages": [turn], "max_tokens": 8, "temperature": 0}


def _messages(question: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": png_of(2)}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": parts}]
    return "/v1/messages", {"messages": turns, "max_tokens": 8, "temperature": 0}


def _responses(question: str) -> tuple[str, dict[str, Any]]:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{png_of(3)}"}
    parts = [image, {"type": "input_text", "text": question}]
    turns = [{"role": "user", "content": parts}]
    return "/v1/responses", {"input": turns, "max_output_tokens": 8, "temperature": 0}


def _post(server: Running, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def _answer(reply: dict[str, Any]) -> Any:
    """Return the content of any API's answer, without ids and times."""
    if "choices" in reply:
        return reply["choices"]
    if "output" in reply:
        return [part["text"] for item in reply["output"] for part in item["content"]]
    return [part["text"] for part in reply["content"]]


@pytest.mark.parametrize("api", [_chat, _messages, _responses])
def test_each_api_matches_one_engine(servers: Servers, api: Any) -> None:
    """A second question about an image hits the first one's blocks."""
    counts = []
    for question in ("What is it?", "Who is shown?"):
        path, body = api(DOCUMENT + question)
        ours, theirs = (_post(server, path, body) for server in servers[:2])
        assert _answer(ours) == _answer(theirs) != []
        counts.append((_cached(ours["usage"]), _cached(theirs["usage"])))
    assert counts[1][0] == counts[1][1] >= len(DOCUMENT)
    assert counts[0][0] < 32, "the first prompt hits only the common start of all prompts"


def _cached(usage: dict[str, Any]) -> int:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return int(usage[name]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


def test_explain_reports_which_replica_has_an_image_prompt(servers: Servers) -> None:
    path, body = _chat(DOCUMENT + "Who is described?")
    usage = _post(servers.server, path, body)["usage"]

    def explain() -> Any:
        return _post(servers.server, "/cache/explain", {"messages": body["messages"]})

    wait_until(
        lambda: explain()["cached_tokens"] > len(DOCUMENT)
    )  # the events have arrived by then
    report = explain()
    assert report["prompt_tokens"] == usage["prompt_tokens"]
    assert report["cached_tokens"] == max(report["replicas"].values())


def test_an_invalid_image_gets_the_error_of_one_engine(servers: Servers) -> None:
    url = {"url": "data:image/png;base64,AAAA"}
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
    body = {"model": "tiny", "messages": [turn]}
    ours, theirs = (
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        for server in servers[:2]
    )
    assert ours.status_code == theirs.status_code == 400
    assert ours.json() == theirs.json()


def test_a_photograph_is_sent_to_a_replica_and_hit(servers: Servers) -> None:
    """It has two megapixels; Ray sends arguments of that size through its store."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    image = make_image(9, 1600, 1200)

    async def ask(llm: AsyncLLM, text: str) -> tuple[list[int], int]:
        async for output in llm.generate(prompt(text, image, name=NAME), params):
            final = output
        return list(final.outputs[0].token_ids), final.num_cached_tokens

    for question in ("What?", "Who?"):
        ours, theirs = (
            asyncio.run(ask(server.llm, f"@ {DOCUMENT} {question}")) for server in servers[:2]
        )
        assert ours[0] == theirs[0]
    assert ours[1] == theirs[1] > len(DOCUMENT)


def test_requests_of_a_dead_replica_are_answered_with_their_images(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is lost, as no client has received any tokens."""
    dispatcher, llm = servers.replicas.llm.dispatcher, servers.replicas.llm
    routed: dict[str, list[str]] = {}
    choose = dispatcher.choose

    def note_choice(request_id: str) -> str | None:
        chosen = choose(request_id)
        if chosen is not None:
            routed.setdefault(request_id, []).append(chosen)
        return chosen

    monkeypatch.setattr(dispatcher, "choose", note_choice)
    params = SamplingParams(
        temperature=0, max_tokens=192, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def answer(llm: AsyncLLM, row: int) -> list[int]:
        inputs = prompt(f"Row {row} of @", make_image(20 + row), name=NAME)
        async for output in llm.generate(inputs, params, f"row {row}"):  # noqa: B007
            pass
        return list(output.outputs[0].token_ids)

    async def kill_one() -> list[list[int]]:
        tasks = [asyncio.ensure_future(answer(llm, row)) for row in range(8)]
        while len(routed) < len(tasks):
            await asyncio.sleep(0.005)
        os.kill(await asyncio.to_thread(process_of, routed["row 0"][0]), signal.SIGKILL)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(kill_one())
    assert any(len(places) > 1 for places in routed.values()), "no request was moved"
    assert answers == [asyncio.run(answer(servers.alone.llm, row)) for row in range(8)]
    wait_until(lambda: len(dispatcher.replicas) == 2)
