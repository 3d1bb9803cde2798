"""With keys, no information about another tenant's prompts leaks; without keys, all of it does.

A prober sends prompts of which a victim has sent every other one, and looks at the reported
cached tokens. AUC is the probability that a sent prompt looks more cached than another: 0.5 is
guessing. The same attack on a server without keys must succeed, so that these tests can fail.
`bench/tenants.py` attacks with a clock.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from headstart.server.keys import KeyFolder
from tests.engine.tiny_llm import draft_always
from tests.server.running import Running, running
from tests.small_demos import shallow_built_in

PROMPTS = 8
GUESSING, CERTAIN = 0.55, 0.95
SendPrompt = Callable[[str, int], int]
"""Sends prompt `n` as a tenant; returns the cached tokens that the answer reports."""


def auc(sent: Sequence[int], others: Sequence[int]) -> float:
    """Return the probability that one of `sent` is greater than one of `others`; ties are half."""
    pairs = list(itertools.product(sent, others))
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)


def attack(ask: SendPrompt, prober: str = "bob") -> float:
    """Return the larger of AUC and 1 - AUC, since both reveal as much."""
    ask(prober, -1)  # so that the common start of all prompts is cached for both kinds
    for number in range(0, 2 * PROMPTS, 2):
        ask("alice", number)
    counts = [ask(prober, number) for number in range(2 * PROMPTS)]
    score = auc(counts[::2], counts[1::2])
    return max(score, 1 - score)


@contextmanager
def serving(folder: Path, model: str | Path, *, keys: bool) -> Iterator[tuple[Running, Headers]]:
    """Run a server with keys of alice, bob, and dora and eve, who are a group."""
    key_folder = KeyFolder(folder)
    names = {"alice": None, "bob": None, "dora": "team", "eve": "team"}
    secrets = {name: key_folder.add(name, group=group) for name, group in names.items()}
    options: dict[str, Any] = {"api_keys": keys, "keys_folder": str(folder), "speculation": 8}
    with running(model, num_blocks=512, **options) as server:
        draft_always(server.llm)
        yield server, lambda name: {"Authorization": f"Bearer {secrets[name]}"}


Headers = Callable[[str], dict[str, str]]


def cached(server: Running, path: str, body: dict[str, object], headers: dict[str, str]) -> int:
    body = {"model": "tiny", "max_tokens": 1, **body}
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    count = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


@pytest.fixture(scope="module", params=[True, False], ids=["keys", "open"])
def texts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Headers]]:
    folder = tmp_path_factory.mktemp("keys")
    with serving(folder, shallow_built_in(), keys=request.param) as server:
        yield server


def judge(score: float, server: Running) -> None:
    if server.service.tenants.requires_keys:
        assert score <= GUESSING
    else:
        assert score >= CERTAIN


def test_prompts_of_another_tenant(texts: tuple[Running, Headers]) -> None:
    server, headers = texts
    rng = random.Random(1)
    prompts = {n: [rng.randrange(40, 240) for _ in range(50)] for n in range(-1, 2 * PROMPTS)}

    def ask(name: str, number: int) -> int:
        return cached(server, "/v1/completions", {"prompt": prompts[number]}, headers(name))

    judge(attack(ask), server)


def test_chats_of_another_tenant(texts: tuple[Running, Headers]) -> None:
    """The second turn contains the answer of the first."""
    server, headers = texts

    def ask(name: str, number: int) -> int:
        question = f"{number} people live here. Who is number {number * 7}? " * 3
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"Number {number}."},
            {"role": "user", "content": "Why?"},
        ]
        return cached(server, "/v1/chat/completions", {"messages": messages}, headers(name))

    judge(attack(ask), server)


def test_drafts_do_not_depend_on_another_tenants_answers(texts: tuple[Running, Headers]) -> None:
    """Equal prompts have equal counts of accepted and rejected tokens."""
    server, headers = texts
    rng = random.Random(4)
    prompts = [[rng.randrange(40, 240) for _ in range(50)] for _ in range(PROMPTS)]

    def ask(name: str, prompt: list[int]) -> tuple[int, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        url, body = f"{server.url}/v1/completions", body | {"ignore_eos": True}
        answer = httpx.post(url, json=body, headers=headers(name), timeout=120)
        details = answer.json()["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    alone = [ask("bob", prompt) for prompt in prompts]
    assert server.llm.driver.call(server.llm.engine.reset_prefix_cache)
    for prompt in prompts:
        ask("alice", prompt)
    after = [ask("bob", prompt) for prompt in prompts]
    if server.service.tenants.requires_keys:
        assert after == alone
    else:
        margins = [[count - missed for count, missed in counts] for counts in (after, alone)]
        assert auc(*margins) >= CERTAIN


def test_no_salt_of_a_body_opens_another_tenants_cache(texts: tuple[Running, Headers]) -> None:
    """A prober who knows the salt does not hit the victim's blocks either."""
    server, headers = texts
    rng = random.Random(2)
    prompts = {n: [rng.randrange(40, 240) for _ in range(50)] for n in range(-1, 2 * PROMPTS)}
    tenants = server.service.tenants
    key = headers("alice")["Authorization"].encode()
    salt = tenants.of({b"authorization": key}).salt or "shared"

    def ask(name: str, number: int) -> int:
        body: dict[str, object] = {"prompt": prompts[number]}
        if name == "bob" or not tenants.requires_keys:
            body["cache_salt"] = salt
        return cached(server, "/v1/completions", body, headers(name))

    judge(attack(ask), server)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_prompts_of_another_tenant_after_a_public_prefix(keys: bool, tmp_path: Path) -> None:
    """The prefix is shared, and the tokens after it are not revealed."""
    rng = random.Random(3)
    prefix = [rng.randrange(40, 240) for _ in range(37)]
    prompts = {n: [rng.randrange(40, 240) for _ in range(50)] for n in range(-1, 2 * PROMPTS)}
    with serving(tmp_path, shallow_built_in(), keys=keys) as (server, headers):
        assert server.llm.publish(prefix) == 2

        def ask(name: str, number: int) -> int:
            body: dict[str, object] = {"prompt": prefix + prompts[number]}
            return cached(server, "/v1/completions", body, headers(name))

        judge(attack(ask), server)
        if keys:
            assert ask("eve", 2 * PROMPTS - 1) == 32


def test_a_group_shares_blocks_within_each_salt(tmp_path: Path) -> None:
    with serving(tmp_path, shallow_built_in(), keys=True) as (server, headers):
        prompt = list(range(40, 90))

        def ask(name: str, **body: object) -> int:
            return cached(server, "/v1/completions", {"prompt": prompt, **body}, headers(name))

        assert [ask("dora"), ask("eve"), ask("alice")] == [0, 49, 0]
        assert [ask("dora", cache_salt="x"), ask("eve", cache_salt="x")] == [0, 49]
        assert [ask("alice", cache_salt="x"), ask("eve", prompt_cache_key="x")] == [0, 49]


def test_only_administrators_learn_that_another_tenant_has_a_prompt(tmp_path: Path) -> None:
    """Regression: administrators got "not seen before", although another salt was the cause."""
    with serving(tmp_path, shallow_built_in(), keys=True) as (server, headers):
        monitor = {"x-api-key": KeyFolder(tmp_path).add("monitor", admin=True)}
        prompt = {"prompt": "Anna is 31 years old.\n" * 20}

        def reason(credentials: dict[str, str]) -> Any:
            answer = httpx.post(f"{server.url}/cache/explain", json=prompt, headers=credentials)
            return answer.json()["reason"]

        assert [reason(headers("bob")), reason(monitor)] == ["unseen", "unseen"]
        cached(server, "/v1/completions", prompt, headers("alice"))
        assert [reason(headers("bob")), reason(monitor)] == ["unseen", "salt"]


def test_advice_covers_only_a_tenants_prompts(tmp_path: Path) -> None:
    """Regression: only administrators could read advice, even about a tenant's own prompts."""
    with serving(tmp_path, shallow_built_in(), keys=True) as (server, headers):
        monitor = {"x-api-key": KeyFolder(tmp_path).add("monitor", admin=True)}

        def ask(name: str, minute: int, **body: object) -> None:
            prompt = f"It is 10:{minute} for {name}.\n" + "Anna is 31 years old.\n" * 20
            cached(server, "/v1/completions", {"prompt": prompt, **body}, headers(name))

        def advice(credentials: dict[str, str]) -> dict[str, Any]:
            answer = httpx.get(f"{server.url}/cache/advice", headers=credentials)
            assert answer.status_code == 200, answer.text
            report: dict[str, Any] = answer.json()
            return report

        nothing = {"prompts": 0, "prompt_tokens": 0, "cached_tokens": 0, "forks": [], "salts": []}
        for minute in range(10, 14):
            ask("alice", minute)
            assert advice(headers("bob")) == nothing | {"memory": None}
        for minute in range(10, 13):
            ask("dora", minute, cache_salt="x")
        for minute in range(10, 12):  # a tenant's cause is counted once for all salts
            ask("dora", minute, cache_salt="y")
        own, group = advice(headers("alice")), advice(headers("eve"))
        assert (own["prompts"], group["prompts"]) == (4, 5)
        assert "alice" in own["forks"][0]["here"] and "dora" in group["forks"][0]["here"]
        assert [fork["prompts"] for fork in group["forks"]] == [3]
        assert "dora" not in str(own) and "alice" not in str(group)
        ask("bob", 10)
        assert advice(headers("bob"))["prompts"] == 1 and advice(headers("alice")) == own
        whole = advice(monitor)
        assert whole["prompts"] == 10 and whole["memory"]["evicted_prompts"] == 0
        assert [fork["prompts"] for fork in whole["forks"]] == [3, 3]


def test_only_its_tenant_can_read_a_response(tmp_path: Path) -> None:
    """Its random id does not protect it; the check of its tenant does."""
    with serving(tmp_path, shallow_built_in(), keys=True) as (server, headers):
        url = f"{server.url}/v1/responses"

        def ask(name: str, **body: object) -> httpx.Response:
            body = {"model": "tiny", "input": "Hi", "max_output_tokens": 16, **body}
            return httpx.post(url, json=body, headers=headers(name), timeout=120)

        response_id = ask("dora").json()["id"]
        for name, status in (("alice", 404), ("eve", 200)):  # eve is of dora's group
            assert httpx.get(f"{url}/{response_id}", headers=headers(name)).status_code == status
            assert ask(name, previous_response_id=response_id).status_code == status
        for name, status in (("bob", 404), ("eve", 200), ("dora", 404)):
            assert httpx.delete(f"{url}/{response_id}", headers=headers(name)).status_code == status


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_images_of_another_tenant(keys: bool, demo_vision: Path, tmp_path: Path) -> None:
    """Neither the cached tokens nor the encoding of the image depends on another tenant."""
    with serving(tmp_path / "keys", demo_vision, keys=keys) as (server, headers):
        assert server.llm.frontend.images is not None
        encoder = server.llm.frontend.images.cache
        encoded: list[int] = []

        def ask(name: str, number: int) -> int:
            content = [
                {"type": "image_url", "image_url": {"url": picture(number)}},
                {"type": "text", "text": "?"},
            ]
            body: dict[str, object] = {"messages": [{"role": "user", "content": content}]}
            before = encoder.num_encoded
            num_cached = cached(server, "/v1/chat/completions", body, headers(name))
            encoded.append(encoder.num_encoded - before)
            return num_cached

        judge(attack(ask), server)
        probes = encoded[-2 * PROMPTS :]
        sent = [-count for count in probes[::2]]
        judge(auc(sent, [-count for count in probes[1::2]]), server)


def picture(number: int) -> str:
    pixels = np.random.default_rng(number + 1).integers(0, 256, (32, 32, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
