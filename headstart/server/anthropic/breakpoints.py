"""Breakpoints of the cache.

Every full block of every prompt is cached, marked or not. Up to a breakpoint, blocks are evicted
after all others, until its time is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count
from operator import ne
from typing import NamedTuple

from headstart.errors import RequestError
from headstart.server.anthropic.schema import (
    Block,
    CountTokensRequest,
    Marked,
    ToolDefinition,
    ToolResultBlock,
    Turn,
    count_blocks,
)
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.errors import ApiError
from headstart.server.service import Service
from headstart.server.usage import Usage

__all__ = ["apply_breakpoints", "created_tokens", "read_breakpoints"]

MAX_BREAKPOINTS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}


class Breakpoint(NamedTuple):
    """The end of a prefix that is worth keeping for `ttl`.

    turn: the message, None for the tools and the system text. block: in that message, None for
    all of it.
    """

    ttl: str
    turn: int | None = None
    block: int | None = None


def read_breakpoints(body: CountTokensRequest) -> tuple[Breakpoint, ...]:
    """Return the breakpoints in order. Raises ApiError: over four, or a longer after a shorter.

    A mark of the whole request stands at its last block.
    """
    points = list(_marks(body))
    if body.cache_control is not None:
        points.append(Breakpoint(body.cache_control.ttl, len(body.messages) - 1))
    refusal = ""
    ttls = [point.ttl for point in points]
    if len(points) > MAX_BREAKPOINTS:
        refusal = f"{len(points)} blocks have cache_control; allowed: {MAX_BREAKPOINTS} at most"
    elif ttls != sorted(ttls):  # "1h" before "5m"
        refusal = (
            'a cache_control with ttl "1h" comes after one with "5m"; allowed: the longer first'
        )
    if refusal:
        raise ApiError(400, refusal, param="cache_control")
    return tuple(points)


def _marks(body: CountTokensRequest) -> Iterator[Breakpoint]:
    system = [] if isinstance(body.system, str) else body.system or []
    tools = [tool for tool in body.tools or () if isinstance(tool, ToolDefinition)]
    for marked in (*tools, *system):
        if marked.cache_control is not None:
            yield Breakpoint(marked.cache_control.ttl)
    for place, turn in enumerate(body.messages):
        for number, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            within = block.content if isinstance(block, ToolResultBlock) else None
            blocks: list[Block | Marked] = [*(within if isinstance(within, list) else ()), block]
            for each in blocks:
                if isinstance(each, Marked) and each.cache_control is not None:
                    yield Breakpoint(each.cache_control.ttl, place, number)


def _begin_of(body: CountTokensRequest, point: Breakpoint) -> list[Turn] | None:
    """Return the conversation up to a breakpoint; None if that is all of it.

    Before the first message stands an empty one, which templates want.
    """
    if point.turn is None:
        return [Turn(role="user", content="")]
    last = body.messages[point.turn]
    is_last = point.turn == len(body.messages) - 1
    if point.block is None or isinstance(last.content, str):
        return None if is_last else body.messages[: point.turn + 1]
    if is_last and point.block == len(last.content) - 1:
        return None
    cut = Turn.model_construct(role=last.role, content=last.content[: point.block + 1])
    return [*body.messages[: point.turn], cut]


def created_tokens(lengths: Mapping[str, int], usage: Usage) -> dict[str, int]:
    """Return the tokens that were written to the cache up to breakpoints, by time to live.

    lengths: tokens of the prompt up to its last breakpoint of each time to live.

    >>> created_tokens({"1h": 100, "5m": 160}, Usage(prompts={"a": (200, 64)}))
    {'1h': 36, '5m': 60}
    """
    # A hit leaves the last token to compute, though its block is cached.
    is_whole = 0 < usage.cached == usage.prompt - 1
    stored = usage.prompt if is_whole else usage.cached
    long = max(0, lengths.get("1h", 0) - stored)
    return {"1h": long, "5m": max(0, lengths.get("5m", 0) - stored - long)}


async def apply_breakpoints(
    service: Service, body: CountTokensRequest, call: ChatCall, prepared: PreparedChat
) -> dict[str, int]:
    """Retain a prompt up to the breakpoints of its body, for their time after each use.

    Return the tokens up to the last breakpoint of each time to live. It is found by the prompt of
    the conversation up to it: the tokens that it has in common with the whole. Beyond the last full
    block nothing is cached.
    """
    lengths: dict[str, int] = {}
    if not prepared.request.params.is_stored:
        return lengths
    read = partial(read_breakpoints, body)
    points = await read_many(count_blocks(body.messages), read)
    token_ids = prepared.request.prompt_token_ids
    full = len(token_ids) - len(token_ids) % service.llm.block_size
    for ttl, point in {point.ttl: point for point in points}.items():
        turns = _begin_of(body, point)
        length = full
        if turns is not None:
            begin = body.model_copy(update={"messages": turns})
            messages = await read_many(count_blocks(turns), begin.read_messages)
            template = {"add_generation_prompt": False, "continue_final_message": False}
            template = {**call.template, **template}
            cut = replace(call, messages=messages, template=template)
            length = min(full, await _count_common(service, cut, token_ids))
        lengths[ttl] = length
        prepared.request.retain(length, _SECONDS[ttl])
    return lengths


async def _count_common(service: Service, call: ChatCall, token_ids: Sequence[int]) -> int:
    """Return the tokens that a prefix shares with the whole; 0 if the template refuses it alone."""
    try:
        name = service.new_id("part")
        prepared = await prepare_chat(service, call, name, stream=False, is_kept=False)
    except RequestError:
        return 0
    begin = prepared.request.prompt_token_ids
    # In C, which takes a tenth of the time: a prompt may have a hundred thousand tokens.
    differ = compress(count(), map(ne, begin, token_ids))
    return next(differ, min(len(begin), len(token_ids)))
