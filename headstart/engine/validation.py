"""Checks of what callers hand over, and how a wrong value is shown in an error."""

import reprlib
from typing import Any

from headstart.errors import RequestError

__all__ = ["check_name", "check_text", "describe", "shorten"]

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
    """A value for the text of an error: short and printable whatever the value is."""
    try:
        return shorten(_REPR.repr(value))
    except Exception:  # a class may raise anything when it is asked for its `repr`
        return f"a {type(value).__name__}"


def shorten(text: str) -> str:
    """The text of at most 300 characters, in which half characters are spelled as escapes."""
    short = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def check_text(what: str, text: str) -> int:
    """The length of a text in UTF-8, in bytes.

    Raises RequestError for a lone surrogate, which UTF-8 cannot spell and no tokenizer takes.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{what} has the lone surrogate U+{code:04X} at character {error.start}; allowed: "
            "text that UTF-8 can encode"
        ) from error


def check_name(what: str, name: object) -> None:
    """Refuse a name that is neither None nor a text of at least one character, in UTF-8."""
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{what} is {describe(name)}, a {type(name).__name__}; allowed: None or a text of at "
            "least one character"
        )
    check_text(what, name)
