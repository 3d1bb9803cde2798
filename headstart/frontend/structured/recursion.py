"""Schemas whose every value would contain itself, such as `{"$ref": "#"}` as a required property.

llguidance follows them, and an answer would open objects until `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

from headstart.frontend.structured.multiples import objects_in
from headstart.frontend.structured.places import resolve

__all__ = ["check_recursion"]

_MAX_PASSES = 64  # over the references of a schema


def check_recursion(schema: Any) -> None:
    """Raise ValueError for a schema that no finite value satisfies, since its references recur.

    The least fixed point: a reference can end if what it refers to can end without it. A schema
    that is not understood can end; llguidance may still refuse it. Numbers are decimal ones.
    """
    references = dict(_references(schema))
    ending: set[str] = set()
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


def _references(schema: Any) -> Iterator[tuple[str, Any]]:
    for part in objects_in(schema):
        yield from resolve(part.get("$ref"), schema)


def _can_end(schema: Any, root: Any, ending: set[str], place: str = "") -> bool:
    """Return True if a schema has a finite value, and then add its place to `ending`."""
    if not _ends(schema, root, ending):
        return False
    ending.add(place)
    return True


def _ends(schema: Any, root: Any, ending: Collection[str]) -> bool:
    if not isinstance(schema, dict):
        return True
    if any(place not in ending for place, _ in resolve(schema.get("$ref"), root)):
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


def _object_ends(schema: dict[str, Any], root: Any, ending: Collection[str]) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    named = (properties.get(name) for name in _list(schema, "required") if isinstance(name, str))
    return all(_ends(part, root, ending) for part in named)


def _array_ends(schema: dict[str, Any], root: Any, ending: Collection[str]) -> bool:
    least = schema.get("minItems")
    first = _list(schema, "prefixItems") or _list(schema, "items")
    least = int(min(least, Decimal(len(first) + 1))) if isinstance(least, Decimal) else 0
    rest = [schema.get("items")] if least > len(first) else []
    return all(_ends(part, root, ending) for part in [*first[:least], *rest])


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
