"""Responses that can be read again and continued, within a number of them and of bytes.

A response belongs to its tenant; no other tenant finds it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

__all__ = ["ResponseStore", "StoredResponse"]

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20
_FEW = 8  # ids that are searched faster than a response is parsed


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """response: the JSON that was told. messages: the conversation with its answer, for the next
    turn."""

    response: bytes
    messages: Sequence[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """The oldest go first: of the tenant that has most responses, or most bytes, if all together
    have too many. So one tenant's flood leaves another's there.

    May be used from several threads.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[str | None, OrderedDict[str, StoredResponse]] = {}  # by tenant
        self._sizes: Counter[str | None] = Counter()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses, as if none shared a text with another."""
        return self._sizes.total()

    def add(
        self, name: str, response: bytes, messages: Sequence[dict[str, Any]], tenant: str | None
    ) -> None:
        """Keep a response, in place of one of its id; one that alone is too large is not kept."""
        size = sys.getsizeof(response) + _size(list(messages))
        with self._lock:
            self.remove(name, tenant)
            if size > self._max_bytes:
                return
            own = self._stored.setdefault(tenant, OrderedDict())
            own[name] = StoredResponse(response, messages, size)
            self._sizes[tenant] += size
            while len(self) > self._max_responses:
                self._forget_oldest(max(self._stored, key=lambda one: len(self._stored[one])))
            while self.num_bytes > self._max_bytes:
                self._forget_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def get(self, name: str, tenant: str | None) -> StoredResponse | None:
        """Return a tenant's response; None if there is none of this name."""
        with self._lock:
            own = self._stored.get(tenant)
            return own.get(name) if own is not None else None

    def find_items(self, ids: Set[str], tenant: str | None) -> dict[str, dict[str, Any]]:
        """Return the items of a tenant's stored responses that have these ids, by id.

        Not for the event loop: responses are read from the last one on until all are found.
        """
        with self._lock:
            stored = list(self._stored.get(tenant, {}).values())
        quoted = [json.dumps(item_id).encode() for item_id in ids]
        found: dict[str, dict[str, Any]] = {}
        for one in reversed(stored):
            if len(found) == len(ids):
                break
            if len(ids) <= _FEW and not any(text in one.response for text in quoted):
                continue
            for item in json.loads(one.response)["output"]:
                if item["id"] in ids:
                    found.setdefault(item["id"], item)
        return found

    def remove(self, name: str, tenant: str | None) -> bool:
        """Forget a tenant's response; whether there was one."""
        with self._lock:
            found = self.get(name, tenant) is not None
            if found:
                self._forget(name, tenant)
            return found

    def _forget_oldest(self, tenant: str | None) -> None:
        self._forget(next(iter(self._stored[tenant])), tenant)

    def _forget(self, name: str, tenant: str | None) -> None:
        own = self._stored[tenant]
        self._sizes[tenant] -= own.pop(name).num_bytes
        if not own:
            del self._stored[tenant], self._sizes[tenant]


def _size(value: Any) -> int:
    """Return the bytes of a JSON value's objects."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_size(key) + _size(one) for key, one in value.items())
    return size + sum(map(_size, value)) if isinstance(value, list) else size
