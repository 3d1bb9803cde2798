"""Counts of tokens and log-probabilities as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headstart.server.chats import TokenCount

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs", "usage_of"]


def usage_of(counts: Iterable[TokenCount]) -> dict[str, Any]:
    """Return the usage of one call, which may have several prompts."""
    counts = list(counts)
    prompt = sum(count.prompt for count in counts)
    completion = sum(count.completion for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached for count in counts)},
    }


def chat_logprobs(
    answer: CompletionOutput, most: int, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens, each with the `most` likeliest.

    as_ids: tokens are shown as `token_id:5`, which works for all.
    """
    if answer.logprobs is None:
        return None
    return {"content": [_chat_entry(entry, most, as_ids) for entry in answer.logprobs]}


def _chat_entry(entry: Logprobs, most: int, as_ids: bool) -> dict[str, Any]:
    chosen = next(iter(entry.items()))
    top = _likeliest(entry, most)
    return _token(*chosen, as_ids) | {"top_logprobs": [_token(*one, as_ids) for one in top]}


def _likeliest(entry: Logprobs, most: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda one: one[1].rank)[:most]


def _text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _token(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    text = _text(token_id, entry, as_ids)
    return {
        "token": text,
        "logprob": max(entry.logprob, -9999.0),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def completion_logprobs(
    entries: Iterable[Logprobs | None],
    most: int,
    offset: int = 0,
    *,
    as_ids: bool = False,
    first: tuple[int, str] = (0, ""),
) -> tuple[dict[str, Any], int]:
    """Return log-probabilities as completions have them, and where the last token's text ends.

    offset: where the first token's text begins, below 0 for tokens that the text does not show
    at its beginning. first: id and text of a prompt's first token, whose
    entry is None.
    """
    told: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        chosen = next(iter(entry.items())) if entry else None
        top = {
            _text(*one, as_ids): max(one[1].logprob, -9999.0)
            for one in _likeliest(entry or {}, most)
        }
        text = (chosen[1].decoded_token or "") if chosen is not None else first[1]
        token_id = chosen[0] if chosen is not None else first[0]
        told["tokens"].append(f"token_id:{token_id}" if as_ids else text)
        told["token_logprobs"].append(max(chosen[1].logprob, -9999.0) if chosen else None)
        told["top_logprobs"].append(top if entry else None)
        told["text_offset"].append(max(0, offset))
        offset += len(text)
    return told, offset


def prompt_logprobs(output: RequestOutput, most: int) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt's tokens as vLLM has them; None for the first.

    Each with the `most` likeliest.
    """
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": max(one.logprob, -9999.0),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for place, (token_id, one) in enumerate(entry.items())
            if place == 0 or one.rank <= most
        }
        for entry in output.prompt_logprobs
    ]
