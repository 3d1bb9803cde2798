"""Limits for JSON schemas that llguidance would follow without an end.

It makes a state for each remainder of a `multipleOf` when a mask is computed, and cannot be
stopped: 100,003 take a second, 982,451,653 would take hours. A schema whose every value contains
itself, such as `{"$ref": "#"}` as a required property, would have an answer open objects until
`max_tokens`.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import unquote

__all__ = ["MAX_REMAINDERS", "check_multiples", "check_recursion", "schemas_in"]

MAX_REMAINDERS = 2**16
_MAX_EXPONENT = 12  # of ten
_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar; a schema follows
_READER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
_MAX_PASSES = 64  # over the references of a schema
_INDEX = re.compile("0|[1-9][0-9]{0,9}")
_Place = tuple[str, ...]  # the steps of a JSON pointer


def check_multiples(schemas: Sequence[Any], *, together: bool = False) -> None:
    """Raise ValueError for schemas whose numbers have too many remainders.

    together: a number may have to be a multiple of all.
    """
    together = together or any("allOf" in part or "$ref" in part for part in _objects_in(schemas))
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
    for part in _objects_in(schema):
        found = part.get("multipleOf")
        if isinstance(found, Decimal) and found.is_finite() and found > 0:
            yield found


def _objects_in(schema: Any) -> Iterator[dict[str, Any]]:
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


def check_recursion(schema: Any) -> None:
    """Raise ValueError for a schema that no finite value satisfies, since its references recur.

    The least fixed point: a reference can end if what it refers to can end without it. A schema
    that is not understood can end; llguidance may still refuse it. Numbers are decimal ones.
    """
    references = dict(_references(schema))
    ending: set[_Place] = set()
    order = list(references)[::-1]  # definitions mostly refer to later ones
    with suppress(RecursionError):  # too deep, which llguidance refuses
        for _ in range(_MAX_PASSES):
            found = [one for one in order if _can_end(references[one], schema, ending, one)]
            if not found:
                break
            order = [one for one in order if one not in ending]
        else:
            return
        if not _can_end(schema, schema, ending):
            raise ValueError('"$ref" recurs and can never end')


def _references(schema: Any) -> Iterator[tuple[_Place, Any]]:
    for part in _objects_in(schema):
        yield from _resolve(part.get("$ref"), schema)


def _resolve(pointer: Any, root: Any) -> list[tuple[_Place, Any]]:
    """Return the place that a reference points to and the schema there, alone in a list.

    The list is empty for a reference that points nowhere in `root`.
    """
    if not isinstance(pointer, str) or not f"{pointer}/".startswith("#/"):
        return []
    place, part = [], root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and not _INDEX.fullmatch(name):
            return []
        try:
            part = part[int(name) if isinstance(part, list) else name]
        except (LookupError, TypeError):
            return []
        place.append(name)
    return [(tuple(place), part)]


def _can_end(schema: Any, root: Any, ending: set[_Place], place: _Place = ()) -> bool:
    """Return True if a schema has a finite value, and then add its place to `ending`."""
    if not _ends(schema, root, ending):
        return False
    ending.add(place)
    return True


def _ends(schema: Any, root: Any, ending: Collection[_Place]) -> bool:
    if not isinstance(schema, dict):
        return True
    if any(place not in ending for place, _ in _resolve(schema.get("$ref"), root)):
        return False
    if not all(_ends(part, root, ending) for part in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _list(schema, name)
        if parts and not any(_ends(part, root, ending) for part in parts):
            return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return any(
        _object_ends(schema, root, ending)
        if kind == "object"
        else _array_ends(schema, root, ending)
        if kind == "array"
        else True
        for kind in types
    )


def _object_ends(schema: dict[str, Any], root: Any, ending: Collection[_Place]) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    named = (properties.get(name) for name in _list(schema, "required") if isinstance(name, str))
    return all(_ends(part, root, ending) for part in named)


def _array_ends(schema: dict[str, Any], root: Any, ending: Collection[_Place]) -> bool:
    least = schema.get("minItems")
    first = _list(schema, "prefixItems") or _list(schema, "items")
    least = int(min(least, Decimal(len(first) + 1))) if isinstance(least, Decimal) else 0
    rest = [schema.get("items")] if least > len(first) else []
    return all(_ends(part, root, ending) for part in [*first[:least], *rest])


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
