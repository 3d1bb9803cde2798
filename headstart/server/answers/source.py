"""The characters of an answer, for readers that do not care how the text is cut.

A reader is a generator that waits for the next character, so it is written as if the whole text
were there, and the same characters give the same parts however they arrive. It costs about a
microsecond a character.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from headstart.server.answers.parts import Content, Part, Reasoning

__all__ = ["END", "Reading", "Source", "beginnings_of"]

END = ""
"""What a reader gets in place of a character when the text has ended."""

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
        """Tell a piece of content."""
        self.parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Tell a piece of reasoning."""
        self.parts.append(Reasoning(text))

    def next(self) -> Reading[str]:
        """The next character, or END, which comes again and again."""
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
        """Remember what is read from here on, until it is asked for by `kept`."""
        self._kept = []

    def kept(self) -> str:
        """What was read since `keep`; nothing more is remembered."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def space(self) -> Reading[str]:
        """White space, up to the next other character, which stays."""
        space = ""
        while True:
            character = yield from self.next()
            if not character.isspace():
                self.back(character)
                return space
            space += character

    def solid(self) -> Reading[str]:
        """The next character that is no white space, or END."""
        yield from self.space()
        return (yield from self.next())

    def match(self, text: str) -> Reading[bool]:
        """Whether `text` comes next; it is read only then."""
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
        """Tell the text up to the first marker, which is returned, or up to the end: then END.

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
    """Every text that begins a marker, itself included."""
    return frozenset(marker[: n + 1] for marker in markers for n in range(len(marker)))
