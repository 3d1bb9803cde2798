"""vLLM's `POST /tokenize` and `/detokenize`: texts to token ids and back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.frontend.text import encode_text
from headstart.server.bodies import Body, Flag, Many, Whole
from headstart.server.chats import prepare_chat
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.openai.schema import PromptFields
from headstart.server.service import Service, service_of
from headstart.validation import describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

router = APIRouter()
_PART = 4096  # ids


class TokenizeRequest(PromptFields):
    """Text, or a conversation. add_special_tokens: only for text; chat templates add them."""

    prompt: str | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = False


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Many[Whole]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a prompt, and the model's maximum length."""
    service = service_of(request)
    service.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "prompt and messages are both set or both missing; allowed: one of them"
        )
    if body.prompt is not None:
        token_ids = await asyncio.to_thread(_encode, service, body.prompt, body)
    else:
        token_ids = await _encode_chat(service, body, request)
    answer = await asyncio.to_thread(
        _encode_answer, service, token_ids, bool(body.return_token_strs)
    )
    return Response(answer, media_type="application/json")


def _encode_answer(service: Service, token_ids: list[int], with_texts: bool) -> bytes:
    """Return the answer of `/tokenize` as JSON. Clears `token_ids`.

    Ids are converted and freed in parts, from the end: one call in C for a million ids would block
    all threads for longer than the time between two tokens of a stream.
    """
    tokenizer = _tokenizer(service) if with_texts else None
    count = len(token_ids)
    ids: list[bytes] = []
    texts: list[bytes] = []
    while token_ids:
        part = token_ids[-_PART:]
        del token_ids[-_PART:]
        ids.append(",".join(map(str, part)).encode())
        if tokenizer is not None:
            tokens = tokenizer.convert_ids_to_tokens(part)
            texts.append(json.dumps(tokens, separators=(",", ":"))[1:-1].encode())
    head = f'{{"count":{count},"max_model_len":{service.llm.max_model_len},"tokens":['
    end = b"null" if tokenizer is None else b"[" + b",".join(reversed(texts)) + b"]"
    return head.encode() + b",".join(reversed(ids)) + b'],"token_strs":' + end + b"}"


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    service = service_of(request)
    service.adapter(body.model)
    if len(body.tokens) > service.max_model_len:  # decoding more would block other threads
        raise RequestError(
            f"tokens has {len(body.tokens):,} entries; allowed: {service.max_model_len:,} at most "
            "(max_model_len)"
        )
    text = await asyncio.to_thread(_decode, _tokenizer(service), body.tokens)
    return JsonResponse({"prompt": text})


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    size = len(tokenizer)
    invalid_id = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
    if invalid_id is not None:
        raise RequestError(f"tokens has {describe(invalid_id)}; allowed: from 0 to {size - 1}")
    return str(tokenizer.decode(token_ids))


def _tokenizer(service: Service) -> PreTrainedTokenizerBase:
    tokenizer = service.llm.tokenizer
    if tokenizer is None:
        raise RequestError("the model has no tokenizer")
    return tokenizer


def _encode(service: Service, text: str, body: TokenizeRequest) -> list[int]:
    service.llm.check_length("the prompt", text)
    special = body.add_special_tokens is not False
    return encode_text(_tokenizer(service), text, add_special_tokens=special)


async def _encode_chat(service: Service, body: TokenizeRequest, request: Request) -> list[int]:
    if body.add_special_tokens:
        raise ApiError(400, "add_special_tokens is true; allowed for messages: false")
    call = body.as_call(service.salt(request, None), {"max_tokens": None})
    prepared = await prepare_chat(service, call, service.new_id("text"), stream=False)
    return prepared.request.prompt_token_ids
