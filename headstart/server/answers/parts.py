"""The parts of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "Call",
    "CallArguments",
    "CallBegin",
    "Content",
    "Part",
    "Reasoning",
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
    """The same with neighbours of a kind put together.

    >>> join([Content("a"), Content("b"), CallBegin(0, "f")])
    [Content(text='ab'), CallBegin(index=0, name='f')]
    """
    joined: list[Part] = []
    pieces: list[str] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, CallBegin) or last is None or not _continues(last, part):
            _close(joined, pieces)
            joined.append(part)
            pieces = [] if isinstance(part, CallBegin) else [part.text]
        else:
            pieces.append(part.text)
    _close(joined, pieces)
    return joined


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part)


def _close(joined: list[Part], pieces: list[str]) -> None:
    """Give the last part the text of all its pieces."""
    if len(pieces) > 1:
        last = joined[-1]
        assert not isinstance(last, CallBegin)
        joined[-1] = replace(last, text="".join(pieces))


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a tool."""

    name: str
    arguments: str


def gather(parts: Iterable[Part]) -> list[Content | Reasoning | Call]:
    """Whole texts and calls, in their order."""
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
