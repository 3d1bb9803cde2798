"""The protocol of a tier: a store of blocks outside the pool, keyed by their hashes.

    pool ──offer──▶ saver's thread ──save──▶ store          a block is full, or soon evicted
    pool ◀──bytes── loader's thread ◀──load── store         a lookup continues after the pool's hit

A store holds bytes, not tensors. It may lose any block at any time; a lost block is computed again.
It returns a block exactly as it was saved, or not at all.

A block is stored as a record: a header with the block's name (the hash of its prefix), and the
payload. Both have a checksum.

    magic 8 | depth 4 | seconds 4 | length 8 | name 32 | parent 32
    | payload checksum 8 | header checksum 8

The checksums are XXH3 with 64 bits, which miss one in 2^64 accidental changes.
They are not signatures, so a process that can write to a store can change its blocks.
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
"""The version of a record's format. The remote tier's keys also contain it, so that engines of two
versions can share a server without reporting each other's blocks as damaged."""
_MAGIC = b"hsblock%d" % VERSION
_HEAD = struct.Struct("<8sIfQ32s32sQ")
_CHECKSUM = struct.Struct("<Q")

_LOG = logging.getLogger("headstart.tiers")
_LOG_INTERVAL = 60.0  # seconds between two log lines about the same kind of fault
_FIRST_PAUSE = 5.0  # seconds
_MAX_PAUSE = 300.0

SILENT = "it does not answer"
SLOW = "loading is slower than computing"
"""The kinds of fault that `GuardedStore` reports for any store."""


class ModelRecord(NamedTuple):
    """The model of a store's blocks, and their size.

    fingerprint: equal only for models that can exchange K/V; part of the hash in a block's name.
    title: the model's display name. block_size: tokens of a block. block_bytes: bytes of a block's
    payload.
    """

    fingerprint: str
    title: str
    block_size: int
    block_bytes: int


class StoredBlock(NamedTuple):
    """A block to save.

    depth: number of blocks before it in its prompt. seconds: the time to compute it. used: the time
    of its request, in seconds since 1970. payload: its K/V, which must not change any more. text:
    its text, for `headstart cache ls`; empty unless `cache_words` is on.
    """

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    used: float
    payload: bytes | memoryview
    text: str = ""


class LoadedBlock(NamedTuple):
    """A block as it was saved, and the name of its tier: "disk" or "remote"."""

    tier: str
    payload: memoryview


class RecordHeader(NamedTuple):
    """The fields of a record's header. checksum: the checksum of the payload."""

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    length: int
    checksum: int


def make_header(block: StoredBlock) -> bytes:
    """Return the header of a block, `HEADER_BYTES` bytes long."""
    length, checksum = memoryview(block.payload).nbytes, checksum_of(block.payload)
    fields = (block.depth, block.seconds, length, block.name, block.parent)
    head = _HEAD.pack(_MAGIC, *fields, checksum)
    return (head + _CHECKSUM.pack(checksum_of(head))).ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes | memoryview) -> RecordHeader | None:
    """Return the header at the beginning of `data`; None if it is damaged or missing.

    A header whose seconds are negative or not finite counts as damaged.
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
    """Return the payload of the record in `data`; None if it is damaged or another block's."""
    header = read_header(data)
    if header is None or header.name != name:
        return None
    payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
    if len(payload) != header.length or checksum_of(payload) != header.checksum:
        return None
    return payload


class Faults:
    """Counts of faults by kind, logged at most once a minute. A fault is a miss, not an exception.

    num_unsaved: blocks that were not saved because the store failed or was paused.
    """

    def __init__(self, store: str) -> None:
        self.counts: Counter[str] = Counter()
        self.num_unsaved = 0
        self._store = store
        self._logged: dict[str, float] = {}

    def note(self, kind: str, detail: object) -> None:
        """Count a fault; log it unless a fault of this kind was logged within the last minute."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._logged[kind] = now
            _LOG.warning(
                "%s: %s: %s (%d so far; blocks that cannot be loaded are computed)",
                *(self._store, kind, detail, self.counts[kind]),
            )


class Pause:
    """The time for which a store is not called after a failure.

    The first pause lasts five seconds, and each further pause twice as long, up to five minutes.
    After an answer, the next pause lasts five seconds again; the current pause continues.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._seconds = 0.0
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """True while the store must not be called."""
        return time.monotonic() < self._until

    def failed(self, kind: str, detail: object) -> None:
        """Count a failure, and begin a pause."""
        if not self.is_on:  # calls that failed together count as one failure
            self._seconds = min(2 * self._seconds, _MAX_PAUSE) or _FIRST_PAUSE
            self._until = time.monotonic() + self._seconds
        self.faults.note(kind, f"{detail}; the store is paused for {self._seconds:.0f} s")

    def answered(self) -> None:
        """Let the next pause last five seconds again."""
        self._seconds = 0.0


class BlockStore(Protocol):
    """Blocks of one model. Every method may be called from any thread, and none raises.

    A failure is a miss, which `faults` counts and logs. tier: the tier's name. num_stored: number
    of blocks when the store was opened; 0 if counting takes long. block_seconds: the time to
    compute a block, measured by the engines that saved blocks; 0 if unknown.
    """

    tier: str
    faults: Faults
    num_stored: int
    block_seconds: float

    def find(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that are probably stored; reads no payload."""
        ...

    def first(self, names: Sequence[BlockHash]) -> int:
        """Return the index of the first block that is probably stored; `len(names)` if none is."""
        ...

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        """Yield these blocks in order, up to the first that is missing or damaged."""
        ...

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Save blocks; return the number of new blocks.

        A block may only replace blocks that were last used before its time `used`.
        """
        ...

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Record that these blocks were used now, which delays their eviction."""
        ...

    def clear(self) -> bool:
        """Forget all blocks of the model; return False if some may be left."""
        ...

    def close(self) -> None:
        """Close files and connections. Idempotent."""
        ...
