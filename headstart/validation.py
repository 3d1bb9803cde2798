"""Checks of public options and requests, and descriptions of wrong values for errors.

A dataclass of options is checked by its fields: the annotation gives the type, and `option` gives
the default and the range.

>>> @dataclass
... class Options:
...     name: str | None = option(None, "name of the user")
...     count: int = option(1, "number of answers", Number(int, 1))
>>> check_fields(Options(count=0), ValueError)
Traceback (most recent call last):
ValueError: count is 0; allowed: a whole number of at least 1
>>> check_fields(Options(name=3), ValueError)
Traceback (most recent call last):
ValueError: name is 3; allowed: a string or None
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

NOT_AN_OPTION = "not an option of headstart; see docs/vllm.md"

_MAX_TEXT = 300
_MAX_INTEGER_BITS = 256  # for short errors; `repr` fails for more than 4,300 digits
_MAX_FLOAT = sys.float_info.max


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_INTEGER_BITS else f"an integer of {bits} bits"


_REPR = _Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 80


def describe(value: Any) -> str:
    """Describe a value for an error, short and on one line."""
    return shorten(" ".join(line.strip() for line in _REPR.repr(value).splitlines()))


def shorten(text: str) -> str:
    """Return at most 300 characters of a string, with lone surrogates as escapes."""
    shortened = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
    return shortened.encode("utf-8", "backslashreplace").decode()


def in_one_line(text: str) -> str:
    """Return the result of `shorten`, with line ends and other unprintable characters escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in shorten(text)
    )


def check_utf8(name: str, text: str, error: type[HeadstartError] = RequestError) -> int:
    """Return the length of a string in UTF-8, in bytes. Raises `error` for a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as cause:
        code = ord(text[cause.start])
        raise error(
            f"{name} has the lone surrogate U+{code:04X} at character {cause.start}; allowed: "
            "text that UTF-8 can encode"
        ) from cause


Name = str | None
"""The type of an optional name in signatures. mypyc raises TypeError for an argument of a wrong
type unless the type is an alias. With this alias, `check_name` raises its own error."""


def check_name(
    what: str,
    name: object,
    error: type[HeadstartError] = RequestError,
    *,
    required: bool = False,
) -> None:
    """Raise `error` unless a name is a string of at least one character.

    None is also allowed if the name is not required.
    """
    if name is None and not required:
        return
    if not isinstance(name, str) or not name:
        kind = "" if name is None else f", a {type(name).__name__}"
        allowed = "" if required else "None or "
        allowed = f"{allowed}a string of at least one character"
        raise error(f"{what} is {describe(name)}{kind}; allowed: {allowed}")
    check_utf8(what, name, error)


def check_flag(name: str, value: object) -> bool:
    """Return a value that is True or False. Raises RequestError for any other."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {describe(value)}; allowed: True or False")
    return value


def check_absent(values: Mapping[str, object], error: type[HeadstartError] = RequestError) -> None:
    """Raise `error` for an option of vLLM's that headstart lacks.

    None, False, and empty strings and collections are allowed.
    """
    for name, value in values.items():
        is_empty = isinstance(value, (str, list, tuple, dict, set)) and not value
        if not (value is None or value is False or is_empty):
            raise error(f"{name} is {describe(value)}; {NOT_AN_OPTION}")


class Allowed(Protocol):
    """A set of values, whose `str` describes it in errors."""

    def __contains__(self, value: object) -> bool: ...

    def __str__(self) -> str: ...


class Number(NamedTuple):
    """Finite numbers from `low` (excluded if `above_low`) to `high`. Integers fit in 64 bits."""

    kind: type[int] | type[float]
    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | self.kind):
            return False
        low, high = (-(2**63), 2**63 - 1) if self.kind is int else (-_MAX_FLOAT, _MAX_FLOAT)
        if not low <= value <= high or (self.above_low and value == self.low):
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        if self.above_low:
            up_to = "" if self.high == math.inf else f", up to {self.high}"
            return f"{kind} above {self.low}{up_to}"
        if self.high == math.inf:
            return f"{kind} of at least {self.low}"
        return f"{kind} from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The values in `values`, compared by value and type."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        return type(value) in map(type, self.values) and value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


class Either(NamedTuple):
    """The values of two sets."""

    words: OneOf
    numbers: Number

    def __contains__(self, value: object) -> bool:
        return value in self.words or value in self.numbers

    def __str__(self) -> str:
        return f"{self.words}, or {self.numbers}"


class _Instance(NamedTuple):
    """All values of a type."""

    kind: type

    def __contains__(self, value: object) -> bool:
        return isinstance(value, self.kind)

    def __str__(self) -> str:
        return {bool: "True or False", str: "a string"}.get(self.kind, f"a {self.kind.__name__}")


def option(default: Any = MISSING, help_text: str = "", allowed: Allowed | None = None) -> Any:
    """Return a dataclass field with its help text, and its range if the type is not enough."""
    return field(default=default, metadata={"help": help_text, "allowed": allowed})


def check_fields(options: Any, error: type[Exception], prefix: str = "") -> None:
    """Raise `error` if a field of a dataclass has a value outside its type or range.

    A field with several types besides None is checked only if it has `allowed`. prefix: text in
    front of the field's name in the error.
    """
    kind: Any = type(options)
    for name, (allowed, is_optional, default) in _allowed_values(kind).items():
        value = getattr(options, name)
        is_allowed = value is default or (is_optional and value is None) or value in allowed
        if not is_allowed:
            or_none = " or None" if is_optional else ""
            raise error(f"{prefix}{name} is {describe(value)}; allowed: {allowed}{or_none}")


@cache
def _allowed_values(kind: Any) -> Mapping[str, tuple[Allowed, bool, Any]]:
    """Return each field's allowed values, whether it may be None, and its default."""
    hints = get_type_hints(kind)
    values: dict[str, tuple[Allowed, bool, Any]] = {}
    for entry in fields(kind):
        hint = hints[entry.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        plain = [each for each in kinds if each is not NoneType]
        allowed: Allowed | None = entry.metadata.get("allowed")
        if allowed is None and len(plain) == 1 and isinstance(plain[0], type):
            assert plain[0] not in (int, float), f"{entry.name}: give its range"
            allowed = _Instance(plain[0])
        if allowed is not None:
            values[entry.name] = allowed, len(plain) < len(kinds), entry.default
    return values
