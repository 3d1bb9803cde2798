"""Stores for tests, and blocks whose names and bytes follow from a number."""

import hashlib
from pathlib import Path

from headstart.cache import BlockHash
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import BlockStore, ModelRecord, StoredBlock

MODEL = ModelRecord("weights", "a model", 16, 2000)


class Clock:
    """The time of pauses, which stands still unless it is set."""

    now = 1000.0


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest())


def payload(number: int, nbytes: int = MODEL.block_bytes) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


def block(number: int, used: float = 1.0, model: ModelRecord = MODEL) -> StoredBlock:
    """Block `number` of a prompt whose blocks are 100 k, 100 k + 1, ..."""
    depth = number % 100
    parent = name(number - 1) if depth else BlockHash(bytes(32))
    return StoredBlock(name(number), parent, depth, 0.5, used, payload(number, model.block_bytes))


def blocks(numbers: range, used: float = 1.0) -> list[StoredBlock]:
    return [block(number, used) for number in numbers]


def names(numbers: range) -> list[BlockHash]:
    return [name(number) for number in numbers]


def held(store: BlockStore, numbers: range) -> int:
    """Load these blocks, check each against what was saved, and return their number."""
    loaded = list(store.load(names(numbers)))
    for number, loaded_block in zip(numbers, loaded, strict=False):
        assert bytes(loaded_block.payload) == payload(number), f"block {number} is another's"
    return len(loaded)


def disk(folder: Path, max_bytes: int = 1 << 30, model: ModelRecord = MODEL) -> DiskStore:
    return DiskStore(folder, model, max_bytes)
