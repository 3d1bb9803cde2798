"""One call of a tool in JSON: `{"name": "f", "arguments": {...}}`.

The name is told when it is known and the arguments as they come, character by character as the
model wrote them: their spelling is what the next turn's prompt will have. Arguments that come
before the name wait for it. Llama says "parameters" for "arguments". Some models write the
arguments as a text of JSON; that text is told.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Container

from headstart.server.answers.parts import CallArguments, CallBegin
from headstart.server.answers.source import END, Reading, Source

__all__ = ["read_call", "read_value"]

_ARGUMENTS = ("arguments", "parameters")
_PAIRS = {"{": "}", "[": "]"}
_ENDS = (END, ",", "}", "]")


class _Malformed(Exception):
    """It is not JSON, or not a call."""


def read_call(
    source: Source, index: int, names: Container[str] | None = None
) -> Reading[str | None]:
    """Read a call; None once its name was told, whatever came after it.

    Else all that was read, which is no call: it breaks off, it is not an object with a name, or
    the name is none of `names`.
    """
    call = _Call(source, index, names)
    source.keep()
    with contextlib.suppress(_Malformed):
        yield from _read_object(source, call)
    read = source.kept()
    return None if call.is_told else read


class _Call:
    def __init__(self, source: Source, index: int, names: Container[str] | None) -> None:
        self._source = source
        self._index = index
        self._names = names
        self._early: list[str] = []  # arguments before the name
        self.is_told = False
        self.has_arguments = False

    def name(self, name: object) -> None:
        if not isinstance(name, str) or not name or self.is_told:
            raise _Malformed
        if self._names is not None and name not in self._names:
            raise _Malformed
        self.is_told = True
        self._source.parts.append(CallBegin(self._index, name))
        if self._early:
            self.argument("".join(self._early))

    def argument(self, text: str) -> None:
        self.has_arguments = True
        if self.is_told:
            self._source.parts.append(CallArguments(self._index, text))
        else:
            self._early.append(text)

    def end(self) -> None:
        """The object is closed."""
        if not self.has_arguments and self.is_told:
            self.argument("{}")


def _read_object(source: Source, call: _Call) -> Reading[None]:
    if (yield from source.solid()) != "{":
        raise _Malformed
    while True:
        character = yield from source.solid()
        if character == "}":
            call.end()
            return
        if character == ",":
            continue
        key = yield from _read_string(source, character)
        if (yield from source.solid()) != ":":
            raise _Malformed
        if key == "name":
            opening = yield from source.solid()
            call.name((yield from _read_string(source, opening)))
        elif key in _ARGUMENTS and not call.has_arguments:
            yield from read_value(source, call.argument)
        else:
            yield from read_value(source, lambda text: None)


def _read_string(source: Source, opening: str) -> Reading[str]:
    if opening != '"':
        raise _Malformed
    text = yield from _read_quoted(source)
    try:
        read = json.loads(text, strict=False)
    except ValueError as error:
        raise _Malformed from error
    assert isinstance(read, str)
    return read


def _read_quoted(source: Source) -> Reading[str]:
    """The rest of a string, with both of its quotes; without the last where the text ends."""
    read = ['"']
    is_escaped = False
    while True:
        character = yield from source.next()
        read.append(character)
        if character == END or (character == '"' and not is_escaped):
            return "".join(read)
        is_escaped = character == "\\" and not is_escaped


def read_value(source: Source, tell: Callable[[str], None]) -> Reading[None]:
    """Read a value of JSON and tell it; an object or a list bit by bit, as it was written."""
    opening = yield from source.solid()
    if opening in _PAIRS:
        yield from _read_nested(source, opening, tell)
    elif opening == '"':
        tell(_unquote((yield from _read_quoted(source))))
    elif opening in _ENDS:
        source.back(opening)
    else:
        read = opening
        while (character := (yield from source.next())) not in _ENDS:
            read += character
        source.back(character)
        tell("{}" if read.strip() == "null" else read.strip())


def _unquote(text: str) -> str:
    for whole in (text, f'{text}"'):
        try:
            return str(json.loads(whole, strict=False))
        except ValueError:
            pass
    return text


def _read_nested(source: Source, opening: str, tell: Callable[[str], None]) -> Reading[None]:
    depth = 1
    tell(opening)
    while depth:
        character = yield from source.next()
        if character == END:
            return
        if character == '"':
            yield from _tell_quoted(source, tell)
            continue
        tell(character)
        depth += (character in _PAIRS) - (character in _PAIRS.values())


def _tell_quoted(source: Source, tell: Callable[[str], None]) -> Reading[None]:
    """A string inside of a value, as it comes; line breaks in it, which are no JSON, as escapes."""
    tell('"')
    is_escaped = False
    while (character := (yield from source.next())) != END:
        tell(character if character >= " " else json.dumps(character)[1:-1])
        if character == '"' and not is_escaped:
            return
        is_escaped = character == "\\" and not is_escaped
