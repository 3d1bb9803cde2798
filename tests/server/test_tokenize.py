"""Texts to token ids and back, by the tokenizer itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.server.running import Running
from tests.server.templates import ASSETS

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
