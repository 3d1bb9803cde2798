"""Answers of a model with a SentencePiece-like tokenizer keep the space before their first word."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.running import Running, running
from tests.tiny_tokenizers import SPECIAL_TOKENS, TINY_TOKENIZERS

FIRST = SPECIAL_TOKENS[1]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the other"}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, int]]:
    """Yield a server of a model like Llama 2, with a BOS token, and the id of the token " the"."""
    tokenizer = TINY_TOKENIZERS["prepended"]()
    first = tokenizer.convert_tokens_to_ids(FIRST)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{FIRST} $A", special_tokens=[(FIRST, first)]
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=first,
    )
    folder = tmp_path_factory.mktemp("prepended")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with running(folder) as server:
        yield server, tokenizer.encode("the other", add_special_tokens=False)[0]


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/{path}", json={"model": "tiny", "max_tokens": 2, **body}
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_completion_with_its_echo_and_offsets(llama: tuple[Running, int]) -> None:
    server, the = llama
    body = {"prompt": "the other", "allowed_token_ids": [the], "logprobs": 0}
    [choice] = post(server, "completions", **body)["choices"]
    assert choice["text"] == " the the" == "".join(choice["logprobs"]["tokens"])
    [choice] = post(server, "completions", **body, echo=True)["choices"]
    assert choice["text"] == "the other the the"
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert tokens[:2] == [FIRST, " the"] and offsets[:3] == [0, 0, 3]
    for token, offset in zip(tokens[2:], offsets[2:], strict=True):
        assert choice["text"][offset:].startswith(token)
    streamed = httpx.post(
        f"{server.url}/v1/completions", json={**body, "max_tokens": 3, "stream": True}
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if "choices" in line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " the the the"


def test_a_chat_that_continues_the_assistants_text(llama: tuple[Running, int]) -> None:
    server, the = llama
    options = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"messages": CHAT, "allowed_token_ids": [the]}
    answer = post(server, "chat/completions", **body, **options)
    assert answer["choices"][0]["message"]["content"] == " the the"


def test_a_prefilled_message(llama: tuple[Running, int]) -> None:
    server, _ = llama
    [part] = post(server, "messages", messages=CHAT, temperature=0, max_tokens=5)["content"]
    tokenizer = server.llm.frontend.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    options = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 5}
    answer = post(
        server, "chat/completions", messages=CHAT, temperature=0, return_token_ids=True, **options
    )
    whole = tokenizer.decode(ids + answer["choices"][0]["token_ids"], skip_special_tokens=True)
    assert part["text"] == whole[len(tokenizer.decode(ids, skip_special_tokens=True)) :]
