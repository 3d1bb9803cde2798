"""`multipleOf` in a JSON schema, or in one within a grammar: how large it may be.

llguidance makes a state for each remainder, when a mask is computed and with no limit: 100,003 take
a second, 982,451,653 would take hours, and nothing can stop it. So they are bounded before that.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from math import lcm
from typing import Any

__all__ = ["MAX_REMAINDERS", "check_multiples", "objects_in", "schemas_in"]

MAX_REMAINDERS = 2**16
_MAX_EXPONENT = 12  # of ten
_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar; a schema follows
_READER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)


def check_multiples(schemas: Sequence[Any], *, together: bool = False) -> None:
    """Raise ValueError for schemas whose numbers have too many remainders.

    together: a number may have to be a multiple of all.
    """
    together = together or any("allOf" in part or "$ref" in part for part in objects_in(schemas))
    most = 1
    for value in _multiples(schemas):
        count = _remainders(value)
        most = lcm(most, count) if together else count
        if most > MAX_REMAINDERS:
            raise ValueError(
                f'"multipleOf" is {value}{", with others beside it" if count != most else ""}; '
                f"allowed: up to {MAX_REMAINDERS:,}, the decimal point left out"
            )


def schemas_in(kind: str, text: str) -> list[Any]:
    """Return the JSON schemas of a form, with exact numbers; a grammar has them behind `%json`.

    What cannot be read is left out: llguidance refuses it.
    """
    with suppress(ValueError, RecursionError):
        if kind == "json":
            return [_READER.decode(text)]
        if kind == "structural_tag":
            return [tag[-2] for tag in _READER.decode(text)]
    schemas = []
    for found in _SCHEMA.finditer(text) if kind == "grammar" else ():
        with suppress(ValueError, RecursionError):
            schemas.append(_READER.raw_decode(text, found.end())[0])
    return schemas


def _multiples(schema: Any) -> Iterator[Decimal]:
    for part in objects_in(schema):
        found = part.get("multipleOf")
        if isinstance(found, Decimal) and found.is_finite() and found > 0:
            yield found


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
        pending += part.values() if isinstance(part, dict) else ()
        pending += part if isinstance(part, list) else ()


def _remainders(value: Decimal) -> int:
    """The number without its decimal point, as an integer; more than are allowed if it is huge."""
    _, digits, exponent = value.normalize().as_tuple()
    if not isinstance(exponent, int) or exponent > _MAX_EXPONENT or len(digits) > _MAX_EXPONENT:
        return MAX_REMAINDERS + 1
    return int("".join(map(str, digits)) + "0" * exponent)
