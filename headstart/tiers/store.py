"""The protocol of a tier: a store of blocks by their portable names, outside the pool.

    pool ──offer──▶ saver's thread ──save──▶ store          a block is filled, or about to go
    pool ◀──rows─── loader's thread ◀──load── store         a lookup continues where the pool's ends

A store holds bytes and knows no tensor. It may lose anything at any time: what it does not have is
computed. It never gives a wrong answer: a block is returned as it was saved, or not at all.

A block is stored as a record: a header that names it, and its payload, each with a checksum.

    magic 8 | depth 4 | seconds 4 | length 8 | name 32 | parent 32 | payload's 8 | header's 8

The last two are XXH3 of 64 bits, which misses one in 2^64 of accidental damages, and reads as fast
as memory. It is no signature: a process that can write to a store can put anything in it.
"""

import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest as checksum_of

from headstart.cache import BlockHash

HEADER_BYTES = 128
VERSION = 2
"""The version of a record. It is part of all that outlives the process, so that engines of two
versions may share a server, and neither takes the other's blocks for damaged ones."""
_MAGIC = b"hsblock%d" % VERSION
_HEAD = struct.Struct("<8sIfQ32s32sQ")
_CHECKSUM = struct.Struct("<Q")

_LOG = logging.getLogger("headstart.tiers")
_BETWEEN_LINES = 60.0  # seconds between two lines about the same kind of fault
_FIRST_PAUSE = 5.0  # seconds
_LONGEST_PAUSE = 300.0

SILENT = "it does not answer"
SLOW = "loading is slower than computing"
"""The kinds of fault that `GuardedStore` reports of any store."""


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

    depth: blocks before it in its prompt. seconds: the time to compute it. used: when its request
    came, in seconds since 1970. payload: its K/V, which no longer change. words: its text, for
    people who list the blocks on their disk; empty unless they want that.
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


class RecordHeader(NamedTuple):
    """The fields of a record's header; `seconds` as in `StoredBlock`, checksums of 64 bits."""

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    length: int
    checksum: int


def make_header(block: StoredBlock) -> bytes:
    """Return the header of a block, `HEADER_BYTES` long."""
    length, checksum = memoryview(block.payload).nbytes, checksum_of(block.payload)
    about = (block.depth, block.seconds, length, block.name, block.parent)
    head = _HEAD.pack(_MAGIC, *about, checksum)
    return (head + _CHECKSUM.pack(checksum_of(head))).ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes | memoryview) -> RecordHeader | None:
    """Return the header at the beginning of the bytes; None if it is damaged or missing.

    A header whose seconds are no finite time is damaged, too: an index could not order it.
    """
    if len(data) < HEADER_BYTES:
        return None
    head = bytes(data[: _HEAD.size])
    if checksum_of(head) != _CHECKSUM.unpack_from(data, _HEAD.size)[0]:
        return None
    magic, depth, seconds, length, name, parent, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 <= seconds < math.inf:
        return None
    return RecordHeader(BlockHash(name), BlockHash(parent), depth, seconds, length, checksum)


def payload_of(data: memoryview, name: BlockHash) -> memoryview | None:
    """Return the payload of the record at the beginning; None unless it is this block, whole."""
    header = read_header(data)
    if header is None or header.name != name:
        return None
    payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
    if len(payload) != header.length or checksum_of(payload) != header.checksum:
        return None
    return payload


class Faults:
    """Counts of faults by kind, logged at most once a minute. A fault costs a miss, never an error.

    num_unsaved: blocks that could not be saved because the store failed or was paused.
    """

    def __init__(self, store: str) -> None:
        self.counts: Counter[str] = Counter()
        self.num_unsaved = 0
        self._store = store
        self._logged: dict[str, float] = {}

    def note(self, kind: str, detail: object) -> None:
        """Count a fault, and log it unless one of its kind was logged within a minute."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -_BETWEEN_LINES) >= _BETWEEN_LINES:
            self._logged[kind] = now
            _LOG.warning(
                "%s: %s: %s (%d so far; blocks that cannot be loaded are computed)",
                *(self._store, kind, detail, self.counts[kind]),
            )


class Pause:
    """The time for which a store is not called after a failure.

    Five seconds, and twice as long after each further failure, up to five minutes. An answer makes
    the next pause short again, and does not end the current one.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._seconds = 0.0
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """True while the store is not to be called."""
        return time.monotonic() < self._until

    def failed(self, kind: str, detail: object) -> None:
        """Count a failure, and begin a pause."""
        if not self.is_on:  # calls that failed together count as one failure
            self._seconds = min(2 * self._seconds, _LONGEST_PAUSE) or _FIRST_PAUSE
            self._until = time.monotonic() + self._seconds
        self.faults.note(kind, f"{detail}; the store is paused for {self._seconds:.0f} s")

    def answered(self) -> None:
        """Make the next pause a short one."""
        self._seconds = 0.0


class BlockStore(Protocol):
    """Blocks of one model. Every method may be called from any thread, and none raises.

    A failure is a miss, is counted in `faults`, and is logged now and then. tier: the store's name.
    num_kept: blocks when it was opened; 0 where counting takes long. block_seconds: the time to
    compute a block, measured by the engines that saved some; 0 if not known yet.
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
        """Save blocks, unless that would evict more recently used ones; return the new ones."""
        ...

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Note that these blocks were used: they are evicted later."""
        ...

    def clear(self) -> bool:
        """Forget all blocks of the model; return False where some may be left."""
        ...

    def close(self) -> None:
        """Close files and connections. Idempotent."""
        ...
