"""JSON of requests and answers, by msgspec.

What msgspec refuses is left to the standard library, which reads other encodings than UTF-8 and
half characters, and whose errors name the position.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

__all__ = ["decode", "encode"]


def decode(data: bytes) -> Any:
    """Return what `json.loads` returns, or raise its error."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(data)


def encode(value: Any) -> bytes:
    """Return a value as JSON without white space."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):  # half characters, subclasses of float
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
