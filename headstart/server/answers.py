"""Content, reasoning and tool calls in the text of an answer, parsed while it arrives.

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": ...}</tool_call>
    Llama 3        {"name": ..., "parameters": ...} instead of an answer, several separated by `;`
    Mistral        [TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or for each call
                   [TOOL_CALLS]name[ARGS]{...}, some with [CALL_ID]... after the name
    reasoning      <think>...</think> before an answer: Qwen 3, DeepSeek R1 and others

A reader is a generator that parses one of these formats. It yields when it needs a character, gets
the character by `send`, and adds the parsed parts to its `CharacterSource`.

A call's name is passed on when it is complete. Its arguments are passed on as they arrive, exactly
as the model wrote them. The next turn's prompt then contains the same tokens and hits their blocks.
Arguments that precede the name are passed on after it. If the arguments are a JSON string, its
content is passed on.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

END = ""
"""The character that marks the end of the text."""

Result = TypeVar("Result")
Reading = Generator[None, str, Result]


class Part(NamedTuple):
    """A piece of content, of reasoning or of a tool call.

    text: for a call, a piece of its arguments. number: the call's number in its answer, from 0.
    name: the name of the called tool, only in the first piece of the call.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    number: int = 0
    name: str = ""


def join(parts: Iterable[Part], *, whole_calls: bool = False) -> list[Part]:
    """Return the parts, with adjacent parts of the same kind joined.

    whole_calls: join a call's name with its arguments, too.

    >>> pieces = [Part("call", "", 0, "f"), Part("call", "{", 0), Part("call", "}", 0)]
    >>> [(part.name, part.text) for part in join(pieces)]
    [('f', ''), ('', '{}')]
    >>> [(part.name, part.text) for part in join(pieces, whole_calls=True)]
    [('f', '{}')]
    """
    groups = groupby(parts, lambda part: (part.kind, part.number, "" if whole_calls else part.name))
    joined = []
    for _, (first, *rest) in groups:
        text = "".join([first.text, *(part.text for part in rest)])
        joined.append(Part(first.kind, text, first.number, first.name))
    return joined


class CharacterSource:
    """Characters that a reader takes and may put back, and the parts that it read."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._returned: list[str] = []  # a stack of the characters that were put back
        self.record: list[str] | None = None
        """The characters that were read since a reader set this list; None to record nothing."""
        self.left_out = ""
        """White space that `read_until` left out before the last marker."""

    def content(self, text: str) -> None:
        self.parts.append(Part("content", text))

    def reasoning(self, text: str) -> None:
        self.parts.append(Part("reasoning", text))

    def next(self) -> Reading[str]:
        """Return the next character. At the end of the text, every call returns END."""
        character = self._returned.pop() if self._returned else (yield)
        if character == END:
            self._returned.append(END)
        elif self.record is not None:
            self.record.append(character)
        return character

    def push_back(self, text: str) -> None:
        """Put back the characters that were read last. `next` itself puts back END."""
        self._returned += reversed(text)
        if self.record is not None:
            del self.record[len(self.record) - len(text) :]

    def space(self) -> Reading[str]:
        """Read white space, up to the next character that is not white space."""
        space = ""
        while (character := (yield from self.next())).isspace():
            space += character
        self.push_back(character)
        return space

    def non_space(self) -> Reading[str]:
        """Skip white space, and read the next character or END."""
        yield from self.space()
        return (yield from self.next())

    def match(self, text: str) -> Reading[bool]:
        """Return True if `text` comes next, and read it only then."""
        read = ""
        for expected in text:
            character = yield from self.next()
            read += character
            if character != expected:
                self.push_back(read)
                return False
        return True

    def read_until(
        self, markers: Sequence[str], emit: Callable[[str], None], *, keeps_space: bool = True
    ) -> Reading[str]:
        """Pass the text before the first marker to `emit`; return the marker, or END without one.

        White space before the marker is left out. White space before END is left out unless
        `keeps_space` is set. No marker may be a prefix of another.
        """
        prefixes = prefixes_of(tuple(markers))
        held = space = ""
        while True:
            character = yield from self.next()
            held += character
            while held and (character == END or held not in prefixes):
                first, held = held[0], held[1:]
                space += first
                if not first.isspace():
                    emit(space)
                    space = ""
            if held in markers:
                self.left_out = space
                return held
            if character == END:
                if space and keeps_space:
                    emit(space)
                return END


@lru_cache(64)
def prefixes_of(markers: tuple[str, ...]) -> frozenset[str]:
    """Return every prefix of every marker, the markers included."""
    return frozenset(marker[: n + 1] for marker in markers for n in range(len(marker)))


class AnswerParser:
    """Parser of one answer: `feed` takes its text piece by piece.

    The joined parts do not depend on how the text was cut into pieces. has_call: True after the
    first part of a call.

    read: the format's reader. hidden: special tokens to remove from the text. max_calls: number of
    calls to return; None for all. only_calls: return no content. A forced call that was cut off
    before its name would otherwise become content.
    """

    def __init__(
        self,
        read: Callable[[CharacterSource], Reading[None]],
        hidden: Sequence[str] = (),
        *,
        max_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        self.has_call = False
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._hidden = frozenset(hidden)
        self._prefixes = prefixes_of(tuple(hidden))
        self._held = ""  # text that may be the beginning of a hidden token
        self._source = CharacterSource()
        self._reading = read(self._source)
        next(self._reading, None)

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the parts that this text completes; with the last text, all remaining parts."""
        characters: Iterable[str] = self._without_hidden(text) if self._hidden else text
        if is_last:
            characters = [*characters, *self._held, END]
        with suppress(StopIteration):  # raised when the reader has finished
            for character in characters:
                self._reading.send(character)
        parts = join(part for part in self._source.parts if self._is_visible(part))
        self._source.parts.clear()
        self.has_call = self.has_call or any(part.kind == "call" for part in parts)
        return parts

    def _without_hidden(self, text: str) -> list[str]:
        visible = []
        for character in text:
            self._held += character
            while self._held and self._held not in self._prefixes:
                visible.append(self._held[0])
                self._held = self._held[1:]
            if self._held in self._hidden:
                self._held = ""
        return visible

    def _is_visible(self, part: Part) -> bool:
        if part.kind == "call":
            return self._max_calls is None or part.number < self._max_calls
        return part.kind == "reasoning" or not self._only_calls


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def read_reasoning(source: CharacterSource, *, is_open: bool) -> Reading[None]:
    """Read the reasoning at the beginning of an answer, without the white space around it.

    is_open: the prompt ends inside the reasoning.
    """
    space = yield from source.space()
    if not (yield from source.match(THINK_OPEN)) and not is_open:
        source.push_back(space)
        return
    yield from source.space()
    yield from source.read_until((THINK_CLOSE,), source.reasoning)
    yield from source.space()


_ARGUMENTS = ("arguments", "parameters")
_PAIRS = {"{": "}", "[": "]"}
_ENDS = (END, ",", "}", "]")


class _MalformedError(Exception):
    """The text is not JSON, or not a call."""


def _read_call(
    source: CharacterSource, index: int, names: Container[str] | None = None
) -> Reading[str | None]:
    """Read a call. Return None if its name was passed on, even if the rest is malformed.

    If the text is not an object with a name, or its name is not in `names`, return the text that
    was read.
    """
    name = ""
    has_arguments = False
    early: list[str] = []  # arguments before the name

    def add_arguments(text: str) -> None:
        nonlocal has_arguments
        has_arguments = True
        if name:
            source.parts.append(Part("call", text, index))
        else:
            early.append(text)

    record: list[str] = []
    source.record = record
    with suppress(_MalformedError):
        yield from _expect(source, "{")
        while (character := (yield from source.non_space())) != "}":
            if character == ",":
                continue
            key = yield from _read_string(source, character)
            yield from _expect(source, ":")
            if key == "name":
                text = yield from _read_string(source, (yield from source.non_space()))
                if name or not text or (names is not None and text not in names):
                    raise _MalformedError
                name = text
                source.parts.append(Part("call", "", index, name))
                if early:
                    add_arguments("".join(early))
            elif key in _ARGUMENTS and not has_arguments:
                yield from _read_value(source, add_arguments)
            else:
                yield from _read_value(source, lambda text: None)
        if name and not has_arguments:
            add_arguments("{}")
    source.record = None
    return None if name else "".join(record)


def _expect(source: CharacterSource, character: str) -> Reading[None]:
    if (yield from source.non_space()) != character:
        raise _MalformedError


def _read_string(source: CharacterSource, opening: str) -> Reading[str]:
    if opening != '"':
        raise _MalformedError
    pieces: list[str] = []
    yield from _read_quoted(source, pieces.append)
    try:
        return str(json.loads("".join(pieces)))
    except ValueError as error:
        raise _MalformedError from error


def _read_quoted(source: CharacterSource, emit: Callable[[str], None]) -> Reading[None]:
    """Pass on a JSON string with its quotes. Raw line breaks, which JSON forbids, are escaped."""
    emit('"')
    is_escaped = False
    while (character := (yield from source.next())) != END:
        emit(character if character >= " " else json.dumps(character)[1:-1])
        if character == '"' and not is_escaped:
            return
        is_escaped = character == "\\" and not is_escaped


def _read_value(source: CharacterSource, emit: Callable[[str], None]) -> Reading[None]:
    """Read arguments and pass them on as written; pass on a string's content, and {} for null."""
    opening = yield from source.non_space()
    if opening in _PAIRS:
        depth = 1
        emit(opening)
        while depth and (character := (yield from source.next())) != END:
            if character == '"':
                yield from _read_quoted(source, emit)
            else:
                emit(character)
                depth += (character in _PAIRS) - (character in _PAIRS.values())
    elif opening == '"':
        pieces: list[str] = []
        yield from _read_quoted(source, pieces.append)
        emit(_unquote("".join(pieces)))
    elif opening in _ENDS:
        source.push_back(opening)
    else:
        text = opening
        while (character := (yield from source.next())) not in _ENDS:
            text += character
        source.push_back(character)
        emit("{}" if text.strip() == "null" else text.strip())


def _unquote(text: str) -> str:
    """Return the value of a JSON string, whose last quote may be missing."""
    for candidate in (text, f'{text}"'):
        with suppress(ValueError):
            return str(json.loads(candidate))
    return text


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(source: CharacterSource, names: Container[str]) -> Reading[None]:
    """Read texts and calls. Calls of unknown tools are passed on; the client refuses them."""
    index = 0
    while (yield from source.read_until((HERMES_OPEN,), source.content, keeps_space=not index)):
        space = source.left_out
        text = yield from _read_call(source, index)
        if text is not None:
            source.content(space + HERMES_OPEN + text)
            continue
        index += 1
        space = yield from source.space()
        if not (yield from source.match(HERMES_CLOSE)):
            source.push_back(space)


PYTHON_TAG = "<|python_tag|>"


def _read_llama(source: CharacterSource, names: Container[str]) -> Reading[None]:
    index = 0
    before = yield from source.space()
    if (yield from source.match(PYTHON_TAG)):
        before += PYTHON_TAG
    while True:
        before += yield from source.space()
        text: str | None = ""
        if (yield from source.match("{")):
            source.push_back("{")
            text = yield from _read_call(source, index, names)
        if text is None:
            index += 1
            before = yield from source.space()
            if (yield from source.match(";")):
                before = ""
            continue
        if PYTHON_TAG in before or text:
            source.content(before + text)
        else:
            source.push_back(before)
        before = yield from source.read_until((PYTHON_TAG,), source.content, keeps_space=not index)
        if not before:
            return


TOOL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(source: CharacterSource, names: Container[str]) -> Reading[None]:
    index = 0
    while (yield from source.read_until((TOOL_CALLS,), source.content, keeps_space=not index)):
        space = yield from source.space()
        read = _read_list if (yield from source.match("[")) else _read_named
        index = yield from read(source, index, space)


def _read_list(source: CharacterSource, index: int, space: str) -> Reading[int]:
    """Read the calls of a list, and return the index of the next call."""
    before = f"{TOOL_CALLS}{space}["
    while True:
        text = yield from _read_call(source, index)
        if text is not None:
            source.content(before + text)
            return index
        index += 1
        before = yield from source.space()
        if (yield from source.match(",")):
            before += ","
            continue
        if not (yield from source.match("]")):
            source.push_back(before)
        return index


def _read_named(source: CharacterSource, index: int, space: str) -> Reading[int]:
    """Read a call whose name precedes its arguments, and return the index of the next call."""
    read: list[str] = []
    marker = yield from source.read_until(
        (MISTRAL_CALL_ID, MISTRAL_ARGUMENTS, "{", "\n"), read.append
    )
    name = "".join(read)
    if marker == MISTRAL_CALL_ID:
        marker = yield from source.read_until((MISTRAL_ARGUMENTS, "{", "\n"), read.append)
    if marker != MISTRAL_ARGUMENTS:
        source.push_back(marker)
    if marker in (END, "\n") or not name:
        source.content("".join([TOOL_CALLS, space, *read]))
        return index
    source.parts.append(Part("call", "", index, name))
    yield from _read_value(source, lambda text: source.parts.append(Part("call", text, index)))
    return index + 1


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The format in which a model writes tool calls.

    read: reads the calls of an answer; takes the names of the tools. markers: texts that must be
    detokenized even if they are special tokens. id_length: length of a call's id, if the chat
    template prescribes it.

    A forced answer is `head`, the calls separated by `between`, and `tail`. If `between` is None,
    the answer has one call. A call is `opening`, the arguments, and `closing`. In `opening`, the
    tool's name in JSON replaces {name}.
    """

    read: Callable[[CharacterSource, Container[str]], Reading[None]]
    markers: tuple[str, ...]
    opening: str
    closing: str
    head: str = ""
    tail: str = ""
    between: str | None = None
    id_length: int | None = None

    def new_id(self, prefix: str) -> str:
        """Return a new id for a call. It has no prefix if the format fixes the length of ids."""
        if self.id_length is None:
            return f"{prefix}{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_length))


HERMES = CallFormat(
    read=_read_hermes,
    markers=(HERMES_OPEN, HERMES_CLOSE),
    opening=HERMES_OPEN + '\n{"name": {name}, "arguments": ',
    closing="}\n" + HERMES_CLOSE,
    between="\n",
)
LLAMA = CallFormat(
    read=_read_llama,
    markers=(PYTHON_TAG,),
    opening='{"name": {name}, "parameters": ',
    closing="}",
)
MISTRAL = CallFormat(
    read=_read_mistral,
    markers=(TOOL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID),
    opening='{"name": {name}, "arguments": ',
    closing="}",
    head=TOOL_CALLS + "[",
    tail="]",
    between=", ",
    id_length=9,
)


def choose_format(template: str) -> CallFormat | None:
    """Return the format of tool calls in a chat template; None if it has no supported format.

    A template with tools and without a known marker is assumed to use Llama's format, plain JSON.
    """
    for marker, form in (("<function=", None), (TOOL_CALLS, MISTRAL), (HERMES_OPEN, HERMES)):
        if marker in template:
            return form
    return LLAMA if "tools" in template else None
