"""Calls as Llama 3 writes them: `{"name": ..., "parameters": ...}` in place of an answer.

`<|python_tag|>` may stand before it, also after a text. Several calls are parted by `;`. Nothing
else marks a call, so an object is one only if it names a tool of the request.
"""

from __future__ import annotations

from collections.abc import Container

from headstart.server.answers.calls import read_call
from headstart.server.answers.source import Reading, Source

__all__ = ["TAG", "read_llama"]

TAG = "<|python_tag|>"


def read_llama(source: Source, names: Container[str]) -> Reading[None]:
    """Calls, or a text."""
    index = 0
    before = yield from source.space()
    if (yield from source.match(TAG)):
        before += TAG
    while True:
        before += yield from source.space()
        text = yield from _read_call(source, index, names)
        if text is None:
            index += 1
            before = yield from _read_separator(source)
            continue
        if TAG in before or text:
            source.content(before + text)
        else:
            source.back(before)
        before = yield from source.until((TAG,), source.content, keeps_space=not index)
        if not before:
            return


def _read_call(source: Source, index: int, names: Container[str]) -> Reading[str | None]:
    """As `read_call`, which reads nothing where no object begins."""
    if not (yield from source.match("{")):
        return ""
    source.back("{")
    return (yield from read_call(source, index, names))


def _read_separator(source: Source) -> Reading[str]:
    """White space that no `;` follows."""
    space = yield from source.space()
    return "" if (yield from source.match(";")) else space
