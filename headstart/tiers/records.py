"""A block as a record of bytes: a header that names it, and its payload, each with a checksum.

    magic 8 | depth 4 | seconds 4 | length 8 | name 32 | parent 32 | payload's CRC | header's CRC

CRC-32 finds every flipped bit and every cut in blocks that were damaged by accident. It is no
signature: who can write to a store can make it say anything.
"""

import struct
import zlib
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.tiers.store import StoredBlock

__all__ = ["HEADER_BYTES", "RecordHeader", "make_header", "payload_of", "read_header"]

HEADER_BYTES = 128
_MAGIC = b"hsblock1"
_HEAD = struct.Struct("<8sIfQ32s32sI")
_CRC = struct.Struct("<I")


class RecordHeader(NamedTuple):
    """What a record's header says."""

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
        zlib.crc32(block.payload),
    )
    return (head + _CRC.pack(zlib.crc32(head))).ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes | memoryview) -> RecordHeader | None:
    """The header that the bytes begin with; None if it is damaged, or none."""
    if len(data) < HEADER_BYTES:
        return None
    head = bytes(data[: _HEAD.size])
    if zlib.crc32(head) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    magic, depth, seconds, length, name, parent, checksum = _HEAD.unpack(head)
    if magic != _MAGIC:
        return None
    return RecordHeader(BlockHash(name), BlockHash(parent), depth, seconds, length, checksum)


def payload_of(data: memoryview, name: BlockHash) -> memoryview | None:
    """The payload of the record that the bytes begin with; None unless it is this block, whole."""
    header = read_header(data)
    if header is None or header.name != name:
        return None
    payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
    if len(payload) != header.length or zlib.crc32(payload) != header.checksum:
        return None
    return payload
