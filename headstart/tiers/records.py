"""A block as a record of bytes: a header that names it, and its payload, each with a checksum.

    magic 8 | depth 4 | seconds 4 | length 8 | name 32 | parent 32 | payload's 8 | header's 8

The last two are XXH3 of 64 bits, which misses one in 2^64 of what is damaged by accident, and reads
as fast as memory. It is no signature: who can write to a store can make it say anything.
"""

import math
import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as checksum_of

from headstart.cache import BlockHash
from headstart.tiers.store import StoredBlock

__all__ = ["HEADER_BYTES", "VERSION", "RecordHeader", "make_header", "payload_of", "read_header"]

HEADER_BYTES = 128
VERSION = 2
"""Of a record. Whatever outlives the process is known by it, so that engines of two versions may
share a server, and neither takes the other's blocks for damaged ones."""
_MAGIC = b"hsblock%d" % VERSION
_HEAD = struct.Struct("<8sIfQ32s32sQ")
_CHECKSUM = struct.Struct("<Q")


class RecordHeader(NamedTuple):
    """The fields of a record's header; `seconds` as in `StoredBlock`, checksums of 64 bits."""

    name: BlockHash
    parent: BlockHash
    depth: int
    seconds: float
    length: int
    checksum: int


def make_header(block: StoredBlock) -> bytes:
    """The header of a block, `HEADER_BYTES` long."""
    head = _HEAD.pack(
        _MAGIC,
        block.depth,
        block.seconds,
        memoryview(block.payload).nbytes,
        block.name,
        block.parent,
        checksum_of(block.payload),
    )
    return (head + _CHECKSUM.pack(checksum_of(head))).ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes | memoryview) -> RecordHeader | None:
    """The header that the bytes begin with; None if it is damaged, or none.

    Nor is it one if computing the block took no such time: an index could not order it.
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
    """The payload of the record that the bytes begin with; None unless it is this block, whole."""
    header = read_header(data)
    if header is None or header.name != name:
        return None
    payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
    if len(payload) != header.length or checksum_of(payload) != header.checksum:
        return None
    return payload
