"""Tenants: who asks, and the salt that keeps what is cached for one from all others.

A salt is made on the server, so a request cannot choose whose cache it reads:

    tenant's salt      HMAC(secret, kind, its name)
    narrowed by body   tenant's salt / HMAC(secret, kind, its name, what the body asks)

Every field is framed by its length, and the kind (group, key, operator) tells a group from a key of
the same name, and the keys of the command line from both. The salt is
part of the identity of K/V, of image embeddings and their shapes, of remembered chats and of stage
outputs, so nothing that is kept for one tenant is found by another. The secret is on disk (see
`keys`): the same tenant has the same salt after a restart.

Without keys there is one tenant, everybody, whose requests have the salts that their bodies name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import struct
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

from headstart.errors import ConfigError
from headstart.server.errors import ApiError
from headstart.server.keys import KeyFolder, KeyRing, operator_key
from headstart.server.options import ServerOptions
from headstart.validation import check_utf8, describe

__all__ = ["EVERYBODY", "Tenant", "Tenants", "open_tenants", "tenant_of"]

_LOG = logging.getLogger("headstart.server")


class Tenant(NamedTuple):
    """Who asks: a group of keys, one key without a group, or the operator, with any key of the
    command line. `salt` names it in every cache."""

    name: str
    kind: str
    salt: str | None
    weight: float = 1.0
    is_admin: bool = False

    @property
    def key(self) -> str:
        """Tells tenants apart: those of one name by their kinds, too."""
        return f"{self.kind} {self.name}"


EVERYBODY = Tenant("everybody", "all", None, is_admin=True)
"""The one tenant of a server without keys."""


class Tenants:
    """Finds the tenant of a request by its key."""

    def __init__(self, ring: KeyRing | None = None, secret: bytes = b"") -> None:
        """`ring` is None for a server that asks for no keys."""
        self._ring = ring
        self._secret = secret
        self._salts: dict[tuple[str, str], str] = {}  # by kind and name
        self._names: dict[str, tuple[str, str]] = {}  # by salt

    @property
    def ask_for_keys(self) -> bool:
        """Whether a request needs a key."""
        return self._ring is not None

    def of(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant of a request with these headers. Raises ApiError (401)."""
        if self._ring is None:
            return EVERYBODY
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not given:
            raise ApiError(
                401,
                "the request has no API key; allowed: one in the header 'Authorization: Bearer' "
                "or 'x-api-key'",
                code="invalid_api_key",
            )
        key = self._ring.find(given)
        if key is None:
            text = "the API key is not known here: ask whoever runs this server for one"
            raise ApiError(401, text, code="invalid_api_key")
        kind, name = key.tenant
        weight = sum(one.weight for one in self._ring.keys if one.tenant == key.tenant)
        # The key may have been removed since it was found: a weight of 0 is none.
        return Tenant(name, kind, self._salt_of(kind, name), weight or key.weight, key.admin)

    def names(self) -> Mapping[str, tuple[str, str]]:
        """Kind and name of each tenant by its salt, of all keys that there are and were.

        Tenants that come later come in; for the event loop, but any thread may read it.
        """
        for key in self._ring.keys if self._ring is not None else ():
            self._salt_of(*key.tenant)
        return self._names

    def salt(self, tenant: Tenant, asked: str | None) -> str | None:
        """The salt of a tenant's request whose body asks for one, or for none.

        Raises RequestError for one that UTF-8 cannot encode.
        """
        if asked is not None:
            check_utf8("the salt", asked)
        if tenant.salt is None or asked is None:
            return asked if tenant.salt is None else tenant.salt
        return f"{tenant.salt}/{self._derive(tenant.kind, tenant.name, asked)}"

    def _salt_of(self, kind: str, name: str) -> str:
        salt = self._salts.get((kind, name))
        if salt is None:
            salt = self._salts[kind, name] = self._derive(kind, name)
            self._names[salt] = kind, name
        return salt

    def _derive(self, *fields: str) -> str:
        frames = [struct.pack("<Q", len(data)) + data for data in map(str.encode, fields)]
        return hmac.new(self._secret, b"".join(frames), hashlib.sha256).hexdigest()


def open_tenants(options: ServerOptions, address: str = "127.0.0.1") -> Tenants:
    """The tenants of a server that listens on an address, by its keys and those of this machine.

    Raises ConfigError when others could ask without a key, or a file of keys is damaged.
    """
    folder = KeyFolder(options.keys_folder)
    is_open = not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if options.api_keys is False and is_open:
        raise ConfigError(
            f"api_keys is off, and others can reach host {describe(options.host)}; allowed: on, or "
            "a loopback address as host"
        )
    given = [operator_key(key) for key in options.api_key]
    ring = KeyRing(folder, lambda error: _LOG.error("no request is let in: %s", error), given)
    wanted = (is_open or bool(ring.keys)) if options.api_keys is None else options.api_keys
    if not wanted:
        return Tenants()
    if not ring.keys:
        raise ConfigError(
            f"there are no API keys in {folder.file}, and "
            + (f"others can reach host {describe(options.host)}" if is_open else "api_keys is on")
            + "; 'headstart keys add NAME' makes one, --api-key KEY gives one"
        )
    return Tenants(ring, folder.secret())


def tenant_of(request: Request) -> Tenant:
    """Whose request it is."""
    tenant: Tenant = request.state.tenant
    return tenant
