"""What the bodies of all APIs have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Body", "CacheFields", "Real", "Whole", "read_keeping", "read_retention", "read_salt"]

# `SamplingParams` checks ranges; here only the type is checked.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
_DAY = 86_400.0


class Body(BaseModel):
    """A body of JSON whose every field is known."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheFields(Body):
    """What a request says of the cache.

    cache_salt: only requests of the same salt share K/V. no_read: compute the whole prompt.
    no_store: leave nothing for later requests. prompt_cache_retention: how long the prompt is
    worth keeping. prompt_cache_key is a hint to a cluster, of which one engine has no need.
    """

    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: bool = False
    no_store: bool = False


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
