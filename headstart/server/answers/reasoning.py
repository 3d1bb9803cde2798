"""Reasoning before an answer: `<think>...</think>`, as Qwen 3, DeepSeek R1 and others write it."""

from __future__ import annotations

from headstart.server.answers.source import Reading, Source

__all__ = ["CLOSE", "OPEN", "read_reasoning"]

OPEN, CLOSE = "<think>", "</think>"


def read_reasoning(source: Source, *, is_open: bool) -> Reading[None]:
    """Read reasoning if there is any; `is_open`: the prompt ends within it.

    White space around it is left out. An answer without it stays as it is.
    """
    space = yield from source.space()
    found = yield from source.match(OPEN)
    if not found and not is_open:
        source.back(space)
        return
    yield from source.space()
    yield from source.until((CLOSE,), source.reasoning)
    yield from source.space()
