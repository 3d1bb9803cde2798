"""Where in a JSON schema its fault is: a JSON pointer (RFC 6901) such as `#/properties/age/type`.

llguidance says what is wrong with a schema, not where. Here the schemas within it are tried one by
one, each alone with the definitions that it refers to. The innermost that is refused for the same
reason has the fault, in the keyword without which it is not refused for it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

__all__ = ["Fault", "find_fault"]

_BY_NAME = ("properties", "patternProperties")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties")
_UNSATISFIABLE = "Unsatisfiable schema"
_MAX_BYTES = 2**20  # of schemas that are tried for one fault: half a second


class Fault(NamedTuple):
    """What is wrong, in llguidance's words, and the place."""

    reason: str
    pointer: str


def find_fault(text: str, reason: str, refuse: Callable[[str], str], *, tries: int) -> Fault:
    """The fault of a schema that is refused; the whole schema, `#`, where none within it is found.

    refuse: says why a schema is refused, "" if it is not; it is called `tries` times at most.
    """
    search = _Search(json.loads(text), reason, refuse, tries)
    part: _Part | None = _Part("#", search.root)
    fault = Fault(reason, "#")
    while part is not None:
        schema, pointer = part.schema, part.pointer
        part, found = search.first_refused(_parts(schema, pointer, search.root), pointer)
        if part is not None:
            fault = Fault(found, part.pointer)
    guilty = search.guilty_keys(schema)
    return fault._replace(pointer=_join(pointer, *guilty)) if len(guilty) == 1 else fault


class _Part(NamedTuple):
    pointer: str
    schema: Any


class _Search:
    """Tries parts of a schema, as long as there are tries and bytes left for it."""

    def __init__(self, root: Any, reason: str, refuse: Callable[[str], str], tries: int) -> None:
        self.root = root
        self._kind, self._refuse = _kind(reason), refuse
        self._tries, self._bytes = tries, _MAX_BYTES
        self._outer: set[str] = set()

    def first_refused(self, parts: Iterable[_Part], outer: str) -> tuple[_Part | None, str]:
        """The first part that is refused for the same reason, and llguidance's words for it.

        outer: the pointer to what they are parts of. What refers to it again is no fault.
        """
        self._outer.add(outer)
        for part in parts:
            if part.pointer not in self._outer and (found := self._try(part.schema, self.root)):
                return part, found
        return None, ""

    def guilty_keys(self, schema: Any) -> list[str]:
        """The keywords without which a schema has not the fault."""
        guilty = []
        for key in schema if isinstance(schema, Mapping) else ():
            rest = {other: value for other, value in schema.items() if other != key}
            if not self._try(rest, rest if schema is self.root else self.root):
                guilty.append(key)
        return guilty if min(self._tries, self._bytes) > 0 else []

    def _try(self, schema: Any, root: Any) -> str:
        """Why a schema is refused, if for the same reason; else ""."""
        if min(self._tries, self._bytes) <= 0:
            return ""
        alone = _write_alone(schema, root, self._outer)
        self._tries, self._bytes = self._tries - 1, self._bytes - len(alone)
        found = self._refuse(alone)
        return found if _kind(found) == self._kind else ""


def _kind(reason: str) -> str:
    """A reason without what differs between a schema and one that has it: numbers, and the way."""
    if reason.startswith(_UNSATISFIABLE):  # the outer one says which of its parts has no value
        return _UNSATISFIABLE
    return re.sub(r"\d+", "", reason.partition("\n  while processing")[0])


def _parts(schema: Any, pointer: str, root: Any) -> Iterator[_Part]:
    """The schemas within a schema that llguidance reads, and the one that it refers to.

    `true` and `false` are left out: `false` where something must not be is no fault.
    """
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        found: list[tuple[str, Any]] = []
        if key in _BY_NAME and isinstance(value, Mapping):
            found = [(_join(pointer, key, name), part) for name, part in value.items()]
        elif key in _IN_LIST and isinstance(value, list):
            found = [(_join(pointer, key, str(at)), part) for at, part in enumerate(value)]
        elif key in _ALONE:
            found = [(_join(pointer, key), value)]
        elif _is_local(key, value):
            found = [(value, part) for part in _resolve(value, root)]
        yield from (_Part(at, part) for at, part in found if not isinstance(part, bool))


def _write_alone(schema: Any, root: Any, outer: Collection[str]) -> str:
    """A schema as text, with the definitions that it refers to; references to `outer` allow all."""
    names: dict[str, str] = {}

    def rename(found: dict[str, Any]) -> dict[str, Any]:
        value: Any = found.get("$ref")
        if not _is_local("$ref", value) or not _resolve(value, root):
            return found
        if value in outer:
            return {key: one for key, one in found.items() if key != "$ref"}
        return {**found, "$ref": f"#/$defs/{names.setdefault(value, f'headstart-{len(names)}')}"}

    def copy(value: Any) -> Any:
        return json.loads(json.dumps(value), object_hook=rename)

    alone = copy(schema)
    if not isinstance(alone, Mapping):
        alone = {"allOf": [alone]}
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        pointer, name = list(names.items())[len(definitions)]
        definitions[name] = copy(_resolve(pointer, root)[0])
    if isinstance(root, Mapping) and "$schema" in root:
        alone = {"$schema": root["$schema"], **alone}
    return json.dumps({**alone, "$defs": definitions} if definitions else alone)


def _is_local(key: str, value: Any) -> bool:
    return key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))


def _resolve(pointer: str, root: Any) -> list[Any]:
    """What a reference points to, alone in a list; an empty list where it points to nothing."""
    found = root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (LookupError, TypeError, ValueError):
            return []
    return [found]


def _join(pointer: str, *names: str) -> str:
    """The pointer to a place further in.

    >>> _join("#/properties", "a/b", "pattern")
    '#/properties/a~1b/pattern'
    """
    return "/".join([pointer, *(name.replace("~", "~0").replace("/", "~1") for name in names)])
