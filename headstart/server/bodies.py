"""What the bodies of all APIs have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Body", "CacheFields", "Real", "Whole", "read_salt"]

# What a number may be is for `SamplingParams` to say; here it is kept from being none at all.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]


class Body(BaseModel):
    """A body of JSON whose every field is known."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheFields(Body):
    """What a request says of the cache.

    cache_salt: only requests of the same salt share K/V. prompt_cache_key: the same, in OpenAI's
    words a hint. no_read: compute the whole prompt.
    """

    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: bool = False


def read_salt(body: CacheFields) -> str | None:
    """The salt that a body asks for; both of its fields together, each with its length."""
    given = [("salt", body.cache_salt), ("key", body.prompt_cache_key)]
    parts = [f"{name}:{len(value)}:{value}" for name, value in given if value]
    return "/".join(parts) or None
