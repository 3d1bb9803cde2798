"""Responses that can be read again and continued, within a number of them and of bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ResponseStore", "StoredResponse"]

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """response: as it was told. messages: the conversation with its answer, for the next turn.

    tenant: whose it is; nobody else finds it.
    """

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    tenant: str | None
    num_bytes: int


class ResponseStore:
    """The oldest go first. For the server's thread alone."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(
        self, response: dict[str, Any], messages: Sequence[dict[str, Any]], tenant: str | None
    ) -> None:
        """Keep a response; one that alone is too large is not kept."""
        size = len(json.dumps([response, messages]))
        if size > self._max_bytes:
            return
        self._stored[response["id"]] = StoredResponse(response, messages, tenant, size)
        self.num_bytes += size
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, name: str, tenant: str | None) -> StoredResponse | None:
        """A tenant's response; None if there is none of this name."""
        found = self._stored.get(name)
        return found if found is not None and found.tenant == tenant else None

    def remove(self, name: str, tenant: str | None) -> bool:
        """Forget a tenant's response; whether there was one."""
        found = self.get(name, tenant) is not None
        if found:
            self._forget(name)
        return found

    def _forget(self, name: str) -> None:
        self.num_bytes -= self._stored.pop(name).num_bytes
