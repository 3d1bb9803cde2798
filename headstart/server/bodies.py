"""What the bodies of all APIs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headstart.errors import RequestError
from headstart.server.field_rows import JsonNames, Row
from headstart.validation import describe, shorten

__all__ = [
    "Body",
    "CacheFields",
    "ClientTool",
    "Flag",
    "Label",
    "Many",
    "Real",
    "Whole",
    "read_keeping",
    "read_retention",
    "read_salt",
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


class Body(BaseModel):
    """A body of JSON whose every field is known.

    A null is absent, unless the field takes it. rows: what becomes of names that are no fields.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    rows: ClassVar[Mapping[str, Row]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, given: Any) -> Any:
        """The fields; an error names one that is refused, and the nearest of one that is not known.

        What is in the error's `ctx` is for `headstart.server.errors`.
        """
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        if None in given.values():
            needed = _taking_null(cls)
            given = {name: one for name, one in given.items() if one is not None or name in needed}
        if not (others := given.keys() - fields):
            return given
        names = JsonNames("the request", cls.rows, RequestError, own=fields)
        for name in sorted(others):
            try:
                names.read({name: given[name]})
            except RequestError as error:
                known = names.knows(name)
                told = str(error) if known else names.hint(name)
                raise PydanticCustomError(
                    "refused_field" if known else "unknown_field",
                    "{told}",
                    {"told": shorten(told), "field": shorten(name)},
                ) from error
        return {name: value for name, value in given.items() if name in fields}


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


def read_salt(body: CacheFields) -> str | None:
    """The salt that a body asks for; an empty one is none."""
    return body.cache_salt or None


def read_keeping(body: CacheFields) -> dict[str, Any]:
    """The fields of `SamplingParams` by which a request reads the cache, and is kept in it."""
    return {
        "skip_reading_prefix_cache": body.no_read or None,
        "skip_storing_prefix_cache": body.no_store or None,
    }


def read_retention(body: CacheFields) -> float:
    """Seconds that the whole prompt is worth keeping; 0 if nothing is said of it."""
    return _DAY if body.prompt_cache_retention == "24h" else 0.0
