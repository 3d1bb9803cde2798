"""Blocks whose names and bytes follow from a number, so that all loaded bytes can be checked."""

import hashlib

from headstart.cache import BlockHash
from headstart.tiers.store import ModelRecord, StoredBlock

__all__ = ["MODEL", "block", "name", "payload"]

MODEL = ModelRecord("weights", "a model", 16, 2000)


def name(number: int) -> BlockHash:
    """Return the name of a block."""
    return BlockHash(hashlib.sha256(b"%d" % number).digest())


def payload(number: int, nbytes: int) -> bytes:
    """Return the bytes of a block."""
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


def block(number: int, used: float = 1.0, model: ModelRecord = MODEL) -> StoredBlock:
    """Return block `number` of a prompt whose blocks have the numbers 100 k, 100 k + 1, ..."""
    depth = number % 100
    parent = name(number - 1) if depth else BlockHash(bytes(32))
    return StoredBlock(name(number), parent, depth, 0.5, used, payload(number, model.block_bytes))
