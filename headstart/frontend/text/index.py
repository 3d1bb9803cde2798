"""Token ids by text, found by prefix, within a number of texts and a number of bytes.

A text is known by its length in UTF-8 and a hash over adapter, salt and text. So the longest
known text that begins another costs one pass of BLAKE2 over it and a digest at each distinct
known length: a few microseconds for each, whatever the number of texts of one length. That is
why the number of texts is bounded too. The text that was used least recently goes first.

`_known` says everything; the other fields are derived from it. A change that an exception cuts
off, Ctrl-C included, is repaired by the next call.
"""

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from typing import NamedTuple

from headstart.cache import Namespace
from headstart.errors import ConfigError

__all__ = ["ENTRY_BYTES", "TextIndex"]

ENTRY_BYTES = 768
"""What a text costs beside its token ids: its digest, its places in four tables, and the head of
an array."""


class _Known(NamedTuple):
    """The first `num_tokens` of `token_ids`; several texts of one turn share the same array."""

    num_bytes: int
    token_ids: "array[int]"
    num_tokens: int


class TextIndex:
    """At most `max_texts` texts, which with their token ids take at most `max_bytes`.

    Not thread-safe. Raises ConfigError for a bound below 1.
    """

    def __init__(self, max_texts: int, max_bytes: int) -> None:
        for name, value in (("max_texts", max_texts), ("max_bytes", max_bytes)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: at least 1")
        self._max_texts = max_texts
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # least recently used first
        self._changing = False
        self._derive()

    def _derive(self) -> None:
        """Work out the fields that follow from what is known."""
        self._num_bytes = 0
        self._counts: Counter[int] = Counter()  # texts of each length
        self._lengths: list[int] = []
        self._users: Counter[int] = Counter()  # texts of each array, by its id
        for known in self._known.values():
            self._count(known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of all token ids, each array counted once, and `ENTRY_BYTES` a text."""
        self._repair()
        return self._num_bytes

    def add(self, text: str, token_ids: "array[int]", count: int, namespace: Namespace) -> None:
        """Keep the first `count` ids as those of `text`, in place of any earlier ones.

        One whose ids alone take more than `max_bytes` is not kept.
        """
        self._repair()
        if _size(token_ids) + ENTRY_BYTES > self._max_bytes:
            return
        data = _encode(text)
        hasher = _hasher(namespace)
        hasher.update(data)
        key = hasher.digest()
        self._changing = True
        if key in self._known:
            self._forget(key)
        known = self._known[key] = _Known(len(data), token_ids, count)
        self._count(known)
        self._make_room()
        self._changing = False

    def _make_room(self) -> None:
        while len(self._known) > self._max_texts or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def _repair(self) -> None:
        if self._changing:
            self._derive()
            self._make_room()
            self._changing = False

    def _count(self, known: _Known) -> None:
        self._counts[known.num_bytes] += 1
        if self._counts[known.num_bytes] == 1:
            insort(self._lengths, known.num_bytes)
        self._users[id(known.token_ids)] += 1
        if self._users[id(known.token_ids)] == 1:
            self._num_bytes += _size(known.token_ids)
        self._num_bytes += ENTRY_BYTES

    def _forget(self, key: bytes) -> None:
        known = self._known.pop(key)
        self._counts[known.num_bytes] -= 1
        if not self._counts[known.num_bytes]:
            del self._counts[known.num_bytes]
            del self._lengths[bisect_left(self._lengths, known.num_bytes)]
        self._users[id(known.token_ids)] -= 1
        if not self._users[id(known.token_ids)]:
            del self._users[id(known.token_ids)]
            self._num_bytes -= _size(known.token_ids)
        self._num_bytes -= ENTRY_BYTES

    def clear(self) -> None:
        """Forget every text."""
        self._changing = True
        self._known.clear()
        self._repair()

    def longest(self, text: str, namespace: Namespace) -> tuple[list[int], str]:
        """The ids of the longest known beginning of `text`, and the text after it."""
        self._repair()
        data = _encode(text)
        hasher = _hasher(namespace)
        done = 0
        found: bytes | None = None
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            hasher.update(data[done:length])
            done = length
            key = hasher.digest()
            if key in self._known:
                found = key
        if found is None:
            return [], text
        self._known.move_to_end(found)
        known = self._known[found]
        return known.token_ids[: known.num_tokens].tolist(), _decode(data[known.num_bytes :])

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._repair()
        arrays = {id(known.token_ids): known.token_ids for known in self._known.values()}
        size = sum(map(_size, arrays.values())) + ENTRY_BYTES * len(self._known)
        assert self._num_bytes == size <= self._max_bytes, "the bytes are counted wrong"
        assert len(self._known) <= self._max_texts
        lengths = Counter(known.num_bytes for known in self._known.values())
        assert self._counts == lengths and self._lengths == sorted(lengths)


def _encode(text: str) -> bytes:
    """A text in UTF-8; half a character, which a model may have written, in three bytes."""
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _size(token_ids: "array[int]") -> int:
    return len(token_ids) * token_ids.itemsize


def _hasher(namespace: Namespace) -> "hashlib.blake2b":
    """Adapter and salt stand in fields of their own lengths, so that no two run together."""
    hasher = hashlib.blake2b(digest_size=16)
    for field in namespace:
        name = b"" if field is None else _encode(field)
        hasher.update((field is not None).to_bytes() + len(name).to_bytes(8) + name)
    return hasher
