"""JSON, and the parts of request bodies that all APIs have in common.

msgspec reads and writes JSON. A body that msgspec refuses is read by the standard library, which
also accepts lone surrogates and other encodings than UTF-8, and names the position of an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headstart.validation import describe, shorten


def decode(data: bytes) -> Any:
    """Return the decoded JSON value. Raises the errors of `json.loads`."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(data)


def encode(value: Any) -> bytes:
    """Return a value as JSON without white space."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):  # lone surrogates, subclasses of float
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


# `SamplingParams` checks ranges; here only the type is checked.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Label = Annotated[str, Field(max_length=4096)]
"""A name that the client chose. Its length is limited, because the event loop hashes the name or
copies it into the answer."""
Entry = TypeVar("Entry")
Many = Annotated[list[Entry], Field(fail_fast=True)]
"""A list in a body. Only its first wrong entry is reported: pydantic would block all threads for
seconds to report 300,000 errors."""
_DAY = 86_400.0
_FEW = 10  # an error lists at most this many names
_LONGEST = 100  # characters; longer names are not compared with the fields


def refuse(text: str, field: str | None = None, kind: str = "refused_field") -> PydanticCustomError:
    """Return a validator's error with exactly this text.

    field: the wrong field within the value, for the error's `param`.
    """
    context = {"text": shorten(text)} | ({"field": shorten(field)} if field is not None else {})
    return PydanticCustomError(kind, "{text}", context)


def at_most(name: str, most: int) -> BeforeValidator:
    """Return a validator that refuses too many entries before they are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise refuse(f"{name} has {len(value):,} entries; allowed: {most:,} at most")
        return value

    return BeforeValidator(check)


class RefusedField(NamedTuple):
    """Advice for a field that is not supported. Its `allowed` values are accepted and ignored."""

    note: str
    allowed: tuple[Any, ...] = ()


def refusals(notes: Mapping[str, str]) -> dict[str, RefusedField]:
    """Return refused fields by name. notes: for each note, names of fields, separated by spaces.

    `=` and a JSON value after a name mean that the field accepts this value.

    >>> refusals({"use n": "best_of=1 draws"})["best_of"]
    RefusedField(note='use n', allowed=(1,))
    """
    refused = {}
    for note, names in notes.items():
        for name, _, value in (item.partition("=") for item in names.split()):
            refused[name] = RefusedField(note, (json.loads(value),) if value else ())
    return refused


class Body(BaseModel):
    """A JSON body without unknown fields. Null means absent, unless the field's type allows null.

    accepted: further fields, which are ignored. refused: further fields, which accept only null and
    values without effect.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    accepted: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, RefusedField]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, value: Any) -> Any:
        """Return the fields. Raises an error that suggests a name for an unknown field."""
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        if None in value.values():
            nullable = _nullable_fields(cls)
            value = {name: v for name, v in value.items() if v is not None or name in nullable}
        for name in sorted(value.keys() - fields - cls.accepted):
            refusal = cls.refused.get(name)
            if refusal is None:
                text = suggest_name(name, fields | cls.accepted, cls.refused)
                raise refuse(text, name, "unknown_field")
            if not _is_in(value[name], refusal.allowed):
                allowed = ", ".join(map(json.dumps, (None, *refusal.allowed)))
                text = f"{name} is {_describe(value[name])}; allowed: {allowed}; {refusal.note}"
                raise refuse(text, name)
        return {name: v for name, v in value.items() if name in fields}


def suggest_name(name: str, names: Iterable[str], refused: Mapping[str, RefusedField] = {}) -> str:
    """Return the end of an error for an unknown name: the nearest name, or up to `_FEW` names."""
    names = sorted(names)
    if len(name) > _LONGEST:
        return ""
    for match in get_close_matches(name, [*names, *refused], 1, 0.8):
        if match in refused:
            return f"; {match} is not supported: {refused[match].note}"
        return f"; the nearest is {match}"
    return f"; allowed: {', '.join(names)}" if 0 < len(names) <= _FEW else ""


def _describe(value: object) -> str:
    """Describe a value without its texts: they may be prompts, which must not be logged."""
    if isinstance(value, int | float):
        return json.dumps(value) if isinstance(value, bool) else describe(value)
    return "a string" if isinstance(value, str) else "a list or an object"


def _is_in(value: object, allowed: tuple[Any, ...]) -> bool:
    """Return True if `allowed` has the value. False is not 0, and 1.0 is 1."""
    return any(
        value == each and (type(value) is type(each) or (type(value), type(each)) == (float, int))
        for each in allowed
    )


@cache
def _nullable_fields(kind: type[Body]) -> frozenset[str]:
    """Return the names of the fields that are required or allow null."""
    return frozenset(
        field.alias or name
        for name, field in kind.model_fields.items()
        if field.is_required() or NoneType in get_args(field.annotation)
    )


class ClientTool(Body):
    """A tool that the client runs. types: the accepted types."""

    types: ClassVar[tuple[str | None, ...]]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type", cls.types[-1]) if isinstance(value, dict) else cls.types[-1]
        if kind in cls.types:
            return value
        allowed = f"allowed: {cls.types[-1]!r} (your own tool)"
        raise refuse(f"{describe(kind)} does not run here; {allowed}", "type", "not_here")


class Caller(Body):
    """The caller of a tool, which is always the model."""

    type: Literal["direct"]


class CacheFields(Body):
    """The fields of a request that control the cache.

    cache_salt: only requests with the same salt share K/V. no_read: compute the whole prompt.
    no_store: cache nothing of this request. prompt_cache_retention: how long to retain the prompt.
    prompt_cache_key has no effect.
    """

    cache_salt: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: Flag = False
    no_store: Flag = False

    @property
    def salt(self) -> str | None:
        """Return the requested salt; None if it is empty."""
        return self.cache_salt or None

    @property
    def cache_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that control the cache."""
        return {
            "skip_reading_prefix_cache": self.no_read or None,
            "skip_storing_prefix_cache": self.no_store or None,
        }

    @property
    def retention(self) -> float:
        """Return the seconds for which the whole prompt is retained, or 0."""
        return _DAY if self.prompt_cache_retention == "24h" else 0.0
