"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

from collections.abc import Container

from headstart.server.answers.calls import read_call
from headstart.server.answers.source import Reading, Source

__all__ = ["CLOSE", "OPEN", "read_hermes"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(source: Source, names: Container[str]) -> Reading[None]:
    """Texts and calls; a call of an unknown tool is told too, so that its caller can say so."""
    index = 0
    while (yield from source.until((OPEN,), source.content, keeps_space=not index)):
        space = source.left_out
        text = yield from read_call(source, index)
        if text is not None:
            source.content(space + OPEN + text)
            continue
        index += 1
        space = yield from source.space()
        if not (yield from source.match(CLOSE)):
            source.back(space)
