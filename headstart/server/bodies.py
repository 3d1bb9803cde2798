"""What the bodies of all APIs have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headstart.validation import describe, shorten

__all__ = [
    "Body",
    "CacheFields",
    "ClientTool",
    "Flag",
    "Label",
    "Many",
    "Real",
    "Refusal",
    "Whole",
    "hint",
    "refusals",
]

# `SamplingParams` checks ranges; here only the type is checked.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Label = Annotated[str, Field(max_length=4096)]
"""A name of the client's, which is kept, hashed or told again in the event loop."""
One = TypeVar("One")
Many = Annotated[list[One], Field(fail_fast=True)]
"""A list in a body. The first entry that is wrong is all that an error tells: to note each of
300,000 takes C seconds, in which no other thread runs."""
_DAY = 86_400.0
_FEW = 10  # names that an error lists
_LONGEST = 100  # of names that are compared with others: the time grows with both


class Refusal(NamedTuple):
    """The note on a name that is no field: what to do instead. `allowed` values ask for nothing."""

    note: str
    allowed: tuple[Any, ...] = ()


def refusals(notes: Mapping[str, str]) -> dict[str, Refusal]:
    """Return refusals by name; each note has its names, with an allowed value in JSON.

    >>> refusals({"give n": "best_of=1 draws"})["best_of"]
    Refusal(note='give n', allowed=(1,))
    """
    found = {}
    for note, names in notes.items():
        for name, _, value in (item.partition("=") for item in names.split()):
            found[name] = Refusal(note, (json.loads(value),) if value else ())
    return found


class Body(BaseModel):
    """A body of JSON whose every field is known. A null is absent, unless the field takes it.

    accepted: names that are no fields and have no effect. refused: names that are no fields and
    take only null and what asks for nothing.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    accepted: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, given: Any) -> Any:
        """Return the fields. An error names a refused field, or the nearest of an unknown one.

        The `ctx` of the error is for `headstart.server.errors`.
        """
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        if None in given.values():
            needed = _taking_null(cls)
            given = {name: one for name, one in given.items() if one is not None or name in needed}
        for name in sorted(given.keys() - fields - cls.accepted):
            refusal, value = cls.refused.get(name), given[name]
            if refusal is None:
                kind, text = "unknown_field", hint(name, fields | cls.accepted, cls.refused)
            elif _is_in(value, refusal.allowed):
                continue
            else:
                allowed = ", ".join(map(json.dumps, (None, *refusal.allowed)))
                text = f"{name} is {_show(value)}; allowed: {allowed}; {refusal.note}"
                kind = "refused_field"
            about = {"told": shorten(text), "field": shorten(name)}
            raise PydanticCustomError(kind, "{told}", about)
        return {name: value for name, value in given.items() if name in fields}


def hint(name: str, known: Iterable[str], refused: Mapping[str, Refusal] = {}) -> str:
    """Return the name that was probably meant, or all if they are few; empty otherwise."""
    known = sorted(known)
    if len(name) > _LONGEST:
        return ""
    for near in get_close_matches(name, [*known, *refused], 1, 0.8):
        if near in refused:
            return f", and refuses {near}: {refused[near].note}"
        return f"; the nearest is {near}"
    return f"; it has {', '.join(known)}" if 0 < len(known) <= _FEW else ""


def _show(value: object) -> str:
    """Show a value, but for what may be a prompt's text, which belongs into no log."""
    if isinstance(value, int | float):
        return json.dumps(value) if isinstance(value, bool) else describe(value)
    return "a text" if isinstance(value, str) else "a list or an object"


def _is_in(value: object, allowed: tuple[Any, ...]) -> bool:
    """Return True if a value is one of these, by its type too: False is not 0."""
    return any(
        value == one and (type(value) is type(one) or (type(value), type(one)) == (float, int))
        for one in allowed
    )


@cache
def _taking_null(kind: type[Body]) -> frozenset[str]:
    """Return the fields whose null counts: required ones, and those that may be null."""
    return frozenset(
        field.alias or name
        for name, field in kind.model_fields.items()
        if field.is_required() or NoneType in get_args(field.annotation)
    )


class ClientTool(Body):
    """A tool that the client runs. One of another type is refused by that, not by its fields.

    types: those that are taken.
    """

    types: ClassVar[tuple[str | None, ...]]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        kind = given.get("type", cls.types[-1]) if isinstance(given, dict) else cls.types[-1]
        if kind in cls.types:
            return given
        told = f"{describe(kind)} does not run here; allowed: {cls.types[-1]!r}, a tool of yours"
        raise PydanticCustomError("not_here", "{told}", {"told": told, "field": "type"})


class CacheFields(Body):
    """What a request says of the cache.

    cache_salt: only requests of the same salt share K/V. no_read: compute the whole prompt.
    no_store: leave nothing for later requests. prompt_cache_retention: how long the prompt is
    worth keeping. prompt_cache_key is a hint to a cluster, of which one engine has no need.
    """

    cache_salt: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: Flag = False
    no_store: Flag = False

    @property
    def salt(self) -> str | None:
        """Return the requested salt; an empty one is none."""
        return self.cache_salt or None

    @property
    def cache_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` for reading and filling the cache."""
        return {
            "skip_reading_prefix_cache": self.no_read or None,
            "skip_storing_prefix_cache": self.no_store or None,
        }

    @property
    def retention(self) -> float:
        """Return the seconds for which the whole prompt is worth keeping, or 0."""
        return _DAY if self.prompt_cache_retention == "24h" else 0.0
