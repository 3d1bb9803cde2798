"""The protocol of a tier: a store of blocks by their portable names, outside the pool.

    pool ──offer──▶ saver's thread ──save──▶ store          a block is filled, or about to go
    pool ◀──rows─── loader's thread ◀──load── store         a lookup continues where the pool's ends

A store holds bytes and knows no tensor. It may lose anything at any time: what it does not have
is computed. It never gives a wrong answer: a block comes back as it was saved, or not at all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults

__all__ = ["BlockStore", "LoadedBlock", "ModelRecord", "StoredBlock"]


class ModelRecord(NamedTuple):
    """The model of some blocks, and their size.

    fingerprint: covers all that must be equal for K/V to be exchanged; it is part of every name.
    title: the model's name for people. block_bytes: bytes of a block's payload.
    """

    fingerprint: str
    title: str
    block_size: int
    block_bytes: int


class StoredBlock(NamedTuple):
    """A block to save.

    depth: blocks before it in its prompt. seconds: the time that computing it takes. used: when its
    request came, in seconds since 1970. payload: its K/V, which do not change any more. words: its
    text, for people who list what is on their disk; empty unless they want that.
    """

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    used: float
    payload: bytes | memoryview
    words: str = ""


class LoadedBlock(NamedTuple):
    """A block as it was saved, and the tier that had it: "disk", "remote"."""

    tier: str
    payload: memoryview


class BlockStore(Protocol):
    """Blocks of one model. Every method may be called from any thread, and none raises.

    A failure is a miss, is counted in `faults`, and is logged now and then. tier: the store's name.
    num_kept: blocks when it was opened; 0 where counting takes long. block_seconds: the time that
    computing a block took, by the engines that saved some; 0 if not known yet.
    """

    tier: str
    faults: Faults
    num_kept: int
    block_seconds: float

    def find(self, names: Sequence[BlockHash]) -> int:
        """Return how many of these, from the first on, are probably there. Reads no payload."""
        ...

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        """Yield these blocks in order, up to the first that is missing or damaged."""
        ...

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Save blocks, unless that would cost others that were used since; return the new ones."""
        ...

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Note that these blocks were of use: they go later."""
        ...

    def clear(self) -> bool:
        """Forget all blocks of the model; return False where some may be left."""
        ...

    def close(self) -> None:
        """Close files and connections. Idempotent."""
        ...
