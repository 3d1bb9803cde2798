"""An answer's text to its parts: content, reasoning and calls of tools, piece by piece.

A reader is a generator that waits for the next character, so it is written as if the whole text
were there, and the same characters give the same parts however they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

__all__ = [
    "AnswerParser",
    "Call",
    "CallArguments",
    "CallBegin",
    "Content",
    "END",
    "Part",
    "Reading",
    "Reasoning",
    "Source",
    "gather",
    "join",
]


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The next call of a tool; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are JSON if the model wrote it well."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


def join(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with neighbours of a kind joined.

    >>> join([Content("a"), Content("b"), CallBegin(0, "f")])
    [Content(text='ab'), CallBegin(index=0, name='f')]
    """
    joined: list[Part] = []
    for _, (first, *rest) in groupby(parts, key=lambda part: (type(part), _index(part))):
        if rest and not isinstance(first, CallBegin):
            texts = [part.text for part in rest if not isinstance(part, CallBegin)]
            first = replace(first, text="".join([first.text, *texts]))
        joined.append(first)
    return joined


def _index(part: Part) -> int | None:
    return part.index if isinstance(part, CallBegin | CallArguments) else None


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a tool."""

    name: str
    arguments: str


def gather(parts: Iterable[Part]) -> list[Content | Reasoning | Call]:
    """Return whole texts and calls, in their order."""
    gathered: list[Content | Reasoning | Call] = []
    for part in join(parts):
        if isinstance(part, CallBegin):
            gathered.append(Call(part.name, ""))
        elif isinstance(part, CallArguments):
            begun = gathered[-1]
            assert isinstance(begun, Call)
            gathered[-1] = Call(begun.name, begun.arguments + part.text)
        else:
            gathered.append(part)
    return gathered


END = ""
"""The character that a reader gets when the text has ended."""

Result = TypeVar("Result")
Reading = Generator[None, str, Result]


class Source:
    """Characters that can be put back, and the parts that were read from them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._returned: list[str] = []  # what was put back, the next one last
        self._kept: list[str] | None = None
        self.left_out = ""
        """White space that `until` left out before the last marker."""

    def content(self, text: str) -> None:
        """Add a piece of content."""
        self.parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        self.parts.append(Reasoning(text))

    def next(self) -> Reading[str]:
        """Return the next character, or END, again and again."""
        character = self._returned.pop() if self._returned else (yield)
        if character == END:
            self._returned.append(END)
        elif self._kept is not None:
            self._kept.append(character)
        return character

    def back(self, text: str) -> None:
        """Put characters back that were read last; END needs no putting back."""
        self._returned += reversed(text)
        if self._kept is not None and text:
            del self._kept[-len(text) :]

    def keep(self) -> None:
        """Record what is read from here on, up to `kept`."""
        self._kept = []

    def kept(self) -> str:
        """Return the text read since `keep`, and stop recording."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def space(self) -> Reading[str]:
        """Read white space, up to the next other character."""
        space = ""
        while True:
            character = yield from self.next()
            if not character.isspace():
                self.back(character)
                return space
            space += character

    def solid(self) -> Reading[str]:
        """Read the next character that is no white space, or END."""
        yield from self.space()
        return (yield from self.next())

    def match(self, text: str) -> Reading[bool]:
        """Return True if `text` comes next, and read it only then."""
        read = ""
        for wanted in text:
            character = yield from self.next()
            read += character
            if character != wanted:
                self.back(read)
                return False
        return True

    def until(
        self, markers: Sequence[str], tell: Callable[[str], None], *, keeps_space: bool = True
    ) -> Reading[str]:
        """Pass on the text up to the first marker, and return that, or END at the end.

        No marker begins another. White space before a marker is left out, and before the end too
        unless it is kept. Text that may be the beginning of a marker waits until that is known.
        """
        beginnings = beginnings_of(tuple(markers))
        held = space = ""
        while True:
            character = yield from self.next()
            held += character
            while held and (character == END or held not in beginnings):
                first, held = held[0], held[1:]
                space += first
                if not first.isspace():
                    tell(space)
                    space = ""
            if held in markers:
                self.left_out = space
                return held
            if character == END:
                if space and keeps_space:
                    tell(space)
                return END


@lru_cache(64)
def beginnings_of(markers: tuple[str, ...]) -> frozenset[str]:
    """Return every text that begins a marker, itself included."""
    return frozenset(marker[: n + 1] for marker in markers for n in range(len(marker)))


class AnswerParser:
    """Reads one answer: `feed` it its text as it comes, and `finish` it.

    However the text is cut, the joined parts are the same. read: the format's reader. hidden:
    special tokens that stand in the text only because the format needs others; they are left out.
    max_calls: calls beyond this many are left out, None for no bound. only_calls: the answer can be
    nothing but calls, so other text is the beginning of one that was cut off; it is left out.
    """

    def __init__(
        self,
        read: Callable[[Source], Reading[None]],
        hidden: Sequence[str] = (),
        *,
        max_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._source = Source()
        self._hidden = _Hidden(hidden)
        self._reading = read(self._source)
        self._is_done = _starts(self._reading)

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain with this text."""
        for character in self._hidden.feed(text):
            self._send(character)
        return self._take()

    def finish(self) -> list[Part]:
        """Return the remaining parts."""
        for character in self._hidden.finish():
            self._send(character)
        self._send(END)
        return self._take()

    def _send(self, character: str) -> None:
        if not self._is_done:
            try:
                self._reading.send(character)
            except StopIteration:
                self._is_done = True

    def _take(self) -> list[Part]:
        parts = join(part for part in self._source.parts if self._is_told(part))
        self._source.parts.clear()
        return parts

    def _is_told(self, part: Part) -> bool:
        if isinstance(part, Content):
            return not self._only_calls
        if self._max_calls is None or isinstance(part, Reasoning):
            return True
        return part.index < self._max_calls


def _starts(reading: Reading[None]) -> bool:
    """Run up to the first character; return True if the reader needs none."""
    return next(reading, True) is True


class _Hidden:
    """Leaves texts out; the beginning of one waits until it is known whether it is one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = frozenset(texts)
        self._beginnings = beginnings_of(tuple(texts))
        self._held = ""

    def feed(self, text: str) -> str:
        if not self._texts:
            return text
        shown = []
        for character in text:
            self._held += character
            while self._held and self._held not in self._beginnings:
                shown.append(self._held[0])
                self._held = self._held[1:]
            if self._held in self._texts:
                self._held = ""
        return "".join(shown)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
