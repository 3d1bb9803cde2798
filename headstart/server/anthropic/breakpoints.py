"""Breakpoints of the cache: which beginnings of a prompt a client marked as worth keeping.

The cache keeps every full block of every prompt, marked or not, and finds it again whatever the
marks say. Up to a mark the blocks are reused after all others, until the mark's time is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headstart.server.anthropic.schema import (
    Block,
    CacheControl,
    CountTokensRequest,
    Marked,
    ToolResultBlock,
    Turn,
)
from headstart.server.errors import ApiError

__all__ = ["Breakpoint", "Creation", "begin_of", "created_tokens", "read_breakpoints"]

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
    """In the order of the prompt. Raises ApiError: more than four, or a longer one after a shorter.

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
    """Those of a block, and of the blocks that are the result of a tool."""
    within = block.content if isinstance(block, ToolResultBlock) else None
    for one in [*(within if isinstance(within, list) else ()), block]:
        mark = getattr(one, "cache_control", None)
        if mark is not None:
            yield mark


def begin_of(body: CountTokensRequest, point: Breakpoint) -> list[Turn] | None:
    """The conversation up to a breakpoint; None if that is all of it.

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
    """What breakpoints at `lengths` tokens of a prompt created, of which the first were cached.

    >>> points = [Breakpoint("1h"), Breakpoint("5m", 0)]
    >>> created_tokens(points, [100, 160], 64)
    Creation(short=60, long=36)
    """
    reach = {"1h": num_cached, "5m": num_cached}
    for point, length in zip(points, lengths, strict=True):
        reach[point.ttl] = max(reach[point.ttl], length)
    long = reach["1h"] - num_cached
    return Creation(max(0, reach["5m"] - num_cached - long), long)
