"""Why a form cannot be followed, in a sentence: what is wrong, and where in the form.

llguidance's messages have several lines, with a caret under the place, and lines of the grammar
that headstart made of a form.
"""

import re

from headstart.validation import shorten

__all__ = ["MAX_CHOICES", "explain"]

MAX_CHOICES = 4_100
"""Rules that may stand side by side in a grammar; llguidance has 4 for an optional property."""
_SHOWN = 40  # characters of a form
_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.*)")
_LARK = re.compile(r"^(?:at )?(\d+)\((\d+)\): ((?:.|\n)*?)\n((?: *\d+ \| .*\n)+) *\^\n?$")
_GBNF = re.compile(r"^Failed to convert .*: (.*) at line (\d+), .* \^ '((?:.|\n)*)'$", re.DOTALL)


def explain(reason: object, *, kind: str = "") -> str:
    """What a library's error says, in one line.

    kind: of the form; lines and columns are told only where they are those of the form's text.
    """
    text = str(reason).removesuffix("<non-verbose/>").strip()
    if "NoExtension" in text:
        return "nothing satisfies it"
    if found := re.search(r"row has (\d+) items; max is", text):
        return (
            f"{int(found[1]):,} rules apply at one place; allowed: {MAX_CHOICES:,}, which are "
            f"{(MAX_CHOICES - 100) // 4:,} optional properties of an object"
        )
    if found := _GBNF.search(text):
        return f"read as GBNF: {_lower(found[1])} at line {found[2]}{_before(found[3])}"
    if place := _LARK.search(text):
        says = _in_regex(place[3]) or _one_line(place[3])
        source = place[4].splitlines()[-1].partition(" | ")[2]
        if kind != "grammar":
            return says
        return f"{says}, at line {place[1]}, column {place[2]}: {_excerpt(source, int(place[2]))}"
    says = _in_regex(text) or _one_line(text)
    is_limit = re.search(r"\b(too (many|large|big)|limits?|fuel)\b", says)
    return f"it is too large, such as by repeats of repeats ({says})" if is_limit else says


def _in_regex(text: str) -> str:
    """The error of a regular expression with its place; empty for any other."""
    found = _REGEX.search(text)
    if found is None:
        return ""
    at = len(found[2]) + 1
    return f"{found[3]} at character {at:,} of the expression: {_excerpt(found[1], at)}"


def _excerpt(text: str, at: int) -> str:
    """A text from its character `at` on, the first being 1, with a few that come before."""
    start = max(at - 1 - _SHOWN // 4, 0)
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _before(rest: str) -> str:
    return f", before {_one_line(rest)[:_SHOWN]!r}" if rest else ", at its end"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _one_line(text: str) -> str:
    return shorten(" ".join(text.split()))
