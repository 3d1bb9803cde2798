"""An answer's text to its parts, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.server.answers.parts import Content, Part, Reasoning, join
from headstart.server.answers.source import END, Reading, Source, beginnings_of

__all__ = ["AnswerParser"]


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
        """The parts that are certain with this text."""
        for character in self._hidden.feed(text):
            self._send(character)
        return self._take()

    def finish(self) -> list[Part]:
        """The rest."""
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
    """Run to where the first character is waited for; whether none is."""
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
