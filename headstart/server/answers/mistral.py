"""Calls as Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`.

Newer models write `[TOOL_CALLS]name[ARGS]{...}`, once for each call, some of them with
`[CALL_ID]...` after the name.
"""

from __future__ import annotations

from collections.abc import Container

from headstart.server.answers.calls import read_call, read_value
from headstart.server.answers.parts import CallArguments, CallBegin
from headstart.server.answers.source import END, Reading, Source

__all__ = ["ARGUMENTS", "CALL_ID", "TAG", "read_mistral"]

TAG, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(source: Source, names: Container[str]) -> Reading[None]:
    """Texts and calls."""
    index = 0
    while (yield from source.until((TAG,), source.content, keeps_space=not index)):
        space = yield from source.space()
        if (yield from source.match("[")):
            index = yield from _read_list(source, index, space)
        else:
            index = yield from _read_named(source, index, space)


def _read_list(source: Source, index: int, space: str) -> Reading[int]:
    """The calls of a list; the index of the next one."""
    read = f"{TAG}{space}["
    while True:
        text = yield from read_call(source, index)
        if text is not None:
            source.content(read + text)
            return index
        index += 1
        read = yield from source.space()
        if (yield from source.match(",")):
            read += ","
        elif (yield from source.match("]")):
            return index
        else:
            source.back(read)
            return index


def _read_named(source: Source, index: int, space: str) -> Reading[int]:
    """A call whose name stands before its arguments; the index of the next one."""
    read: list[str] = []
    found = yield from source.until((CALL_ID, ARGUMENTS, "{", "\n"), read.append)
    name = "".join(read)
    if found == CALL_ID:
        found = yield from source.until((ARGUMENTS, "{", "\n"), read.append)
    if found != ARGUMENTS:
        source.back(found)
    if found in (END, "\n") or not name:
        source.content("".join([TAG, space, *read]))
        return index
    source.parts.append(CallBegin(index, name))
    yield from read_value(source, lambda text: source.parts.append(CallArguments(index, text)))
    return index + 1
