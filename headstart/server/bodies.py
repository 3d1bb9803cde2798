"""What the bodies of all APIs have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Body", "CacheFields", "Real", "Whole", "read_salt"]

# `SamplingParams` checks ranges; here only the type is checked.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]


class Body(BaseModel):
    """A body of JSON whose every field is known."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheFields(Body):
    """What a request says of the cache.

    cache_salt: only requests of the same salt share K/V. no_read: compute the whole prompt.
    prompt_cache_key and prompt_cache_retention are hints to a cluster, of which one engine has no
    need.
    """

    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: bool = False


def read_salt(body: CacheFields) -> str | None:
    """The salt that a body asks for; an empty one is none."""
    return body.cache_salt or None
