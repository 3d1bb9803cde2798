"""Tenants, and the salts that separate their cached data.

The server makes the salts, so a request cannot choose whose cache it reads:

    a tenant's salt               HMAC(secret, kind, name)
    with a salt in the body       tenant's salt + "/" + HMAC(secret, kind, name, salt in the body)

In an HMAC, the length of each field precedes it. The kind (group, key, operator) separates a group
from a key of the same name. The salt is part of the identity of K/V, of image embeddings, of stored
chats and of stage outputs. The secret is on disk (see `keys`), so salts survive a restart.

Without keys all requests belong to the tenant `EVERYBODY`, and use the salts of their bodies.
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

_LOG = logging.getLogger("headstart.server")


class Tenant(NamedTuple):
    """A group of keys, a key without a group, or the operator (all keys of the command line)."""

    name: str
    kind: str
    salt: str | None
    weight: float = 1.0
    is_admin: bool = False

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}"


EVERYBODY = Tenant("everybody", "all", None, is_admin=True)
"""The one tenant of a server without keys."""


class Tenants:
    """The tenants of a server. ring: its keys; None for a server without keys."""

    def __init__(self, ring: KeyRing | None = None, secret: bytes = b"") -> None:
        self._ring = ring
        self._secret = secret
        self._salts: dict[tuple[str, str], str] = {}  # by kind and name
        self._names: dict[str, tuple[str, str]] = {}  # by salt

    @property
    def requires_keys(self) -> bool:
        return self._ring is not None

    def of(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """Return the tenant of a request with these headers. Raises ApiError (401)."""
        if self._ring is None:
            return EVERYBODY
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        token = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        key = self._ring.find(token) if token else None
        if key is None:
            text = (
                "the API key is unknown; get a key from the server's operator"
                if token
                else "the request has no API key; send it in the header "
                "'Authorization: Bearer' or 'x-api-key'"
            )
            raise ApiError(401, text, code="invalid_api_key")
        kind, name = key.tenant
        weight = sum(other.weight for other in self._ring.keys if other.tenant == key.tenant)
        # If the key was removed meanwhile, the sum is 0, which is not a valid weight.
        return Tenant(name, kind, self._salt_of(kind, name), weight or key.weight, key.admin)

    def names(self) -> Mapping[str, tuple[str, str]]:
        """Return the kind and the name of each tenant by salt, for current and former keys.

        The mapping grows with new tenants; any thread may read it. Call this in the event loop.
        """
        for key in self._ring.keys if self._ring is not None else ():
            self._salt_of(*key.tenant)
        return self._names

    def salt(self, tenant: Tenant, requested: str | None) -> str | None:
        """Return the salt of a tenant's request. requested: the salt in the request's body.

        Raises RequestError for a salt that UTF-8 cannot encode.
        """
        if requested is not None:
            check_utf8("the salt", requested)
        if tenant.salt is None or requested is None:
            return tenant.salt or requested
        return f"{tenant.salt}/{self._derive(tenant.kind, tenant.name, requested)}"

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
    """Return the tenants of a server that listens on an address.

    Raises ConfigError if other machines could use the server without a key, or if the file of keys
    is damaged.
    """
    folder = KeyFolder(options.keys_folder)
    is_open = not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    reach = f"other machines can reach host {describe(options.host)}"
    if options.api_keys is False and is_open:
        text = f"api_keys is off and {reach}; allowed: on, or a loopback address as host"
        raise ConfigError(text)
    operators = [operator_key(key) for key in options.api_key]
    ring = KeyRing(
        folder, lambda error: _LOG.error("stored keys are refused: %s", error), operators
    )
    keys = ring.keys
    if not (is_open or bool(keys) if options.api_keys is None else options.api_keys):
        return Tenants()
    if not keys:
        raise ConfigError(
            f"there are no API keys in {folder.file}, and {reach if is_open else 'api_keys is on'}"
            "; create one with 'headstart keys add NAME', or pass one with --api-key KEY"
        )
    return Tenants(ring, folder.secret())


def tenant_of(request: Request) -> Tenant:
    """Return the tenant of a request."""
    tenant: Tenant = request.state.tenant
    return tenant
