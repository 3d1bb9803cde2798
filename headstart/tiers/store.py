"""The protocol of a tier: a store of blocks by their portable names, outside the pool.

    pool ──offer──▶ saver's thread ──save──▶ store          a block filled, or is about to go
    pool ◀──rows─── loader's thread ◀──load── store         a lookup goes on where the pool's ends

A store holds bytes and knows no tensor. It may lose anything at any time: what it does not have
is computed. It never has a wrong answer: every block comes back as it was saved, or not at all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults

__all__ = ["BlockStore", "LoadedBlock", "ModelRecord", "StoredBlock"]


class ModelRecord(NamedTuple):
    """The model that blocks are of, and their size.

    fingerprint: all that must be the same for K/V to be exchanged; it is part of every name.
    title: the model's name for people. block_bytes: of one block: its K/V, and what
    is kept with them.
    """

    fingerprint: str
    title: str
    block_size: int
    block_bytes: int


class StoredBlock(NamedTuple):
    """A block to save.

    depth: blocks before it in its prompt. seconds: what computing it takes. used: when its request
    came, in seconds since 1970. payload: its K/V, which nobody changes any more. words: its text,
    for people who look what is kept on their disk; empty where they did not ask for that.
    """

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    used: float
    payload: bytes | memoryview
    words: str = ""


class LoadedBlock(NamedTuple):
    """A block as it was saved, and which tier had it: "disk", "remote"."""

    tier: str
    payload: memoryview


class BlockStore(Protocol):
    """Blocks of one model. Every method may be called from any thread, and none raises.

    What goes wrong is a miss, is counted, and is logged once in a while. tier: its name, or that of
    the nearest of several.
    """

    @property
    def tier(self) -> str: ...

    @property
    def faults(self) -> Faults:
        """What went wrong so far; of the nearest of several."""
        ...

    @property
    def num_kept(self) -> int:
        """Number of blocks when it was opened; 0 where that is not known at once."""
        ...

    @property
    def block_seconds(self) -> float:
        """Seconds that computing a block took, as whoever saved some told; 0 if not known yet."""
        ...

    def find(self, names: Sequence[BlockHash]) -> int:
        """Number of these, from the first on, that are probably there. Reads no payload."""
        ...

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        """The blocks of these names in order; ends before the first that is missing or damaged."""
        ...

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Keep the blocks, unless that would cost others that were used since; how many are new."""
        ...

    def touch(self, names: Sequence[BlockHash]) -> None:
        """These blocks were of use: they go later."""
        ...

    def clear(self) -> bool:
        """Forget all blocks of the model; False where some may be left."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Idempotent."""
        ...
