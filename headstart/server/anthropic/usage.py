"""Counts of tokens as Anthropic tells them: read from the cache, written to it, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count
from operator import ne
from typing import Any

from headstart.errors import RequestError
from headstart.server.anthropic.breakpoints import (
    Breakpoint,
    begin_of,
    created_tokens,
    read_breakpoints,
)
from headstart.server.anthropic.conversation import count_blocks, read_messages
from headstart.server.anthropic.schema import CountTokensRequest
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.counting import TokenCount
from headstart.server.service import Service

__all__ = ["Usage", "apply_breakpoints"]

_SECONDS = {"5m": 300.0, "1h": 3600.0}


class Usage:
    """The usage of one answer; `points` are breakpoints at `lengths` tokens of its prompt.

    Every full block of a prompt is cached; a client is told of those that it marked, as Anthropic
    does. `input_tokens` are the others that were computed.
    """

    def __init__(self, points: Sequence[Breakpoint], lengths: Sequence[int]) -> None:
        self.count = TokenCount()
        self._points = points
        self._lengths = lengths

    def told(self) -> dict[str, Any]:
        """As a message has it."""
        count = self.count
        # A hit leaves the last token to compute, though its block is cached.
        is_whole = 0 < count.cached == count.prompt - 1
        stored = count.prompt if is_whole else count.cached
        created = created_tokens(self._points, self._lengths, stored)
        return {
            "input_tokens": count.prompt - count.cached - created.short - created.long,
            "cache_read_input_tokens": count.cached,
            "cache_creation_input_tokens": created.short + created.long,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created.short,
                "ephemeral_1h_input_tokens": created.long,
            },
            "output_tokens": count.completion,
            "service_tier": "standard",
        }


async def apply_breakpoints(
    service: Service, body: CountTokensRequest, call: ChatCall, prepared: PreparedChat
) -> Usage:
    """Have a prompt kept up to the breakpoints of its body, for their time after each use.

    The longest of each ttl counts. Each is found by the prompt of the conversation up to it: the
    tokens that it has in common with the whole. Beyond the last full block nothing is cached.
    """
    read = partial(read_breakpoints, body)
    marked = (
        await read_many(count_blocks(body.messages), read)
        if prepared.request.params.is_stored
        else ()
    )
    points = list({one.ttl: one for one in marked}.values())
    token_ids = prepared.request.prompt_token_ids
    full = len(token_ids) - len(token_ids) % service.llm.engine.config.block_size
    lengths = []
    for point in points:
        turns = begin_of(body, point)
        length = full
        if turns is not None:
            begin = body.model_copy(update={"messages": turns})
            messages = await read_many(count_blocks(turns), partial(read_messages, begin))
            cut = replace(call, messages=messages, template=_whole(call.template))
            length = min(full, await _count_common(service, cut, token_ids))
        lengths.append(length)
        prepared.request.retain(length, _SECONDS[point.ttl])
    return Usage(points, lengths)


def _whole(template: Any) -> dict[str, Any]:
    """The last message is ended, and nothing begins the next."""
    return {**template, "add_generation_prompt": False, "continue_final_message": False}


async def _count_common(service: Service, call: ChatCall, token_ids: Sequence[int]) -> int:
    """Tokens that a beginning has in common with the whole; 0 if the template refuses it alone."""
    try:
        name = service.new_id("part")
        prepared = await prepare_chat(service, call, name, stream=False, is_kept=False)
    except RequestError:
        return 0
    begin = prepared.request.prompt_token_ids
    # In C, which takes a tenth of the time: a prompt may have a hundred thousand tokens.
    differ = compress(count(), map(ne, begin, token_ids))
    return next(differ, min(len(begin), len(token_ids)))
