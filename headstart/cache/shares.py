"""Owners of cached blocks, and the weights by which they share the pool."""

from collections.abc import Collection
from math import inf

from headstart.cache.identity import PUBLIC
from headstart.errors import CacheError
from headstart.validation import describe


class Shares:
    """The weights of owners, by name.

    A salt belongs to an owner if it is the owner's name, or the name followed by a slash and a
    suffix. Other salts have no owner, so a request cannot create an owner by its salt. Public
    blocks have a separate owner, whose weight is the sum of all weights. Weights may be changed
    from any thread, and while blocks are cached. Owners are never removed.

    >>> shares = Shares()
    >>> shares.set("a", 2.0)
    >>> shares.owner("a"), shares.owner("a/x"), shares.owner("ab"), shares.owner(None)
    ('a', 'a', None, None)
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}

    def set(self, owner: str, weight: float) -> None:
        """Add an owner, or change its weight. Raises CacheError unless the weight is above 0."""
        if not isinstance(weight, int | float) or not 0 < weight < inf:
            raise CacheError(
                f"the weight of owner {owner!r} is {describe(weight)}; allowed: a number above 0"
            )
        self._weights[owner] = weight

    def owner(self, salt: str | None) -> str | None:
        """Return the owner of a salt, if any."""
        return owner_among(self._weights, salt)

    @property
    def count(self) -> int:
        """The number of owners."""
        return len(self._weights)

    def names(self) -> frozenset[str]:
        """Return the current owners."""
        return frozenset(self._weights)

    def weight(self, owner: str | None) -> float:
        """Return the weight of an owner; 1 for blocks without an owner."""
        if owner == PUBLIC:
            return sum(self._weights.values()) or 1.0
        return self._weights.get(owner, 1.0) if owner is not None else 1.0


def owner_among(names: Collection[str], salt: str | None) -> str | None:
    """Return the owner of a salt among these owners, if any."""
    if not names or salt is None:
        return None
    name = salt.partition("/")[0]
    return name if name in names or salt == PUBLIC else None
