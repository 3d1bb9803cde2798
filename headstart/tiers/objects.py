"""Objects of any size over a `BlockStore`, whose blocks have one: image embeddings and the like.

An object is cut into blocks of `OBJECT_BLOCK` bytes, the first of which begins with its length. An
object that lost any of them is not there.
"""

import hashlib
import struct
import time
from collections.abc import Sequence

from headstart.cache import BlockHash
from headstart.tiers.guard import GuardedStore
from headstart.tiers.saver import Saver
from headstart.tiers.store import BlockStore, ModelRecord, StoredBlock

__all__ = ["OBJECTS", "ObjectStore"]

OBJECT_BLOCK = 1 << 16
_LENGTH = struct.Struct("<Q")
_NOTHING = BlockHash(bytes(32))

OBJECTS = ModelRecord("objects, 1", "image embeddings", 1, OBJECT_BLOCK)
"""The record of all objects, whatever their model: their keys say all that they depend on."""


class ObjectStore:
    """Bytes by key; what is not there, or damaged, is None. No method raises.

    stores: the tiers, nearest first. Loading waits for each up to its deadline; saving does not.
    """

    def __init__(self, stores: Sequence[GuardedStore], saver: Saver) -> None:
        self._stores = stores
        self._saver = saver

    def load(self, key: bytes) -> memoryview | None:
        """The object of this key, as it was saved. What a farther tier had is saved in all."""
        for at, store in enumerate(self._stores):
            found = store.call(lambda inner: self._load(inner, key), None)
            if found is not None:
                if at:
                    self.save(key, found, _count_blocks(len(found)) * store.block_seconds)
                return found
        return None

    def _load(self, store: BlockStore, key: bytes) -> memoryview | None:
        first = next(iter(store.load([_name(key, 0)])), None)
        if first is None:
            return None
        length = _LENGTH.unpack_from(first.payload)[0]
        count = _count_blocks(length)
        names = [_name(key, at) for at in range(1, count)]
        if store.find(names) < len(names):
            return None
        parts = [first.payload, *(block.payload for block in store.load(names))]
        if len(parts) < count:
            return None
        self._saver.touch([_name(key, 0), *names])
        return memoryview(b"".join(parts))[_LENGTH.size : _LENGTH.size + length]

    def save(self, key: bytes, data: bytes | memoryview, seconds: float) -> None:
        """Keep an object that took so long to make, if the saver has room for it."""
        whole = _LENGTH.pack(len(data)) + data
        count = _count_blocks(len(data))
        whole = whole.ljust(count * OBJECT_BLOCK, b"\0")
        now = time.time()
        self._saver.offer(
            [
                StoredBlock(
                    _name(key, at),
                    _name(key, at - 1) if at else _NOTHING,
                    at,
                    seconds / count,
                    now,
                    memoryview(whole)[at * OBJECT_BLOCK : (at + 1) * OBJECT_BLOCK],
                )
                for at in range(count)
            ]
        )


def _count_blocks(nbytes: int) -> int:
    """Number of blocks of an object of so many bytes."""
    return -(-(nbytes + _LENGTH.size) // OBJECT_BLOCK)


def _name(key: bytes, at: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"object" + struct.pack("<QQ", at, len(key)) + key).digest())
