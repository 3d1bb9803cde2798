"""The parts that answers of completions and chats have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headstart.server.bodies import encode
from headstart.server.errors import ApiError, body_of
from headstart.server.openai.schema import SamplingFields
from headstart.server.sse import AnswerEvents, Usage, frame

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput


class Chunks(AnswerEvents):
    """The chunks of one call's answers, each with the usage where the request wants it."""

    def __init__(self, body: SamplingFields, name: str, kind: str, kind_of_chunk: str) -> None:
        """`kind` is the `object` of whole answers."""
        created = int(time.time())
        self.head = {"id": name, "object": kind, "created": created, "model": body.model}
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_usage_so_far = options is not None and bool(options.continuous_usage_stats)
        # All chunks begin with the same fields, which are encoded once.
        self._begin = encode(self.head | {"object": kind_of_chunk})[:-1]
        self.usage = Usage()

    def chunk(self, choices: list[Any], **more: Any) -> bytes:
        """Return the event of new choices, or of none for more fields alone."""
        if self._wants_usage and choices:
            more["usage"] = self.usage.for_completions() if self._wants_usage_so_far else None
        return b"data: %s,%s\n\n" % (self._begin, encode({"choices": choices, **more})[1:])

    async def end(self) -> bytes:
        last = self.chunk([], usage=self.usage.for_completions()) if self._wants_usage else b""
        return last + frame("[DONE]")

    async def fail(self, error: ApiError) -> bytes:
        return frame(body_of(error))


def chat_logprobs(
    answer: CompletionOutput, most: int, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens, each with the `most` likeliest.

    as_ids: tokens are shown as `token_id:5`, which works for all.
    """
    if answer.logprobs is None:
        return None

    def show(token_id: int, entry: Logprob) -> dict[str, Any]:
        text = _text(token_id, entry, as_ids)
        raw = list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": _bounded(entry), "bytes": raw}

    content = [
        show(*next(iter(entry.items())))
        | {"top_logprobs": [show(*likely) for likely in _likeliest(entry, most)]}
        for entry in answer.logprobs
    ]
    return {"content": content}


def _likeliest(entry: Logprobs, most: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank)[:most]


def _text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _bounded(entry: Logprob) -> float:
    return max(entry.logprob, -9999.0)


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
    at its beginning. first: id and text of a prompt's first token, whose entry is None.
    """
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for entry in entries:
        (token_id, text), logprob, top = first, None, None
        if entry:
            token_id, chosen = next(iter(entry.items()))
            text, logprob = chosen.decoded_token or "", _bounded(chosen)
            likeliest = _likeliest(entry, most)
            top = {_text(*likely, as_ids): _bounded(likely[1]) for likely in likeliest}
        shown = f"token_id:{token_id}" if as_ids else text
        for name, value in zip(names, (shown, logprob, top, max(0, offset)), strict=True):
            columns[name].append(value)
        offset += len(text)
    return columns, offset


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
                "logprob": _bounded(logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for place, (token_id, logprob) in enumerate(entry.items())
            if place == 0 or logprob.rank <= most
        }
        for entry in output.prompt_logprobs
    ]
