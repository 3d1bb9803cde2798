"""`/tokenize` and `/detokenize` match the tokenizer."""

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
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ASSETS)
    return tokenizer


def post(server: Running, path: str, body: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(server.url + path, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize("text", ["", "Hello Ben, \u00e4\U0001f642", "<|user|>Hi<|end|>"])
def test_a_text_is_tokenized_and_detokenized(
    server: Running, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    answer = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == server.llm.engine.max_model_len
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    back = post(server, "/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_text_of_several_parts(server: Running, tokenizer: PreTrainedTokenizerBase) -> None:
    """The answer is built in parts of 4,096 ids."""
    text = "Anna is 31, Ben 45. " * 800
    expected = tokenizer.encode(text)
    assert len(expected) > 2 * 4096
    answer = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (answer["count"], answer["tokens"]) == (len(expected), expected)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(expected)
    assert post(server, "/tokenize", {"prompt": text}).json() == answer | {"token_strs": None}


def test_a_long_list_is_converted_in_parts() -> None:
    """A call of the tokenizer's C code for a million ids would block all other threads."""
    longest = 0

    def spell(part: list[int]) -> list[str]:
        nonlocal longest
        longest = max(longest, len(part))
        return ["a"] * len(part)

    tokenizer = SimpleNamespace(convert_ids_to_tokens=spell)
    service: Any = SimpleNamespace(llm=SimpleNamespace(tokenizer=tokenizer, max_model_len=8))
    token_ids = list(range(20_000))
    answer = json.loads(_encode_answer(service, token_ids, True))
    assert answer["tokens"] == list(range(20_000))
    assert 0 < longest <= 4096
    assert token_ids == [], "freeing what is left at once takes as long"


def test_messages_are_tokenized_as_a_chats_prompt(
    server: Running, tokenizer: PreTrainedTokenizerBase
) -> None:
    answer = post(server, "/tokenize", {"model": "tiny", "messages": MESSAGES}).json()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert answer["tokens"] == tokenizer.encode(text) and answer["token_strs"] is None
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    chat = post(server, "/v1/chat/completions", body).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    bare = post(server, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["tokens"] == answer["tokens"][:-1]


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


def test_template_arguments_of_a_request_replace_the_defaults() -> None:
    """`--default-chat-template-kwargs` and `--chat-template` set the defaults."""
    template = "{{ mood }} {{ style }}: {% for turn in messages %}{{ turn.content }}{% endfor %}"
    defaults = '{"mood": "sad", "style": "old"}'
    with running(default_chat_template_kwargs=defaults, chat_template=template) as server:

        def rendered(**more: object) -> str:
            body = {"messages": [{"role": "user", "content": "Hi"}], **more}
            tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
            answer = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()
            return str(answer["prompt"])

        assert rendered() == "sad old: Hi"
        assert rendered(chat_template_kwargs={"mood": "glad"}) == "glad old: Hi"
