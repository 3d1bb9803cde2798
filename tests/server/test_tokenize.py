"""Texts to token ids and back, by the tokenizer itself."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headstart.server.tokenize import _encode_answer
from tests.server.running import Running, running
from tests.small_demos import ASSETS

MESSAGES = [{"role": "user", "content": "Who is Ben?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ASSETS)
    return found


def post(server: Running, path: str, body: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(server.url + path, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize("text", ["", "Hello Ben, \u00e4\U0001f642", "<|user|>Hi<|end|>"])
def test_a_text_and_back(server: Running, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    told = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer.encode(text)
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == server.llm.engine.max_model_len
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(told["tokens"])
    back = post(server, "/detokenize", {"model": "tiny", "tokens": told["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_text_of_several_parts(server: Running, tokenizer: PreTrainedTokenizerBase) -> None:
    """The answer is spelled in parts of 4,096 ids."""
    text = "Anna is 31, Ben 45. " * 800
    expected = tokenizer.encode(text)
    assert len(expected) > 2 * 4096
    told = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (told["count"], told["tokens"]) == (len(expected), expected)
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(expected)
    assert post(server, "/tokenize", {"prompt": text}).json() == told | {"token_strs": None}


def test_no_call_spells_more_than_a_part_of_a_long_list() -> None:
    """A call in C for a million ids stops all other threads while it lasts."""
    longest = 0

    def spell(part: list[int]) -> list[str]:
        nonlocal longest
        longest = max(longest, len(part))
        return ["a"] * len(part)

    tokenizer = SimpleNamespace(convert_ids_to_tokens=spell)
    service: Any = SimpleNamespace(llm=SimpleNamespace(tokenizer=tokenizer, max_model_len=8))
    token_ids = list(range(20_000))
    told = json.loads(_encode_answer(service, token_ids, True))
    assert told["tokens"] == list(range(20_000))
    assert 0 < longest <= 4096
    assert token_ids == [], "freeing what is left at once takes as long"


def test_a_conversation_is_the_prompt_of_a_chat(
    server: Running, tokenizer: PreTrainedTokenizerBase
) -> None:
    told = post(server, "/tokenize", {"model": "tiny", "messages": MESSAGES}).json()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert told["tokens"] == tokenizer.encode(text) and told["token_strs"] is None
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    chat = post(server, "/v1/chat/completions", body).json()
    assert told["count"] == chat["usage"]["prompt_tokens"]
    bare = post(server, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["tokens"] == told["tokens"][:-1]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": "\ud800"}, 400),
        ("/tokenize", {"prompt": "a" * 10_000_000}, 400),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404),
        ("/tokenize", {"messages": [{"role": "user", "content": 7}]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [2048]}, 400),
        ("/detokenize", {"tokens": [10**30]}, 400),
        ("/detokenize", {"tokens": [True]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
def test_bad_input_is_refused(server: Running, path: str, body: Any, status: int) -> None:
    answer = post(server, path, body)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_what_templates_read_unless_a_request_says_otherwise() -> None:
    """`--default-chat-template-kwargs`, and `--chat-template`."""
    template = "{{ mood }} {{ style }}: {% for turn in messages %}{{ turn.content }}{% endfor %}"
    defaults = '{"mood": "sad", "style": "old"}'
    with running(default_chat_template_kwargs=defaults, chat_template=template) as server:

        def rendered(**more: object) -> str:
            body = {"messages": [{"role": "user", "content": "Hi"}], **more}
            tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
            told = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()
            return str(told["prompt"])

        assert rendered() == "sad old: Hi"
        assert rendered(chat_template_kwargs={"mood": "glad"}) == "glad old: Hi"
