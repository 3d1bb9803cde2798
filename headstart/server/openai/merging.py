"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

__all__ = ["merge"]

Item = TypeVar("Item")


def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """The items of all streams as they come; all streams are closed at the end.

    A stream is asked for its next item when the last one was taken, so a slow reader holds up all
    of them and nothing piles up here. The first exception ends all.
    """
    if len(streams) == 1:  # a task for each item is as much work as the rest of a small answer
        return streams[0]
    return _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                found = task.result()
                if found:
                    yield found[0]
                    waiting[asyncio.ensure_future(_next(streams[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            async with aclosing(stream):
                pass


async def _next(stream: AsyncGenerator[Item]) -> tuple[Item] | tuple[()]:
    """The next item, or nothing at the end: a task cannot end with StopAsyncIteration."""
    async for item in stream:
        return (item,)
    return ()
