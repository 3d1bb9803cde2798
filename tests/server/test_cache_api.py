"""`/cache`: reports on the pool, on misses, and advice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from headstart.cache import PathSegment
from headstart.server.cache.api import MAX_WATCHERS
from headstart.server.cache.live import CACHED, EMPTY
from tests.engine.internals import remembered_chats
from tests.server.running import Running, running
from tests.server.templates import png_of
from tests.small_demos import shallow_built_in

PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 10


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with (
        running(shallow_built_in(), num_blocks=128) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
        blocks, free = server.pool()
        assert blocks == free


def ask(client: httpx.Client, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0} | more
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cells_show_the_prefix_of_each_block(client: httpx.Client) -> None:
    ask(client, PEOPLE)
    with client.stream("GET", "/cache/live") as answer:
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    look = json.loads(line.removeprefix("data: "))
    [prefix] = look["prefixes"]
    cells = [cell for count, *cell in look["cells"]["runs"] for _ in range(count)]
    assert look["cells"]["blocks_per_cell"] == 1 and len(cells) == 128
    assert cells.count([CACHED, prefix["id"]]) == prefix["blocks"] == look["pool"]["cached"] > 10
    assert cells.count([EMPTY, -1]) == 128 - prefix["blocks"]


def test_watchers_are_bounded(server: Running) -> None:
    """Regression: 600 watchers that did not read used 130 MB."""
    events: list[Iterator[bytes]] = []

    def watch(others: ExitStack) -> int:
        answer = others.enter_context(client.stream("GET", f"{server.url}/cache/live"))
        if answer.status_code == 200:
            events.append(answer.iter_bytes())  # without it the stream would be closed
            next(events[-1])
        return answer.status_code

    with httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60) as client:
        with ExitStack() as opened:
            assert {watch(opened) for _ in range(MAX_WATCHERS)} == {200}
            assert watch(opened) == 429
        with ExitStack() as opened:
            while watch(opened) == 429:  # until the server notices that the others disconnected
                pass


def test_the_report_counts_blocks_prefixes_and_hits(client: httpx.Client) -> None:
    empty = client.get("/cache").json()
    assert (empty["held"], empty["cached"], empty["empty"]) == (0, 0, 128)
    ask(client, PEOPLE + "How old is Ben?")
    answer = ask(client, PEOPLE + "How old is Anna?")
    full = client.get("/cache").json()
    assert full["cached"] + full["held"] + full["empty"] == 128
    assert full["hit_tokens"] == cached(answer) > 16
    assert full["running"] == full["waiting"] == 0
    assert set(full["missed"]) <= set(full["reasons"])
    explained = client.post("/cache/explain", json={"prompt": PEOPLE + "Who is it?"}).json()
    assert full["reasons"][explained["reason"]] in explained["text"]
    assert full["owners"] == [{"salt": None, "adapter": None, "blocks": full["cached"], "held": 0}]
    shared = full["prefixes"][0]
    assert shared["parent"] is None and shared["text"].startswith("Anna is 31")
    branches = [prefix for prefix in full["prefixes"] if prefix["parent"] == shared["id"]]
    assert len(branches) == 2
    assert sum(prefix["blocks"] for prefix in full["prefixes"]) == full["cached"]
    assert [shared["hits"], *(prefix["hits"] for prefix in branches)] == [1, 0, 0]
    for _ in range(2):
        ask(client, PEOPLE + "Who of them all is the oldest one, and by how many years is that so?")
    again = client.get("/cache").json()["prefixes"]
    assert sorted(prefix["hits"] for prefix in again) == [0, 0, 1, 3]


def test_messages_are_explained_as_a_chat_renders_them(client: httpx.Client) -> None:
    """Regression: the generation prompt was left out, so the count was a token too low."""
    body = {"messages": [{"role": "user", "content": PEOPLE}]}
    chat = client.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
    explained = client.post("/cache/explain", json=body).json()
    assert explained["prompt_tokens"] == chat["prompt_tokens"]
    assert explained["cached_tokens"] == chat["prompt_tokens"] - 1
    shorter = client.post("/cache/explain", json={**body, "add_generation_prompt": False}).json()
    assert shorter["prompt_tokens"] < explained["prompt_tokens"]


def test_the_body_of_a_request_is_explained(client: httpx.Client) -> None:
    """Regression: the body of a chat was refused, as max_tokens was unknown."""
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PEOPLE}, {"role": "assistant", "content": "Anna"}],
        "continue_final_message": True,
        "max_tokens": 2,
        "temperature": 0,
        "response_format": {"type": "text"},
        "tool_choice": "none",
    }
    usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
    explained = client.post("/cache/explain", json={**chat, "stream": True}).json()
    assert explained["prompt_tokens"] == usage["prompt_tokens"]
    assert explained["cached_tokens"] == usage["prompt_tokens"] - 1
    completion = {"prompt": PEOPLE, "max_tokens": 2, "logprobs": 1, "echo": False}
    assert client.post("/cache/explain", json=completion).status_code == 200
    slip = client.post("/cache/explain", json={**chat, "max_token": 2})
    assert slip.status_code == 400
    assert "the nearest is max_tokens" in slip.json()["error"]["message"]
    other = client.post("/cache/explain", json={"input": PEOPLE}).json()["error"]["message"]
    assert "use a chat's `messages`" in other


def test_reasons_for_misses(client: httpx.Client) -> None:
    dated = "Today is 2026-11-21 10:32.\n" + PEOPLE
    unseen = client.post("/cache/explain", json={"prompt": dated}).json()
    assert (unseen["cached_tokens"], unseen["closest"]) == (0, None)
    ask(client, dated)
    other = client.post(
        "/cache/explain", json={"prompt": dated.replace("11-21 10:32", "11-22 08:07")}
    ).json()
    assert other["reason"] == "token"
    assert other["closest"]["looks_like"] == "a date or time"
    assert other["closest"]["before"].endswith("2026-11-2")
    assert other["closest"]["here"].startswith("2 08:07")
    assert other["closest"]["there"].startswith("1 10:32")
    assert other["position"] == other["closest"]["common_tokens"]
    salted = client.post("/cache/explain", json={"prompt": dated, "cache_salt": "mine"}).json()
    assert (salted["cached_tokens"], salted["closest"]) == (0, None)
    assert salted["reason"] == "salt"
    assert salted["text"] == "from token 0 on: cached under another salt"
    same = client.post("/cache/explain", json={"prompt": dated}).json()
    assert same["cached_tokens"] == same["prompt_tokens"] - 1 and same["reason"] == "none"


def test_an_evicted_prompt_is_explained(client: httpx.Client) -> None:
    ask(client, PEOPLE)
    for count in range(12):
        ask(client, f"{count} " * 150)
    evicted = client.post("/cache/explain", json={"prompt": PEOPLE + "And?"}).json()
    assert evicted["reason"] == "evicted"
    assert "of these tokens were evicted" in evicted["text"]
    ask(client, PEOPLE + "And?")
    advice = client.get("/cache/advice").json()
    assert advice["memory"]["evicted_prompts"] == 1
    assert advice["memory"]["more_blocks"] > 0 and advice["memory"]["more_bytes"] > 0
    assert advice["memory"]["tokens_saved"] == advice["memory"]["tokens_computed_again"] > 0
    again = advice["memory"]["tokens_computed_again"]
    [recomputed] = re.findall(
        r"headstart:recomputed_evicted_tokens_total{.*} (.*)", client.get("/metrics").text
    )
    assert float(recomputed) >= again


def test_advice_names_the_fork_that_costs_most(client: httpx.Client) -> None:
    computed = 0
    for minute in range(5):
        answer = ask(client, f"It is 2026-11-22 10:{minute + 10}.\n{PEOPLE}")
        computed += answer["usage"]["prompt_tokens"] - cached(answer)
    for name in ("Zoe", "Yan"):
        ask(client, f"A question for {name}: who are you?")
    advice = client.get("/cache/advice").json()
    assert advice["prompts"] == 7
    fork = advice["forks"][0]
    assert fork["looks_like"] == "a date or time"
    assert 0 < fork["tokens_computed_again"] < computed
    assert fork["prompts"] == 4
    moved = answer["usage"]["prompt_tokens"]
    assert fork["tokens_computed_again"] > 0.8 * 4 * moved


def test_times_that_differ_in_any_digit_are_one_cause(client: httpx.Client) -> None:
    """Regression: each digit was a separate fork, with its own and too low estimate."""
    answers = []
    for second in range(0, 1400, 70):
        answers.append(ask(client, f"It is 10:{second // 60:02}:{second % 60:02}. {PEOPLE}"))
    [fork] = client.get("/cache/advice").json()["forks"]
    assert fork["prompts"] == len(answers) - 1 and fork["looks_like"] == "a date or time"
    usage = answers[-1]["usage"]
    assert fork["tokens_computed_again"] > 0.8 * (len(answers) - 1) * usage["prompt_tokens"]
    assert re.search(r" at tokens \d+ to \d+ \(probably a date or time\)", fork["advice"])


def test_a_single_fork_is_reported_until_one_repeats(client: httpx.Client) -> None:
    """Regression: two prompts led to neither advice nor a reason for its absence."""
    for minute in (10, 11):
        answer = ask(client, f"It is 2026-11-22 10:{minute}.\n{PEOPLE}")
    [fork] = client.get("/cache/advice").json()["forks"]
    assert fork["prompts"] == 1 and fork["looks_like"] == "a date or time"
    assert fork["advice"] == (
        f"1 prompt differs from an earlier prompt at token {fork['position']} (probably a date or "
        "time) and continues with equal text: moving the differing text to the end would have "
        f"saved {fork['tokens_computed_again']} tokens"
    )
    assert fork["tokens_computed_again"] > 0.8 * answer["usage"]["prompt_tokens"]
    for name in ("Zoe", "Yan", "Uma"):
        ask(client, f"A question for {name}: {PEOPLE}")
    [fork] = client.get("/cache/advice").json()["forks"]
    assert fork["prompts"] == 2 and fork["advice"].startswith("2 prompts differ from")


def test_an_unknown_block_is_not_found(client: httpx.Client) -> None:
    for block, status in ((0, 200), (127, 200), (128, 404), (-1, 404)):
        assert client.get(f"/cache/blocks/{block}").status_code == status


def test_prewarm_computes_a_prompt(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": PEOPLE}]
    first = client.post("/cache/prewarm", json={"messages": messages}).json()
    assert first["computed_tokens"] == first["prompt_tokens"]
    again = client.post("/cache/prewarm", json={"messages": messages}).json()
    assert again["computed_tokens"] == 1
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 1
    unread = client.post("/v1/chat/completions", json=body | {"no_read": True}).json()["usage"]
    assert unread["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_chat_with_tools_hits_a_prewarmed_prompt(tool_server: Running) -> None:
    """Regression: tools were rendered in another order than in a chat, so the rest missed."""
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}}
    age = {"name": "age", "description": "How old", "parameters": parameters, "strict": True}
    body = {
        "messages": [{"role": "user", "content": "How old is Anna?"}],
        "tools": [
            {"type": "function", "function": function} for function in (age, {"name": "now"})
        ],
    }
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        ahead = client.post("/cache/prewarm", json=body).json()
        explained = client.post("/cache/explain", json=body).json()
        usage = client.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
        assert cached({"usage": usage}) >= ahead["prompt_tokens"] - 1
        assert explained["prompt_tokens"] == usage["prompt_tokens"]
        wrong = client.post("/cache/prewarm", json={**body, "tools": [{"name": "age"}]})
        assert wrong.status_code == 400


def test_prewarm_follows_cache_options(client: httpx.Client) -> None:
    """Regression: `no_store`, `no_read` and `prompt_cache_retention` had no effect."""

    def ahead(prompt: str, **more: object) -> int:
        answer = client.post("/cache/prewarm", json={"prompt": prompt, **more}).json()
        return int(answer["cached_tokens"])

    assert ahead(PEOPLE, no_store=True) == ahead(PEOPLE) == ahead(PEOPLE, no_read=True) == 0
    assert ahead(PEOPLE) > 0
    unread = client.post("/cache/explain", json={"prompt": PEOPLE, "no_read": True}).json()
    assert (unread["cached_tokens"], unread["reason"]) == (0, "not_read")
    assert ahead("Kept. " * 100, prompt_cache_retention="24h") == 0
    for count in range(12):
        ask(client, f"{count} " * 150)
    assert ahead(PEOPLE) == 0 and ahead("Kept. " * 100) > 0


def test_reset_empties_the_cache(client: httpx.Client) -> None:
    ask(client, PEOPLE)
    assert client.post("/cache/reset").json() == {"reset": True}
    assert client.get("/cache").json()["cached"] == 0
    assert client.post("/cache/explain", json={"prompt": PEOPLE}).json()["closest"] is None
    assert cached(ask(client, PEOPLE)) == 0


def test_reset_also_forgets_images_and_chats(image_server: Running) -> None:
    url = f"data:image/png;base64,{png_of(9)}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Eh?"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    llm = image_server.llm
    assert llm.frontend.images is not None
    encoded = []
    with httpx.Client(base_url=image_server.url, timeout=60) as client:
        for _ in range(2):
            client.post("/v1/chat/completions", json=body).raise_for_status()
            encoded.append(llm.frontend.images.cache.num_encoded)
            assert llm.frontend.images.cache.num_rows > 0
            assert remembered_chats(llm) > 0
            client.post("/cache/reset").raise_for_status()
            assert llm.frontend.images.cache.num_rows == 0
            assert remembered_chats(llm) == 0
    assert encoded[1] == encoded[0] + 1


def test_concurrent_requests_share_pool_queries() -> None:
    """Concurrent requests share a query of the pool; none gets a result older than itself."""
    with running(shallow_built_in(), num_blocks=128) as server:
        looks, look = [], server.llm.engine.manager.path_segments

        def count() -> list[PathSegment]:
            looks.append(1)
            return look()

        server.llm.engine.manager.path_segments = count  # type: ignore[method-assign]

        async def query_often() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                answers = await asyncio.gather(*(client.get("/cache") for _ in range(60)))
                return [answer.json()["empty"] for answer in answers]

        assert asyncio.run(query_often()) == [128] * 60
        assert 0 < len(looks) < 30
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for round in range(3):
                ask(client, f"{round} {PEOPLE}")
                assert client.get("/cache").json()["requests"] == round + 1


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": []}, {"prompt": ""}, {"prompt": [2**31]}, {"what": 1},
     {"prompt": "a", "model": "b"}],
)  # fmt: skip
def test_an_invalid_prompt_is_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    for path in ("/cache/explain", "/cache/prewarm"):
        answer = client.post(path, json=body)
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
