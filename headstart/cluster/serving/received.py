"""Tokens that a replica computed, taken into the request that the server's process has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headstart.engine.sampling import SampledToken, TokenLogprob

if TYPE_CHECKING:
    from headstart.cluster.serving.messages import AnswerPart, Part
    from headstart.engine.request import RequestGroup

__all__ = ["take_part"]


def take_part(group: RequestGroup, part: Part, sent: float) -> None:
    """Give the request what came of it; `sent` is when it went out, `time.perf_counter`.

    Times are those of this process: what the network takes is in them, as a client sees it.
    """
    now = time.perf_counter()
    if part.head is not None:
        head = part.head
        group.start_time = sent + (head.queued or 0.0)
        group.loaded_tokens = head.loaded_tokens
        if head.prompt_logprobs is not None:
            group.prompt_logprobs = head.prompt_logprobs
        for request in group.requests:
            request.num_cached_tokens = head.num_cached_tokens
            request.missed = head.missed
    for answer in part.answers:
        request = group.requests[answer.at]
        known = len(request.sampling.output_token_ids)
        if answer.start > known:
            continue  # some before were not told: the last part has them
        for token in _tokens(answer, known - answer.start):
            request.append(token, now)
        if answer.finish_reason is not None:
            request.finish_reason = answer.finish_reason


def _tokens(answer: AnswerPart, first: int) -> Iterator[SampledToken]:
    """Those from `first` on. They were told with texts: what counts are ids and numbers."""
    for place, token_id in enumerate(answer.token_ids[first:], first):
        if answer.logprobs is None:
            yield SampledToken(token_id, None, ())
            continue
        entries = answer.logprobs[place]
        top = tuple(TokenLogprob(of, one.logprob, one.rank) for of, one in entries.items())
        yield SampledToken(token_id, entries[token_id].logprob, top)
