"""With `headstart serve --public-prefix`, tenants share a system prompt and nothing after it."""

import json
from pathlib import Path

import httpx
import pytest

from headstart import LLM, SamplingParams
from headstart.engine.request import RequestGroup
from headstart.errors import ConfigError
from headstart.server.keys import KeyFolder
from headstart.server.launch import publish, read_prefixes
from tests.engine.tiny_llm import save_smallest
from tests.server.running import Running, running
from tests.small_demos import shallow_built_in

SYSTEM = "You look things up in tables, and say nothing of what the tables do not have. " * 2


def ask(server: Running, key: str, path: str, **body: object) -> tuple[int, int]:
    """Return the numbers of cached tokens and of prompt tokens."""
    answer = httpx.post(
        server.url + path,
        json={"model": "tiny", "max_tokens": 1, **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_tenants_share_a_system_prompt_in_chats_and_prompts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "system.txt"
    file.write_text(SYSTEM + "\n", encoding="utf-8")
    key_folder = KeyFolder(tmp_path / "keys")
    alice, bob = key_folder.add("alice"), key_folder.add("bob")
    with running(shallow_built_in(), api_keys=True, keys_folder=str(tmp_path / "keys")) as server:
        publish(server.llm, read_prefixes([str(file)]))

        def chat(key: str, question: str) -> tuple[int, int]:
            system = {"role": "system", "content": SYSTEM}
            messages = [system, {"role": "user", "content": question}]
            return ask(server, key, "/v1/chat/completions", messages=messages)

        assert chat(alice, "How old is Anna?")[0] == 0
        cached, size = chat(bob, "How old is Anna?")
        assert cached % 16 == 0
        assert size - 48 < cached < size
        assert chat(bob, "How old is Anna?") == (size - 1, size)

        assert ask(server, alice, "/v1/completions", prompt=SYSTEM + "Anna")[0] == 0
        text_cached, size = ask(server, bob, "/v1/completions", prompt=SYSTEM + "Anna")
        assert text_cached % 16 == 0
        assert size - 32 < text_cached < size


def test_a_prefix_of_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(list(range(40, 80))), encoding="utf-8")
    assert read_prefixes([str(file)]) == {str(file): list(range(40, 80))}


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.json", '{"a": 1}', "is not a list of token ids in JSON: Expected `array`"),
        ("a.json", "[1, true]", "is not a list of token ids in JSON: Expected `int`"),
        ("a.json", "[1,", "is not a list of token ids in JSON: Input data was truncated"),
        ("a.json", "[" * 10**5, "is not a list of token ids in JSON"),
        ("a.txt", b"\xff", "cannot be read"),
        ("missing", None, "cannot be read"),
    ],
)
def test_an_invalid_file_is_reported(
    name: str, content: str | bytes | None, match: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=match):
        read_prefixes([str(file)])


@pytest.mark.parametrize(
    ("prefix", "match"),
    [("Hi", "shorter than a block"), ([1, -1] * 20, "token id"), ("x" * 10**6, "cannot be used")],
)
def test_a_prefix_that_cannot_be_shared_is_reported(
    server: Running, prefix: str | list[int], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        publish(server.llm, {"file": prefix})


def test_two_tenants_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Regression: a deadlock, as one waited for the other's block, and that one for its turn.

    A third tenant decodes meanwhile, so the batch is never empty and no request is preempted.
    """
    llm = LLM(
        save_smallest(tmp_path),
        num_threads=1,
        num_blocks=64,
        max_num_batched_tokens=32,
        eviction="fair-lru",
    )
    engine = llm.engine
    for name in "abc":
        engine.manager.shares.set(name, 1.0)
    head = [3 + i % 100 for i in range(160)]
    assert engine.manager.hasher.publish(head) == 10

    def submit(prompt: list[int], salt: str, count: int) -> RequestGroup:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        group = llm.frontend.prepare(prompt, params, salt=salt)
        engine.submit(group)
        return group

    third = submit([1, 2, 3], "c", 60)
    engine.step()
    groups = [submit([*head, 1, 2], "a", 2)]
    engine.step()
    engine.step()
    groups.append(submit([*head, 7, 8], "b", 2))
    for _ in range(20):
        engine.step()
        engine.manager.check()
    assert all(group.finished for group in groups)
    assert not third.finished
    llm.close()
