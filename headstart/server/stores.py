"""Answers that later requests may refer to: responses, and transcripts of speech."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from headstart.server.errors import ApiError

Value = TypeVar("Value")
MAX_VALUES = 4096
MAX_BYTES = 256 * 2**20
_FEW = 8  # a search for up to `_FEW` ids parses only responses that contain one


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    num_bytes: int
    end: float


class TenantStore(Generic[Value]):
    """Values by tenant and name, with limits on their number, bytes and age.

    Beyond a limit, the oldest value of the tenant with the most values (or bytes) is removed, so
    that one tenant cannot displace the values of other tenants. Thread-safe.
    """

    def __init__(
        self, max_values: int = MAX_VALUES, max_bytes: int = MAX_BYTES, seconds: float = math.inf
    ) -> None:
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._entries: dict[str | None, dict[Hashable, _Entry[Value]]] = {}  # by tenant, then name
        self._sizes: Counter[str | None] = Counter()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all values. An object that several values share counts several times."""
        return self._sizes.total()

    def put(self, name: Hashable, value: Value, tenant: str | None, num_bytes: int = 0) -> float:
        """Store or replace a value, unless it alone exceeds `max_bytes`.

        Return the time at which it expires.
        """
        now = time.time()
        end = now + self._seconds
        with self._lock:
            self.remove(name, tenant)
            if num_bytes <= self._max_bytes:
                self._entries.setdefault(tenant, {})[name] = _Entry(value, num_bytes, end)
                self._sizes[tenant] += num_bytes
            for owner, values in list(self._entries.items()):
                expired = takewhile(lambda item: item[1].end < now, values.items())
                for old in [old for old, _ in expired]:
                    self.remove(old, owner)
            while len(self) > self._max_values:
                self._remove_oldest(max(self._entries, key=lambda key: len(self._entries[key])))
            while self.num_bytes > self._max_bytes:
                self._remove_oldest(max(self._sizes, key=self._sizes.__getitem__))
        return end

    def get(self, name: Hashable, tenant: str | None) -> Value | None:
        with self._lock:
            entry = self._entries.get(tenant, {}).get(name)
        return entry.value if entry is not None and entry.end >= time.time() else None

    def values(self, tenant: str | None) -> list[Value]:
        """Return a tenant's values, the oldest first."""
        with self._lock:
            return [entry.value for entry in self._entries.get(tenant, {}).values()]

    def remove(self, name: Hashable, tenant: str | None) -> bool:
        """Remove a tenant's value. Return True if there was one."""
        with self._lock:
            entries = self._entries.get(tenant, {})
            if name not in entries:
                return False
            self._sizes[tenant] -= entries.pop(name).num_bytes
            if not entries:
                del self._entries[tenant], self._sizes[tenant]
            return True

    def _remove_oldest(self, tenant: str | None) -> None:
        self.remove(next(iter(self._entries[tenant])), tenant)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation including its answer, for the next turn."""

    response: bytes
    messages: Sequence[dict[str, Any]]


class ResponseStore(TenantStore[StoredResponse]):
    """Responses that can be read again and continued."""

    def add(
        self, name: str, response: bytes, messages: Sequence[dict[str, Any]], tenant: str | None
    ) -> None:
        """Store or replace a response, unless it alone exceeds the limit on bytes."""
        size = sys.getsizeof(response) + _size(list(messages))
        self.put(name, StoredResponse(response, messages), tenant, size)

    def find_items(self, ids: Set[str], tenant: str | None) -> dict[str, dict[str, Any]]:
        """Return the items with these ids in a tenant's stored responses, by id.

        Call it in a thread: it parses responses, the newest first, until all items are found.
        """
        quoted = [json.dumps(item_id).encode() for item_id in ids]
        items: dict[str, dict[str, Any]] = {}
        for stored in reversed(self.values(tenant)):
            if len(items) == len(ids):
                break
            if len(ids) <= _FEW and not any(text in stored.response for text in quoted):
                continue
            for item in json.loads(stored.response)["output"]:
                if item["id"] in ids:
                    items.setdefault(item["id"], item)
        return items


def _size(value: Any) -> int:
    """Return the memory of a JSON value, in bytes."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_size(key) + _size(item) for key, item in value.items())
    return size + sum(map(_size, value)) if isinstance(value, list) else size


class Transcripts(TenantStore[str]):
    """Transcripts of the last hour, so that a conversation can name a spoken answer by its id."""

    SECONDS = 3600

    def __init__(self) -> None:
        super().__init__(seconds=self.SECONDS)

    def add(self, salt: str | None, name: str, text: str) -> int:
        """Store text, and return the Unix time at which it expires."""
        return int(self.put((salt, name), text, _tenant(salt)))

    def find(self, salt: str | None, name: str) -> str:
        """Return the text of an answer. Raises ApiError if it is not stored."""
        text = self.get((salt, name), _tenant(salt))
        if text is None:
            raise ApiError(
                404,
                f"there is no spoken answer {name!r}; allowed: an answer from the last "
                f"{self.SECONDS // 60} minutes, or the transcript as content",
                param="messages",
            )
        return text


def _tenant(salt: str | None) -> str:
    """Return the tenant's part of a salt."""
    return (salt or "").partition("/")[0]
