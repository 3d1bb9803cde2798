"""Whether a browser's page may ask: a server without keys answers pages of its own alone.

A page of another site can send requests to this machine, and by a name of its own that it has
resolve to 127.0.0.1 even read the answers (DNS rebinding). So without keys the header `Host` must
name this machine, and `Origin`, which browsers send, must be the server's own, or one that
`--cors-origin` allows. Source: the Fetch standard, section 3.1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from headstart.server.errors import ApiError
from headstart.server.options import ServerOptions

__all__ = ["check_origin"]


def check_origin(headers: Mapping[bytes, bytes], options: ServerOptions) -> None:
    """Raises ApiError (403) for a request by a foreign name, or from a foreign page."""
    host = headers.get(b"host", b"").decode("latin-1")
    name = _name_of(f"//{host}")
    if host and name != options.host and not _is_this_machine(name):
        raise ApiError(403, f"the host {host!r} is not known; allowed: an address, or localhost")
    origin = headers.get(b"origin", b"").decode("latin-1")
    allowed = [one.strip() for one in (options.cors_origin or "").split(",")]
    if origin and origin not in allowed and "*" not in allowed and _host_of(origin) != host:
        raise ApiError(403, f"pages of {origin!r} may not ask; --cors-origin allows them")


def _is_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
