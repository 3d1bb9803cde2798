"""Where in a JSON schema its fault is: a JSON pointer (RFC 6901) such as `#/properties/age/type`.

llguidance says what is wrong with a schema, not where. Here the schemas within it are tried one by
one, each alone with the definitions that it refers to. The innermost that is refused for the same
reason has the fault, in the keyword without which it is not refused for it. Where each schema has
one other within it, as in a chain of references, the chain is halved: it holds the fault as far as
to the place of it.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

__all__ = ["Fault", "find_fault", "resolve"]

_BY_NAME = ("properties", "patternProperties")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties")
_INDEX = re.compile("0|[1-9][0-9]{0,9}")
_UNSATISFIABLE = "Unsatisfiable schema"
_MAX_BYTES = 2**20  # of schemas that are tried for one fault
_MAX_SECONDS = 0.5  # of the processor, that trying them takes


class Fault(NamedTuple):
    """What is wrong, in llguidance's words, and the place."""

    reason: str
    pointer: str


def find_fault(text: str, reason: str, refuse: Callable[[str], str], *, tries: int) -> Fault:
    """The fault of a schema that is refused, or what holds it where the search takes too long.

    That is the whole schema, `#`, where none within it is refused for the same reason.
    refuse: says why a schema is refused, "" if it is not; it is called `tries` times at most.
    """
    search = _Search(json.loads(text), reason, refuse, tries)
    if search.is_dialect_s():
        return Fault(reason, "#/$schema")
    fault, part = Fault(reason, "#"), _Part(search.root, "#")
    while True:
        line = search.line_from(part)
        part, fault = search.last_refused(line, fault)
        if part is not line[-1]:
            break
        inner, found = search.first_refused(_parts(*part, search.root), part.pointer)
        if inner is None:
            break
        part, fault = inner, Fault(found, inner.pointer)
    guilty = search.guilty_keys(part.schema)
    if search.is_over or len(guilty) != 1:
        return fault
    return fault._replace(pointer=_join(part.pointer, *guilty))


class _Part(NamedTuple):
    schema: Any
    pointer: str


class _Search:
    """Tries parts of a schema, as long as there are tries, bytes and time left for it."""

    def __init__(self, root: Any, reason: str, refuse: Callable[[str], str], tries: int) -> None:
        self.root = root
        self._kind, self._refuse = _kind(reason), refuse
        self._tries, self._bytes = tries, _MAX_BYTES
        self._end = time.thread_time() + _MAX_SECONDS
        self._outer: set[str] = set()

    def line_from(self, part: _Part) -> list[_Part]:
        """A part that is refused, what is its only part, the only part of that, and so on."""
        line, seen = [part], {*self._outer, part.pointer}
        while True:
            inner = {one.pointer: one for one in _parts(*line[-1], self.root)}
            left = [one for pointer, one in inner.items() if pointer not in seen]
            if len(left) != 1 or self.is_over:
                return line
            line += left
            seen.add(left[0].pointer)

    def last_refused(self, line: list[_Part], fault: Fault) -> tuple[_Part, Fault]:
        """The innermost part of a line that is refused for the same reason, halving the line.

        fault: that of the first part, which is refused.
        """
        last, end, outer = 0, len(line), {*self._outer}
        while end - last > 1:
            middle = (last + end) // 2
            self._outer = outer | {one.pointer for one in line[:middle]}
            if found := self._try(line[middle].schema, self.root):
                last, fault = middle, Fault(found, line[middle].pointer)
            else:
                end = middle
        self._outer = outer | {one.pointer for one in line[: last + 1]}
        return line[last], fault

    def first_refused(self, parts: Iterable[_Part], outer: str) -> tuple[_Part | None, str]:
        """The first part that is refused for the same reason, and llguidance's words for it.

        outer: the pointer to what they are parts of. What refers to it again is no fault.
        """
        self._outer.add(outer)
        for part in {one.pointer: one for one in parts}.values():
            if part.pointer not in self._outer and (found := self._try(part.schema, self.root)):
                return part, found
        return None, ""

    def is_dialect_s(self) -> bool:
        """Whether the fault is the name of the dialect, which every part would have too."""
        if not isinstance(self.root, Mapping) or "$schema" not in self.root:
            return False
        rest = {key: value for key, value in self.root.items() if key != "$schema"}
        return not self._try(rest, rest) and not self.is_over

    @property
    def is_over(self) -> bool:
        return min(self._tries, self._bytes) <= 0 or time.thread_time() > self._end

    def guilty_keys(self, schema: Any) -> list[str]:
        """The keywords without which a schema has not the fault."""
        guilty = []
        for key in schema if isinstance(schema, Mapping) else ():
            rest = {other: value for other, value in schema.items() if other != key}
            if not self._try(rest, rest if schema is self.root else self.root):
                guilty.append(key)
        return guilty

    def _try(self, schema: Any, root: Any) -> str:
        """Why a schema is refused, if for the same reason; else ""."""
        if self.is_over:
            return ""
        alone = _write_alone(schema, root, self._outer, self._bytes)
        if not alone:
            self._bytes = 0
            return ""
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

    `true` and `false` are left out: `false` where something must not be is no fault. In place of
    one that only refers to another stands that.
    """
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        found: list[tuple[str, Any]] = []
        if key in _BY_NAME and isinstance(value, Mapping):
            found = [(_join(pointer, key, name), part) for name, part in value.items()]
        elif key in _IN_LIST and isinstance(value, list):
            found = [(_join(pointer, key, str(at)), part) for at, part in enumerate(value)]
        elif key in _ALONE:
            found = [(_join(pointer, key), value)]
        elif key == "$ref":
            found = list(resolve(value, root))
        for at, part in found:
            is_reference = isinstance(part, Mapping) and [*part] == ["$ref"]
            places = resolve(part["$ref"], root) if is_reference else []
            if not isinstance(part, bool):
                yield from (_Part(inner, place) for place, inner in places or [(at, part)])


def _write_alone(schema: Any, root: Any, outer: Collection[str], most: int) -> str:
    """A schema as text, with the definitions that it refers to; references to `outer` allow all.

    Empty where that would take more than `most` characters.
    """
    names: dict[str, str] = {}  # by place: one may be spelled in many ways
    definitions: dict[str, Any] = {}
    parts: list[Any] = []
    size = 0

    def rename(found: dict[str, Any]) -> dict[str, Any]:
        value: Any = found.get("$ref")
        for pointer, part in resolve(value, root):
            if pointer in outer:
                return {key: one for key, one in found.items() if key != "$ref"}
            if pointer not in names:
                names[pointer] = f"headstart-{len(names)}"
                parts.append(part)
            return {**found, "$ref": f"#/$defs/{names[pointer]}"}
        return found

    def copy(value: Any) -> Any:
        nonlocal size
        text = json.dumps(value)
        size += len(text)
        return json.loads(text, object_hook=rename) if size <= most else None

    alone = copy(schema)
    if not isinstance(alone, Mapping):
        alone = {"allOf": [alone]}
    while len(definitions) < len(parts) and size <= most:
        at = len(definitions)
        definitions[f"headstart-{at}"] = copy(parts[at])
    if size > most:
        return ""
    if isinstance(root, Mapping) and "$schema" in root:
        alone = {"$schema": root["$schema"], **alone}
    return json.dumps({**alone, "$defs": definitions} if definitions else alone)


def resolve(pointer: Any, root: Any) -> list[tuple[str, Any]]:
    """The place that a reference points to, and what stands there, alone in a list; or nothing."""
    if not isinstance(pointer, str) or not f"{pointer}/".startswith("#/"):
        return []
    place, found = "#", root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and not _INDEX.fullmatch(name):
            return []
        try:
            at = int(name) if isinstance(found, list) else name
            found = found[at]
        except (LookupError, TypeError, ValueError):
            return []
        place = _join(place, str(at))
    return [(place, found)]


def _join(pointer: str, *names: str) -> str:
    """The pointer to a place further in.

    >>> _join("#/properties", "a/b", "pattern")
    '#/properties/a~1b/pattern'
    """
    return "/".join([pointer, *(name.replace("~", "~0").replace("/", "~1") for name in names)])
