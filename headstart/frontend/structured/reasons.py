"""Why a form cannot be followed, in a sentence: what is wrong, and where in the form.

llguidance's messages have several lines, with a caret under the place, and lines of the grammar
that headstart made of a form.
"""

import json
import re

from headstart.validation import shorten

__all__ = ["MAX_ITEMS_IN_ROW", "explain", "is_too_deep"]

MAX_ITEMS_IN_ROW = 4_100
"""Rules that may apply at one place of an answer; an optional property of an object has 4."""
_MAX_DEPTH = 124  # 128 of llguidance's, less those that it puts around a schema
_SHOWN = 40  # characters of a form
_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^[\^ ]*\nerror: (.*)")
_LARK = re.compile(r"^(?:at )?(\d+)\((\d+)\): ((?:.|\n)*?)\n((?: *\d+ \| .*\n)+) *\^\n?$")
_GBNF = re.compile(r"^Failed to convert .*: (.*) at line (\d+), .* \^ '((?:.|\n)*)'$", re.DOTALL)
_ROW = re.compile(r"row has (\d+) items; max is")
_TOO_LARGE = re.compile(
    r"lexer error: too many (?:expressions|states)|fuel \d*\s?exhausted|fuel \d+ exceeded"
    r"|Too many items \(limit|too big \(limit for this grammar|^schema too large$"
    r"|lexer precomputation failed"
)
"""What llguidance says when a form would take more work or memory than its limits allow."""
_TOO_DEEP = re.compile(r"recursion limit exceeded|intersection stack level exceeded")
_UNKNOWN = re.compile(r"^Unimplemented keys: (\[.*\])$")
_REWORDED = {
    r"^Unsatisfiable schema: (.*)": r"nothing satisfies it: \1",
    r"^oneOf constraints are not supported\. .*": '"oneOf" is not supported where an answer may '
    'match more than one of them; "anyOf" is',
    r"^Resource '(.*?)' is not present in a registry.*": r"'\1' is not in the schema, and nothing "
    "is fetched",
    r"^Pointer '(.*?)' does not exist.*": r'"$ref" refers to #\1, which the schema does not have',
}


def explain(reason: object, *, kind: str = "") -> str:
    """What a library's error says, in one line.

    kind: of the form; lines and columns are told only where they are those of the form's text.
    """
    text = str(reason).removesuffix("<non-verbose/>").partition("\n  while processing")[0].strip()
    if text.startswith("panic"):
        return "llguidance, which reads it, breaks"
    if "NoExtension" in text:
        return "nothing satisfies it"
    if found := _ROW.search(text):
        return (
            f"{int(found[1]):,} rules apply at one place; allowed: {MAX_ITEMS_IN_ROW:,}, which are "
            f"{(MAX_ITEMS_IN_ROW - 100) // 4:,} optional properties of an object"
        )
    if found := _GBNF.search(text):
        return f"read as GBNF: {_lower(found[1])} at line {found[2]}{_before(found[3])}"
    if place := _LARK.search(text):
        says = _in_regex(place[3]) or _reword(place[3])
        source = place[4].splitlines()[-1].partition(" | ")[2]
        if kind != "grammar":
            return says
        return f"{says}, at line {place[1]}, column {place[2]}: {_excerpt(source, int(place[2]))}"
    return _in_regex(text) or _reword(text)


def is_too_deep(reason: str) -> bool:
    """Whether a schema is refused for its depth, which has no one place."""
    return _TOO_DEEP.search(reason) is not None


def _reword(text: str) -> str:
    """A message of llguidance's alone, in the words of who wrote the form."""
    says = _one_line(text)
    if _TOO_LARGE.search(says):
        return f"it is too large, such as by repeats of repeats ({says})"
    if is_too_deep(says):
        return f"it is too deep; allowed: {_MAX_DEPTH} objects and lists within one another"
    if unknown := _UNKNOWN.search(says):
        names = [json.dumps(name) for name in json.loads(unknown[1])]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not supported"
    for pattern, words in _REWORDED.items():
        if re.search(pattern, says):
            return re.sub(pattern, words, says)
    return says


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
