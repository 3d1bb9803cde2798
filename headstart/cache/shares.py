"""Owners that share the pool, and their weights."""

from collections.abc import Collection
from math import inf

from headstart.cache.identity import PUBLIC
from headstart.errors import CacheError
from headstart.validation import describe

__all__ = ["Shares", "owner_among"]


class Shares:
    """The weights of owners. An owner is named by the salts that begin with its name.

    A salt is its owner's name alone, or the name, a slash, and what narrows it. Salts of nobody
    who was made an owner are nobody's, so a request cannot become an owner by its salt. Public
    blocks, which serve all owners, have an owner of their own with the weight of all together. May
    be changed from any thread, and while blocks are cached; who is an owner stays one.

    >>> shares = Shares()
    >>> shares.set("a", 2.0)
    >>> shares.owner("a"), shares.owner("a/x"), shares.owner("ab"), shares.owner(None)
    ('a', 'a', None, None)
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}

    def set(self, owner: str, weight: float) -> None:
        """Make an owner, or change its weight: above 0 and finite, or CacheError is raised."""
        if not isinstance(weight, int | float) or not 0 < weight < inf:
            raise CacheError(
                f"the weight of owner {owner!r} is {describe(weight)}; allowed: above 0"
            )
        self._weights[owner] = weight

    def owner(self, salt: str | None) -> str | None:
        """Whose a salt is; None if it is nobody's."""
        return owner_among(self._weights, salt)

    @property
    def count(self) -> int:
        """How many owners there are."""
        return len(self._weights)

    def names(self) -> frozenset[str]:
        """The owners that there are now."""
        return frozenset(self._weights)

    def weight(self, owner: str | None) -> float:
        """An owner's weight; that of nobody is 1."""
        if owner == PUBLIC:
            return sum(self._weights.values()) or 1.0
        return self._weights.get(owner, 1.0) if owner is not None else 1.0


def owner_among(names: Collection[str], salt: str | None) -> str | None:
    """Whose a salt is where these are the owners; None if it is nobody's."""
    if not names or salt is None:
        return None
    name = salt.partition("/")[0]
    return name if name in names or salt == PUBLIC else None
