"""JSON of long bodies, read part by part: other threads run between any two of them.

`json.loads` keeps the interpreter's lock until all is read: 60 ms for the token ids in 2 MB, in
which no stream of the server goes on, whatever thread reads. Here C reads parts of 32 Ki characters
at the most, a run of numbers or a piece of a string at a time, and Python what holds them: the same
time for numbers, three times as much for texts, and ten times for many small objects.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from typing import Any

__all__ = ["MAX_NUMBERS", "TooManyError", "read_json"]

MAX_VALUES = 1 << 20
"""Of a body. Freeing so many takes 20 ms, in which no other thread runs."""
MAX_OBJECTS = 20_000
"""Of a body, such as messages and their parts; and as many lists, and fields of one object. Some
API has 0.7 µs of the event loop for each, and pydantic checks all at once."""
MAX_NUMBERS = 1 << 18
"""Next to each other in a list; also as many as there are tokens in the largest vocabularies."""
_PART = 1 << 15  # characters
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBERS = re.compile(r"[-+.0-9eE \t\n\r,]*+")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # of a character whose other half may follow
_decode = json.JSONDecoder().raw_decode


class TooManyError(ValueError):
    """More numbers or values than any request needs.

    name: the outermost field that they are in; empty if they are in none, or in several.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def _too_many(where: str, most: int, kind: str) -> TooManyError:
    return TooManyError(f"{where} has more than {most:,} {kind}; allowed: {most:,} at most", "")


def read_json(data: bytes, max_numbers: int = MAX_NUMBERS) -> Any:
    """What `json.loads` returns, and its errors; TooManyError (a ValueError) before it is too late.

    max_numbers: in one list.
    """
    decoder = codecs.getincrementaldecoder(json.detect_encoding(data))("surrogatepass")
    starts = range(0, len(data), 1 << 20)
    parts = [decoder.decode(data[at : at + (1 << 20)]) for at in starts]
    reader = _Reader("".join([*parts, decoder.decode(b"", final=True)]), max_numbers)
    return reader.read()


class _Reader:
    """Reads one text. Every method begins at `_at`, and leaves it behind what it has read."""

    def __init__(self, text: str, max_numbers: int) -> None:
        self._text = text
        self._max_numbers = max_numbers
        self._at = 0
        self._num_values = 0
        self._num_opened: Counter[str] = Counter()  # by what they are
        self._name = ""  # of the outermost object's field

    def read(self) -> Any:
        value = self._value(0)
        if self._next():
            raise self._wrong("Extra data")
        return value

    def _wrong(self, what: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(what, self._text, self._at)

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        text = self._text
        while True:
            found = _SPACE.match(text, self._at, self._at + _PART)
            assert found is not None
            self._at = found.end()
            if len(found[0]) < _PART:
                return text[self._at : self._at + 1]

    def _count(self, more: int) -> None:
        self._num_values += more
        if self._num_values > MAX_VALUES:
            raise _too_many("the body", MAX_VALUES, "values")

    def _open(self, kind: str) -> None:
        """An object or a list begins."""
        self._num_opened[kind] += 1
        if self._num_opened[kind] > MAX_OBJECTS:
            raise _too_many("the body", MAX_OBJECTS, kind)
        self._at += 1

    def _value(self, depth: int) -> Any:
        self._count(1)
        first = self._next()
        if first == '"':
            return self._string()
        if first == "[":
            return self._list(depth + 1)
        if first == "{":
            return self._object(depth + 1)
        value, self._at = _decode(self._text, self._at)
        return value

    def _object(self, depth: int) -> dict[str, Any]:
        self._open("objects")
        read: dict[str, Any] = {}
        if self._next() == "}":
            self._at += 1
            return read
        while True:
            if self._next() != '"':
                raise self._wrong("Expecting property name enclosed in double quotes")
            name = self._string()
            if depth == 1:
                self._name = name
            if self._next() != ":":
                raise self._wrong("Expecting ':' delimiter")
            self._at += 1
            read[name] = self._value(depth)
            if len(read) > MAX_OBJECTS:
                raise _too_many("an object", MAX_OBJECTS, "fields")
            if self._ends("}"):
                return read

    def _list(self, depth: int) -> list[Any]:
        self._open("lists")
        read: list[Any] = []
        if self._next() == "]":
            self._at += 1
            return read
        while True:
            if (first := self._next()).isdigit() or first == "-":
                self._numbers(read)
            read.append(self._value(depth))
            if self._ends("]"):
                return read

    def _ends(self, bracket: str) -> bool:
        """Whether a list or an object ends here, and does not go on."""
        found = self._next()
        if found not in (bracket, ",") or not found:
            raise self._wrong("Expecting ',' delimiter")
        self._at += 1
        return found == bracket

    def _numbers(self, read: list[Any]) -> None:
        """Numbers with a comma behind each, as many as come."""
        before = len(read)
        while True:
            found = _NUMBERS.match(self._text, self._at, self._at + _PART)
            assert found is not None
            end = found[0].rfind(",")
            if end < 0:
                return
            try:
                part = json.loads(f"[{found[0][:end]}]")
            except json.JSONDecodeError as error:
                self._at += error.pos - 1
                raise self._wrong(error.msg) from None
            if not part:
                raise self._wrong("Expecting value")
            self._count(len(part))
            read += part
            self._at += end + 1
            if len(read) - before > self._max_numbers:
                text = (
                    f"more than {self._max_numbers:,} numbers in a list; allowed: so many at most"
                )
                raise TooManyError(f"{self._name or 'the body'} has {text}", self._name)

    def _string(self) -> str:
        parts: list[str] = []
        self._at += 1
        while True:
            parts.append(self._piece())
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return parts[0] if len(parts) == 1 else "".join(parts)
            if not parts[-1]:
                raise self._wrong("Expecting the rest of a string")

    def _piece(self) -> str:
        """Characters of a string; none at its end, and where it is wrong."""
        text, start, stop = self._text, self._at, self._at + _PART
        end = text.find('"', start, stop)
        piece = text[start : end if end >= 0 else stop]
        if piece.isprintable() and "\\" not in piece:  # in a tenth of the time
            self._at += len(piece)
            return piece
        found = _CHARACTERS.match(text, start, stop)
        assert found is not None
        piece = found[0]
        if len(piece) > _PART - 6 and _HALF.search(piece, len(piece) - 6):
            before = piece[:-6]
            if (len(before) - len(before.rstrip("\\"))) % 2 == 0:  # else it is text: \\ud83d
                piece = before
        self._at += len(piece)
        return str(json.loads(f'"{piece}"')) if "\\" in piece else piece
