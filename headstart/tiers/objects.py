"""Objects of any size, such as image embeddings, over a `BlockStore` of blocks of one size.

An object is cut into blocks of `OBJECT_BLOCK` bytes, the first of which begins with its length. An
object that lost a block is missing.
"""

import hashlib
import struct
import time
from collections.abc import Sequence

from headstart.cache import BlockHash
from headstart.tiers.guard import GuardedStore
from headstart.tiers.store import BlockStore, ModelRecord, StoredBlock
from headstart.tiers.worker import Saver

OBJECT_BLOCK = 1 << 16
_LENGTH = struct.Struct("<Q")

OBJECTS = ModelRecord("objects, 1", "image embeddings", 1, OBJECT_BLOCK)
"""The record of all objects of all models: an object's key covers all that it depends on."""


class ObjectStore:
    """Bytes by key; an object that is missing or damaged is None. No method raises.

    stores: the tiers, nearest first. Loading waits for each up to its deadline; saving does not.
    """

    def __init__(self, stores: Sequence[GuardedStore], saver: Saver) -> None:
        self._stores = stores
        self._saver = saver

    def load(self, key: bytes) -> memoryview | None:
        """Return the object of this key, as it was saved; one of a farther tier is saved in all."""
        for index, guarded in enumerate(self._stores):
            data = guarded.call(lambda store: self._load(store, key), None)
            if data is not None:
                if index:
                    seconds = guarded.store.block_seconds
                    self.save(key, data, _count_blocks(len(data)) * seconds)
                return data
        return None

    def _load(self, store: BlockStore, key: bytes) -> memoryview | None:
        first = next(iter(store.load([_name(key, 0)])), None)
        if first is None:
            return None
        length = _LENGTH.unpack_from(first.payload)[0]
        count = _count_blocks(length)
        names = [_name(key, index) for index in range(1, count)]
        if store.find(names) < len(names):
            return None
        parts = [first.payload, *(block.payload for block in store.load(names))]
        if len(parts) < count:
            return None
        self._saver.touch([_name(key, 0), *names])
        return memoryview(b"".join(parts))[_LENGTH.size : _LENGTH.size + length]

    def save(self, key: bytes, data: bytes | memoryview, seconds: float) -> None:
        """Store an object that took so long to make, if the saver has room for it."""
        count = _count_blocks(len(data))
        whole = memoryview((_LENGTH.pack(len(data)) + data).ljust(count * OBJECT_BLOCK, b"\0"))
        names = [_name(key, index) for index in range(count)]
        parents = [BlockHash(bytes(32)), *names]
        parts = [whole[i * OBJECT_BLOCK : (i + 1) * OBJECT_BLOCK] for i in range(count)]
        now = time.time()
        self._saver.offer(
            [
                StoredBlock(names[i], parents[i], i, seconds / count, now, parts[i])
                for i in range(count)
            ]
        )


def _count_blocks(nbytes: int) -> int:
    """Return the number of blocks of an object of so many bytes."""
    return -(-(nbytes + _LENGTH.size) // OBJECT_BLOCK)


def _name(key: bytes, index: int) -> BlockHash:
    data = b"object" + struct.pack("<QQ", index, len(key)) + key
    return BlockHash(hashlib.sha256(data).digest())
