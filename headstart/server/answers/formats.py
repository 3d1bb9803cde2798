"""Formats of a model's answers: reasoning, calls of tools, and the choice by the chat template.

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": ...}</tool_call>
    Llama 3        {"name": ..., "parameters": ...} in place of an answer, several parted by `;`
    Mistral        [TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or for each call
                   [TOOL_CALLS]name[ARGS]{...}, some with [CALL_ID]... after the name
    reasoning      <think>...</think> before an answer: Qwen 3, DeepSeek R1 and others

A call's name is passed on when it is complete, and the arguments as they come, spelled as the model
wrote them: the next turn's prompt will have the same. Arguments before the name wait for it. Some
models write the arguments as a text of JSON; that text is passed on.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from collections.abc import Callable, Container
from dataclasses import dataclass

from headstart.server.answers.parser import END, CallArguments, CallBegin, Reading, Source

__all__ = [
    "CallFormat",
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "THINK_CLOSE",
    "THINK_OPEN",
    "TOOL_CALLS",
    "choose_format",
    "read_reasoning",
    "shows_reasoning",
]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def read_reasoning(source: Source, *, is_open: bool) -> Reading[None]:
    """Read reasoning if there is any; `is_open`: the prompt ends within it.

    White space around it is left out. An answer without it stays as it is.
    """
    space = yield from source.space()
    found = yield from source.match(THINK_OPEN)
    if not found and not is_open:
        source.back(space)
        return
    yield from source.space()
    yield from source.until((THINK_CLOSE,), source.reasoning)
    yield from source.space()


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


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(source: Source, names: Container[str]) -> Reading[None]:
    """Texts and calls; a call of an unknown tool is told too, so that its caller can say so."""
    index = 0
    while (yield from source.until((HERMES_OPEN,), source.content, keeps_space=not index)):
        space = source.left_out
        text = yield from read_call(source, index)
        if text is not None:
            source.content(space + HERMES_OPEN + text)
            continue
        index += 1
        space = yield from source.space()
        if not (yield from source.match(HERMES_CLOSE)):
            source.back(space)


PYTHON_TAG = "<|python_tag|>"


def read_llama(source: Source, names: Container[str]) -> Reading[None]:
    """Calls, or a text."""
    index = 0
    before = yield from source.space()
    if (yield from source.match(PYTHON_TAG)):
        before += PYTHON_TAG
    while True:
        before += yield from source.space()
        text = yield from _read_llama_call(source, index, names)
        if text is None:
            index += 1
            before = yield from _read_separator(source)
            continue
        if PYTHON_TAG in before or text:
            source.content(before + text)
        else:
            source.back(before)
        before = yield from source.until((PYTHON_TAG,), source.content, keeps_space=not index)
        if not before:
            return


def _read_llama_call(source: Source, index: int, names: Container[str]) -> Reading[str | None]:
    """Read a call as `read_call` does, but nothing where no object begins."""
    if not (yield from source.match("{")):
        return ""
    source.back("{")
    return (yield from read_call(source, index, names))


def _read_separator(source: Source) -> Reading[str]:
    """White space that no `;` follows."""
    space = yield from source.space()
    return "" if (yield from source.match(";")) else space


TOOL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(source: Source, names: Container[str]) -> Reading[None]:
    """Texts and calls."""
    index = 0
    while (yield from source.until((TOOL_CALLS,), source.content, keeps_space=not index)):
        space = yield from source.space()
        if (yield from source.match("[")):
            index = yield from _read_list(source, index, space)
        else:
            index = yield from _read_named(source, index, space)


def _read_list(source: Source, index: int, space: str) -> Reading[int]:
    """The calls of a list; the index of the next one."""
    read = f"{TOOL_CALLS}{space}["
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
    found = yield from source.until((MISTRAL_CALL_ID, MISTRAL_ARGUMENTS, "{", "\n"), read.append)
    name = "".join(read)
    if found == MISTRAL_CALL_ID:
        found = yield from source.until((MISTRAL_ARGUMENTS, "{", "\n"), read.append)
    if found != MISTRAL_ARGUMENTS:
        source.back(found)
    if found in (END, "\n") or not name:
        source.content("".join([TOOL_CALLS, space, *read]))
        return index
    source.parts.append(CallBegin(index, name))
    yield from read_value(source, lambda text: source.parts.append(CallArguments(index, text)))
    return index + 1


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The format in which a model writes calls of tools.

    read: reads them out of an answer, given the names of the tools. markers: what the text must
    keep though a tokenizer may call it special. Forced calls are written as `head`, then each
    call, parted by `between`, then `tail`; a call is `opening`, with the name in JSON for {name},
    then the arguments, then `closing`. between: None if a model makes one call at a time.
    id_length: of a call's id, where templates ask for it.
    """

    read: Callable[[Source, Container[str]], Reading[None]]
    markers: tuple[str, ...]
    opening: str
    closing: str
    head: str = ""
    tail: str = ""
    between: str | None = None
    id_length: int | None = None

    def new_id(self, kind: str) -> str:
        """Return a new id of a call; `kind` is the API's prefix, where the format leaves room."""
        if self.id_length is None:
            return f"{kind}{secrets.token_hex(12)}"
        return "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))


_LETTERS = string.ascii_letters + string.digits

HERMES = CallFormat(
    read=read_hermes,
    markers=(HERMES_OPEN, HERMES_CLOSE),
    opening=HERMES_OPEN + '\n{"name": {name}, "arguments": ',
    closing="}\n" + HERMES_CLOSE,
    between="\n",
)
LLAMA = CallFormat(
    read=read_llama,
    markers=(PYTHON_TAG,),
    opening='{"name": {name}, "parameters": ',
    closing="}",
)
MISTRAL = CallFormat(
    read=read_mistral,
    markers=(TOOL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID),
    opening='{"name": {name}, "arguments": ',
    closing="}",
    head=TOOL_CALLS + "[",
    tail="]",
    between=", ",
    id_length=9,
)

_SHOWN = (("<function=", None), (TOOL_CALLS, MISTRAL), (HERMES_OPEN, HERMES))


def choose_format(template: str) -> CallFormat | None:
    """Return the format of the calls in a chat template; None if it shows no known one.

    A template that takes tools without any mark of calls is taken for one of Llama's kind, whose
    calls are plain JSON.
    """
    for shown, found in _SHOWN:
        if shown in template:
            return found
    return LLAMA if "tools" in template else None


def shows_reasoning(template: str) -> bool:
    """Return True if a chat template knows reasoning."""
    return THINK_OPEN in template or THINK_CLOSE in template
