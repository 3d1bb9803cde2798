"""Whose cached blocks are, as an administrator knows it: by the names of keys and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headstart.cache import Namespace
from headstart.cache.identity import PUBLIC

__all__ = ["Owner", "Owners"]

_SHOWN = 16  # characters of a salt or digest


class Owner(NamedTuple):
    """Who has blocks, and with which adapter.

    kind: "key", "group" or "operator" of the tenant `name`, "public" for a public prefix. Where
    there is one, nothing is said of the salt.
    """

    adapter: str | None
    salt: str | None
    kind: str | None = None
    name: str | None = None


class Owners:
    """Finds the owner of a namespace.

    >>> owners = Owners({"d2a1": ("group", "research")})
    >>> owners.tell(owners.of(Namespace(None, "d2a1/77f0")))
    {'kind': 'group', 'tenant': 'research', 'salt': None, 'adapter': None}
    """

    def __init__(self, tenants: Mapping[str, tuple[str, str]] | None = None) -> None:
        """tenants: kind and name by what all salts of a tenant begin with; None without keys."""
        self._tenants = tenants

    def of(self, namespace: Namespace) -> Owner:
        """The owner of a namespace: of a tenant's one, also if a request has narrowed it."""
        adapter, salt = namespace
        if self._tenants is None or salt is None:
            return Owner(adapter, salt)
        if salt == PUBLIC:
            return Owner(adapter, None, "public")
        found = self._tenants.get(salt.partition("/")[0])
        return Owner(adapter, salt) if found is None else Owner(adapter, None, *found)

    def tell(self, owner: Owner) -> dict[str, Any]:
        """An owner as the API tells it; without keys only its salt and its adapter's digest."""
        told = {"salt": _short(owner.salt), "adapter": _short(owner.adapter)}
        if self._tenants is None:
            return told
        return {"kind": owner.kind, "tenant": owner.name, **told}


def _short(text: str | None) -> str | None:
    return None if text is None else text[:_SHOWN]
