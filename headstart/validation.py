"""Checks of what callers hand over, and how a wrong value is shown in an error.

A dataclass of options is checked from its fields alone: what a value may be is its annotation,
and a range stands beside the default.

>>> @dataclass
... class Options:
...     name: str | None = option(None, "who asks")
...     count: int = option(1, "how many", Number(int, 1))
>>> check_fields(Options(count=0), ValueError)
Traceback (most recent call last):
ValueError: count is 0; allowed: a whole number of at least 1
>>> check_fields(Options(name=3), ValueError)
Traceback (most recent call last):
ValueError: name is 3; allowed: a text or None
"""

import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

from headstart.errors import HeadstartError, RequestError

__all__ = [
    "Name",
    "Number",
    "OneOf",
    "NOT_AN_OPTION",
    "check_absent",
    "check_fields",
    "check_flag",
    "check_name",
    "check_utf8",
    "describe",
    "in_one_line",
    "option",
    "shorten",
]

_MAX_TEXT = 300
_MAX_INTEGER_BITS = 256


class _Repr(reprlib.Repr):
    """`repr` with bounds on length and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to spell integers of more than 4,300 digits."""
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_INTEGER_BITS else f"an integer of {bits} bits"


_REPR = _Repr()


def describe(value: Any) -> str:
    """A value for the text of an error: short and printable whatever the value is, on one line."""
    try:
        return shorten(" ".join(line.strip() for line in _REPR.repr(value).splitlines()))
    except Exception:  # a class may raise anything when it is asked for its `repr`
        return f"a {type(value).__name__}"


def shorten(text: str) -> str:
    """The text of at most 300 characters, in which half characters are spelled as escapes."""
    short = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def in_one_line(text: str) -> str:
    """The same with escapes for line ends, and for all else that cannot be printed."""
    short = shorten(text)
    if short.isprintable():
        return short
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in short
    )


def check_utf8(what: str, text: str, refuse: type[HeadstartError] = RequestError) -> int:
    """The length of a text in UTF-8, in bytes.

    Raises `refuse` for a lone surrogate, which UTF-8 cannot spell and no tokenizer takes.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise refuse(
            f"{what} has the lone surrogate U+{code:04X} at character {error.start}; allowed: "
            "text that UTF-8 can encode"
        ) from error


Name = str | None
"""What `check_name` takes. The compiler of `headstart.cache` does not see what it stands for, so
that there, too, a wrong name is refused by `check_name` and not by a TypeError."""


def check_name(
    what: str,
    name: object,
    refuse: type[HeadstartError] = RequestError,
    *,
    required: bool = False,
) -> None:
    """Raise `refuse` if a name is no text of at least one character, in UTF-8, nor None.

    With `required`, None is refused, too.
    """
    if name is None and not required:
        return
    if not isinstance(name, str) or not name:
        kind = "" if name is None else f", a {type(name).__name__}"
        allowed = "" if required else "None or "
        raise refuse(
            f"{what} is {describe(name)}{kind}; allowed: {allowed}a text of at least one character"
        )
    check_utf8(what, name, refuse)


def check_flag(what: str, value: object) -> bool:
    """A value that is True or False. Raises RequestError for any other."""
    if not isinstance(value, bool):
        raise RequestError(f"{what} is {describe(value)}; allowed: True or False")
    return value


NOT_AN_OPTION = "not an option of headstart; docs/vllm.md lists them"


def check_absent(given: Mapping[str, object], error: type[HeadstartError] = RequestError) -> None:
    """Raise `error` for an option of vLLM's that headstart lacks.

    None, False and empty texts and collections ask for nothing and are allowed.
    """
    for name, value in given.items():
        is_empty = isinstance(value, (str, list, tuple, dict, set)) and not value
        if not (value is None or value is False or is_empty):
            raise error(f"{name} is {describe(value)}; {NOT_AN_OPTION}")


class Allowed(Protocol):
    """What a value may be, and how an error says it."""

    def __contains__(self, value: object) -> bool: ...

    def __str__(self) -> str: ...


_MAX_FLOAT = sys.float_info.max
_MAX_INT = 2**63 - 1


class Number(NamedTuple):
    """A number of a kind, finite, from `low` (or just above it) to `high`. True is none.

    Whole numbers have 64 bits at the most.
    """

    kind: type[int] | type[float]
    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: object) -> bool:
        kinds = (int,) if self.kind is int else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or value == math.inf:
            return False
        if self.kind is float and not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            return False  # an integer that no float can hold
        if self.kind is int and not -_MAX_INT - 1 <= value <= _MAX_INT:
            return False  # torch and C++ take none of more bits
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        if self.above_low:
            limits = f"above {self.low}"
            return f"{kind} {limits}" + ("" if self.high == math.inf else f", up to {self.high}")
        if self.high == math.inf:
            return f"{kind} of at least {self.low}"
        return f"{kind} from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        return type(value) in map(type, self.values) and value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


class _Instance(NamedTuple):
    """Anything of a type."""

    kind: type

    def __contains__(self, value: object) -> bool:
        return isinstance(value, self.kind)

    def __str__(self) -> str:
        return {bool: "True or False", str: "a text"}.get(self.kind, f"a {self.kind.__name__}")


class _OrNone(NamedTuple):
    allowed: Allowed

    def __contains__(self, value: object) -> bool:
        return value is None or value in self.allowed

    def __str__(self) -> str:
        return f"{self.allowed} or None"


def option(default: Any = MISSING, help_text: str = "", allowed: Allowed | None = None) -> Any:
    """A dataclass field with its help, and the range of its values if the type does not say it."""
    return field(default=default, metadata={"help": help_text, "allowed": allowed})


def check_fields(options: Any, error: type[Exception]) -> None:
    """Raise `error` if a field of a dataclass has a value that its type or range rules out.

    A field that may be of several types, besides None, is left to its own check.
    """
    kind: Any = type(options)
    for name, (allowed, default) in _allowed_values(kind).items():
        value = getattr(options, name)
        if value is not default and value not in allowed:
            raise error(f"{name} is {describe(value)}; allowed: {allowed}")


@cache
def _allowed_values(kind: Any) -> Mapping[str, tuple[Allowed, Any]]:
    """What each field may be, and its default, which is checked here."""
    hints = get_type_hints(kind)
    found: dict[str, tuple[Allowed, Any]] = {}
    for one in fields(kind):
        hint = hints[one.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        plain = [each for each in kinds if each is not NoneType]
        allowed: Allowed | None = one.metadata.get("allowed")
        if allowed is None and len(plain) == 1 and isinstance(plain[0], type):
            assert plain[0] not in (int, float), f"{one.name}: give its range"
            allowed = _Instance(plain[0])
        if allowed is not None:
            allowed = allowed if len(plain) == len(kinds) else _OrNone(allowed)
            assert one.default is MISSING or one.default in allowed, one.name
            found[one.name] = allowed, one.default
    return found
