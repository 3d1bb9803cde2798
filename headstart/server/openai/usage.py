"""Counts of tokens and log-probabilities as OpenAI tells them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headstart.server.counting import TokenCount

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, Logprob, Logprobs

__all__ = ["chat_logprobs", "completion_logprobs", "usage_of"]


def usage_of(counts: Iterable[TokenCount]) -> dict[str, Any]:
    """The usage of one request of the API, which may have several prompts."""
    counts = list(counts)
    prompt = sum(count.prompt for count in counts)
    completion = sum(count.completion for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached for count in counts)},
    }


def chat_logprobs(answer: CompletionOutput, most: int) -> dict[str, Any] | None:
    """The log-probabilities of an answer's tokens, each with the `most` likeliest."""
    if answer.logprobs is None:
        return None
    return {"content": [_chat_entry(entry, most) for entry in answer.logprobs]}


def _chat_entry(entry: Logprobs, most: int) -> dict[str, Any]:
    chosen = next(iter(entry.values()))
    top = sorted(entry.values(), key=lambda one: one.rank)[:most]
    return _token(chosen) | {"top_logprobs": [_token(one) for one in top]}


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": text,
        "logprob": max(entry.logprob, -9999.0),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def completion_logprobs(
    entries: Iterable[Logprobs | None], most: int, offset: int = 0
) -> dict[str, Any]:
    """The same as completions have them; `offset` is where the first token's text begins."""
    told: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        chosen = next(iter(entry.values())) if entry else None
        text = (chosen.decoded_token or "") if chosen is not None else ""
        top = sorted((entry or {}).values(), key=lambda one: one.rank)[:most]
        told["tokens"].append(text)
        told["token_logprobs"].append(max(chosen.logprob, -9999.0) if chosen else None)
        told["top_logprobs"].append(
            {one.decoded_token or "": max(one.logprob, -9999.0) for one in top} if entry else None
        )
        told["text_offset"].append(offset)
        offset += len(text)
    return told
