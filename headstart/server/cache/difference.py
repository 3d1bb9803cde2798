"""Where two prompts part, in words: the text around it on both sides, and what it looks like."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

__all__ = ["ENDS", "OTHER", "PASSAGES", "Difference", "describe_difference", "find_remedy"]

ENDS = "one ends where the other goes on"
OTHER = "another text"
PASSAGES = "the same passages in another order"
_TOOLS = "the same tools in another order"
_ENTRIES = "the same entries in another order"
_SPACE = "white space"
_REMEDIES = {
    _TOOLS: "keeping one order of the tools",
    _ENTRIES: "keeping one order of the entries",
    PASSAGES: "sorting the passages, or moving them behind what stays the same,",
    _SPACE: "writing it with the same white space",
    OTHER: "if this is an edited turn, nothing needs to be done; otherwise moving it to the end",
}
_AROUND = 80  # characters shown on either side
_NEAR = 24  # characters in which a date or an id is looked for
_FAR = 2000  # characters in which the same lines or keys in another order are looked for
_MOST = 0.75  # of the entries; the last one may be cut off
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_TIMES = re.compile(
    rf"\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d?:\d\d|\b1\d{{9}}(\d{{3}})?\b"
    rf"|\b({_MONTHS})[a-z]*\.?\s+\d|\b\d{{1,2}}\.?\s+({_MONTHS})|\b({_DAYS})[a-z]*day\b",
    re.IGNORECASE,
)
_IDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{12,}\b|\b(?=\w*\d)(?=\w*[a-z])[\w-]{10,}\b",
    re.IGNORECASE,
)
_KEYS = re.compile(r'"([^"\\]{1,80})"\s*:')
_TOOL_WORDS = re.compile(r'"(parameters|input_schema|function)"')
_NAMES = re.compile(r'"name"\s*:\s*"([^"\\]{1,80})"')  # of tools, whose keys are all the same


@dataclass(frozen=True, slots=True)
class Difference:
    """before: the text that both have in front of it; here, there: how each goes on."""

    before: str
    here: str
    there: str
    looks_like: str


def describe_difference(before: str, here: str, there: str) -> Difference:
    """Classify the difference between two texts after their common beginning.

    >>> describe_difference("It is 2026-11-", "21. Hello", "22. Hello").looks_like
    'a date or time'
    """
    kind = _kind(before[-_AROUND:], here, there)
    return Difference(before[-_AROUND:], here[:_AROUND], there[:_AROUND], kind)


def find_remedy(looks_like: str) -> str:
    """Return what to do about a difference, as the subject of "would have saved".

    >>> find_remedy("a date or time")
    'moving it to the end'
    """
    return _REMEDIES.get(looks_like, "moving it to the end")


def _kind(before: str, here: str, there: str) -> str:
    if not here or not there:
        return ENDS
    mine, theirs = _around(before, here), _around(before, there)
    if _TIMES.search(mine) and _TIMES.search(theirs):
        return "a date or time"
    if _IDS.search(mine) and _IDS.search(theirs):
        return "a random id"
    if "".join(here[:_AROUND].split())[:40] == "".join(there[:_AROUND].split())[:40]:
        return _SPACE
    if order := _find_order(before, here, there):
        return order
    if _word(before, here).isdigit() and _word(before, there).isdigit():
        return "a number"
    return OTHER


def _around(before: str, after: str) -> str:
    """The words about the difference: what is cut off in front of it belongs to it."""
    same_line = before.rsplit("\n", 1)[-1][-_NEAR:]
    return same_line + after[:_NEAR].split("\n", 1)[0]


def _word(before: str, after: str) -> str:
    """The word that the first character of `after` is part of."""
    head = "".join(takewhile(str.isalnum, reversed(before)))[::-1]
    return head + "".join(takewhile(str.isalnum, after))


def _find_order(before: str, here: str, there: str) -> str | None:
    """Return the kind of things that are the same in another order; None if they differ."""
    line = before.rsplit("\n", 1)[-1]
    mine, theirs = line + here[:_FAR], line + there[:_FAR]
    if _is_moved(_NAMES.findall(mine), _NAMES.findall(theirs)):
        return _TOOLS if _TOOL_WORDS.search(mine) else _ENTRIES
    if _is_moved(_KEYS.findall(mine), _KEYS.findall(theirs)):
        return _ENTRIES
    if _is_moved(*(re.split(r"\n\s*\n", text) for text in (mine, theirs))):
        return PASSAGES
    return _ENTRIES if _is_moved(mine.splitlines(), theirs.splitlines()) else None


def _is_moved(mine: list[str], theirs: list[str]) -> bool:
    """Whether most entries are in both lists, and the first that differ are further on.

    >>> _is_moved(["id", "a", "b"], ["id", "b", "a"]), _is_moved(["a", "b"], ["c", "b"])
    (True, False)
    """
    pairs = zip(mine, theirs, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    mine, theirs = mine[same:], theirs[same:]
    if not mine or not theirs or mine[0] not in theirs or theirs[0] not in mine:
        return False
    return (Counter(mine) & Counter(theirs)).total() >= _MOST * min(len(mine), len(theirs))
