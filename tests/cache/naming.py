"""A second, plain implementation of portable block names, from the documented layout."""

import hashlib
import struct
from collections.abc import Callable, Sequence

from headstart.cache import TokenSequence


def digest_of_one_bit(data: bytes) -> bytes:
    """Return a digest under which half of all prefixes collide with each other."""
    return bytes([hashlib.sha256(data).digest()[0] & 1])


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def frame(text: str | None) -> bytes:
    """Encode a string: a byte that is 0 for None, the length in four bytes, the string."""
    data = (text or "").encode()
    return struct.pack("<?I", text is not None, len(data)) + data


def count_public(sequence: TokenSequence, public: Sequence[Sequence[int]], block_size: int) -> int:
    """Count the blocks of a salted sequence that are entirely in a public prefix."""
    if sequence.namespace[1] is None:
        return 0
    count = 0
    for prefix in public:
        for end in range(block_size, min(len(prefix), len(sequence.token_ids)) + 1, block_size):
            has_item = any(item.offset < end for item in sequence.items)
            if list(prefix[:end]) == sequence.token_ids[:end] and not has_item:
                count = max(count, end // block_size)
    return count


def block_key(sequence: TokenSequence, start: int, stop: int) -> bytes:
    """Encode tokens in four bytes, with an item's frame before its first placeholder."""
    parts = []
    for position in range(start, stop):
        for item in sequence.items:
            inside = item.offset <= position < item.offset + item.length
            if inside and position == max(start, item.offset):
                head = struct.pack("<III", position - item.offset, item.length, len(item.digest))
                parts.append(b"\xff\xff\xff\xff" + head + item.digest)
        parts.append(struct.pack("<I", sequence.token_ids[position]))
    return b"".join(parts)


def block_names(
    sequence: TokenSequence,
    block_size: int,
    model: str = "",
    digest: Callable[[bytes], bytes] = sha256,
    public: Sequence[Sequence[int]] = (),
) -> list[bytes]:
    """Return the names of all full blocks of the sequence, in order."""
    adapter, salt = sequence.namespace
    num_public = count_public(sequence, public, block_size)
    head = b"headstart/1" + struct.pack("<I", block_size)
    root = "" if num_public else salt
    name = digest(head + frame(model) + frame(adapter) + frame(root))
    names = []
    for end in range(block_size, len(sequence.token_ids) + 1, block_size):
        key = block_key(sequence, end - block_size, end)
        if salt is not None and 0 < num_public == end // block_size - 1:
            key = b"\xff" * 4 + struct.pack("<III", 0, 0, len(salt.encode())) + salt.encode() + key
        name = digest(struct.pack("<I", len(name)) + name + key)
        names.append(name)
    return names
