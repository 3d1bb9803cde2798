"""Breakpoints of the cache, and counts of tokens as Anthropic reports them.

Every full block of every prompt is cached, marked or not. Up to a breakpoint, blocks are evicted
after all others, until its time is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from operator import ne
from typing import Any, Literal

from headstart.errors import RequestError
from headstart.server.anthropic.conversation import count_blocks, read_messages
from headstart.server.anthropic.schema import (
    Block,
    CacheControl,
    CountTokensRequest,
    Marked,
    ToolResultBlock,
    Turn,
)
from headstart.server.chats import ChatCall, PreparedChat, TokenCount, prepare_chat, read_many
from headstart.server.errors import ApiError
from headstart.server.service import Service

__all__ = ["Usage", "apply_breakpoints", "read_breakpoints"]

MAX_BREAKPOINTS = 4
Ttl = Literal["5m", "1h"]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The prompt is worth keeping up to a block for `ttl`.

    turn: the message, None for the tools and the system text. block: in that message, None for
    all of it.
    """

    ttl: Ttl
    turn: int | None = None
    block: int | None = None


def read_breakpoints(body: CountTokensRequest) -> tuple[Breakpoint, ...]:
    """Return the breakpoints in order. Raises ApiError: over four, or a longer after a shorter.

    A mark of the whole request stands at its last block.
    """
    found = list(_marks(body))
    if body.cache_control is not None:
        found.append(Breakpoint(body.cache_control.ttl, len(body.messages) - 1))
    if len(found) > MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"{len(found)} blocks have cache_control; allowed: {MAX_BREAKPOINTS} at most",
            param="cache_control",
        )
    ttls = [one.ttl for one in found]
    if ttls != sorted(ttls):  # "1h" before "5m"
        raise ApiError(
            400,
            'a cache_control with ttl "1h" comes after one with "5m"; allowed: the longer first',
            param="cache_control",
        )
    return tuple(found)


def _marks(body: CountTokensRequest) -> Iterator[Breakpoint]:
    system = [] if isinstance(body.system, str) else body.system or []
    for one in [*(body.tools or ()), *system]:
        if isinstance(one, Marked) and one.cache_control is not None:
            yield Breakpoint(one.cache_control.ttl)
    for place, turn in enumerate(body.messages):
        for at, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            for mark in _marks_of(block):
                yield Breakpoint(mark.ttl, place, at)


def _marks_of(block: Block) -> Iterator[CacheControl]:
    """Yield the marks of a block, and of the blocks in a tool's result."""
    within = block.content if isinstance(block, ToolResultBlock) else None
    for one in [*(within if isinstance(within, list) else ()), block]:
        mark = getattr(one, "cache_control", None)
        if mark is not None:
            yield mark


def begin_of(body: CountTokensRequest, point: Breakpoint) -> list[Turn] | None:
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


@dataclass(frozen=True, slots=True)
class Creation:
    """Tokens that were written to the cache for a request and were not in it, by ttl."""

    short: int = 0
    long: int = 0


def created_tokens(
    points: Sequence[Breakpoint], lengths: Sequence[int], num_cached: int
) -> Creation:
    """Return the tokens created up to breakpoints at `lengths`; the first were cached.

    >>> points = [Breakpoint("1h"), Breakpoint("5m", 0)]
    >>> created_tokens(points, [100, 160], 64)
    Creation(short=60, long=36)
    """
    reach = {"1h": num_cached, "5m": num_cached}
    for point, length in zip(points, lengths, strict=True):
        reach[point.ttl] = max(reach[point.ttl], length)
    long = reach["1h"] - num_cached
    return Creation(max(0, reach["5m"] - num_cached - long), long)


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
        """Return the usage as a message has it."""
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
    """Retain a prompt up to the breakpoints of its body, for their time after each use.

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
    full = len(token_ids) - len(token_ids) % service.llm.block_size
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
    """Return options that end the last message and begin no other."""
    return {**template, "add_generation_prompt": False, "continue_final_message": False}


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
