"""Prefix identity, and its encoding as bytes.

The identity of a prefix is the sequence of its blocks' keys. A `BlockKey` has the block's tokens in
order, four bytes each. For each image or audio item in the block, the key has a frame in front of
the item's first placeholder in the block. Keys are content, not digests. A frame starts with a
marker that is not a token id, and contains the length of its digest. So different contents have
different keys:

    tokens 1 3 <p> <p>, an item of 41 placeholders at position 2:
    01000000 03000000 | ffffffff offset=0 length=41 len(digest) digest | <p> <p>

Adapter and salt apply to every block of a prompt. They are not part of the keys, but identify the
root of the tree (`Namespace`).

Blocks that are entirely within a public prefix are below the root of the salt `PUBLIC`. No request
has this salt. The key of the first block after them begins with a frame of the request's salt. The
frame's offset and length are 0; the length of an item is never 0.

    the salt "tenant 7", then the tokens 1 3:
    ffffffff 0 0 len(salt) salt | 01000000 03000000

A `BlockHash` is the portable identity of a whole prefix: SHA-256 over the parent's hash and the
key. It is the same in every process and on every machine. No lookup inside a process uses it.

Source: "Automatic Prefix Caching" (vLLM v1 design), block hash components.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any, NamedTuple, NewType, SupportsIndex, cast

from headstart.errors import CacheError
from headstart.mypyc_hints import mypyc_attr

BlockKey = NewType("BlockKey", bytes)
BlockHash = NewType("BlockHash", bytes)
Digest = Callable[[bytes], bytes]

PUBLIC = ""  # the salt of public blocks; a request's salt is never empty
MAX_TOKEN_ID = 2**31 - 1
TOKEN_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"
_MARKER = b"\xff\xff\xff\xff"
_FRAME_HEAD = struct.Struct("<4sIII")
# `Any`, so that mypyc uses Python integers. Its native integers abort the process if memory runs
# out.
_to_integer: Any = int.from_bytes
# `Any`, so that a digest of a wrong type raises CacheError. mypyc would raise TypeError.
_get_digest: Any = attrgetter("digest")
_SALT_HEAD = _FRAME_HEAD.pack(_MARKER, 0, 0, 0)[:12]  # an item has a length of at least 1


@mypyc_attr(native_class=False)  # a native class could be neither copied nor pickled
@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image or audio item of a prompt, and the position of its placeholders.

    `digest` identifies the content and everything that affects its embedding. `offset` is the
    position of its first placeholder in the prompt, `length` the number of placeholders.
    """

    digest: bytes
    offset: int
    length: int

    def __post_init__(self) -> None:
        digest = _get_digest(self)
        if not isinstance(digest, bytes) or not digest:
            raise CacheError(
                f"the digest of a multimodal item is {digest!r}; allowed: at least one byte"
            )
        if self.offset < 0 or self.length < 1:
            raise CacheError(
                f"a multimodal item has offset {self.offset} and length {self.length}; allowed: "
                "an offset of at least 0 and a length of at least 1"
            )


class Namespace(NamedTuple):
    """Adapter and salt of a prompt. Prompts of different namespaces share no block."""

    adapter: str | None
    salt: str | None


class PublicBlocks(dict[BlockKey, "PublicBlocks"]):
    """The tree of public blocks, which all tenants share: a block's key maps to its children.

    >>> public = PublicBlocks()
    >>> public.publish(range(40), block_size=16)
    2
    """

    def publish(self, token_ids: Sequence[int], block_size: int) -> int:
        """Add the full blocks of a public prefix; return the number of blocks.

        Raises CacheError for an invalid token.
        """
        count = len(token_ids) // block_size
        following = self
        if count:
            for key in slice_keys(encode_tokens(token_ids[: count * block_size]), block_size):
                following = following.setdefault(key, PublicBlocks())
        return count


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest, 32 bytes."""
    return hashlib.sha256(data).digest()


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the tokens in four bytes each, little-endian. Raises CacheError for an invalid token.

    Costs one pass over the tokens, in C.
    """
    values = array("I")
    try:  # faster than `array("I", token_ids)`
        values.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    except (TypeError, OverflowError):
        values.fromlist(list(map(check_token, token_ids)))
    if _BIG_ENDIAN:
        values.byteswap()
    data = values.tobytes()
    if not data[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():  # a top bit is set
        list(map(check_token, token_ids))
    return data


def check_token(token_id: SupportsIndex) -> int:
    """Return the token id as a Python int. Raises CacheError for an invalid token."""
    try:
        value = index(token_id)
    except TypeError:
        value = -1
    if not 0 <= value <= MAX_TOKEN_ID:
        raise CacheError(f"token id {token_id!r} is not an integer from 0 to {MAX_TOKEN_ID}")
    return value


def cut_keys(
    data: bytes, span: range, block_size: int, items: Sequence[MultiModalItem]
) -> list[BlockKey]:
    """Return the keys of the blocks in `span`, a range of tokens that starts at a block border.

    `data` has the encoded tokens of the span. The last block may be partial. `items` must be in
    order and must not overlap.
    """
    keys = slice_keys(data, block_size)
    for item in items:
        _frame_item(keys, item, span, block_size)
    return keys


def slice_keys(data: bytes, block_size: int) -> list[BlockKey]:
    """Return the keys of encoded tokens without items; the last block may be partial.

    Uses `struct`, which is faster than slicing.
    """
    step = block_size * TOKEN_BYTES
    if len(data) <= step:
        return cast("list[BlockKey]", [data])
    count, partial = divmod(len(data), step)
    widths = f"{step}s" * count + f"{partial}s" * (partial > 0)
    return cast("list[BlockKey]", list(struct.unpack(widths, data)))


def _frame_item(keys: list[BlockKey], item: MultiModalItem, span: range, block_size: int) -> None:
    """Put a frame of the item into each key that the item overlaps.

    Call this for the items in order. The position in a key is counted from the key's end, because
    the tokens before the position may have frames already.
    """
    first = max(item.offset, span.start)
    last = min(item.offset + item.length, span.stop)
    for position in [first, *range((first // block_size + 1) * block_size, last, block_size)]:
        if position >= last:
            break
        block = (position - span.start) // block_size
        block_end = min(span.start + (block + 1) * block_size, span.stop)
        key = keys[block]
        cut = len(key) - (block_end - position) * TOKEN_BYTES
        head = _FRAME_HEAD.pack(_MARKER, position - item.offset, item.length, len(item.digest))
        keys[block] = BlockKey(key[:cut] + head + item.digest + key[cut:])


def add_salt(key: BlockKey, salt: str) -> BlockKey:
    """Return the key with a frame of the salt in front, for the first block after public blocks."""
    data = salt.encode()
    return BlockKey(_SALT_HEAD + struct.pack("<I", len(data)) + data + key)


def has_salt(key: BlockKey) -> bool:
    """Return True if a key begins with a salt."""
    return key.startswith(_SALT_HEAD)


def cut_salt(key: BlockKey) -> tuple[str | None, BlockKey]:
    """Return the salt at the beginning of a key, if any, and the key without it."""
    if not has_salt(key):
        return None, key
    end = _FRAME_HEAD.size + _FRAME_HEAD.unpack_from(key)[3]
    return key[_FRAME_HEAD.size : end].decode(), BlockKey(key[end:])


def count_tokens(key: bytes) -> int:
    """Return the number of whole tokens in a key. The key may end within a token or a frame."""
    tokens = start = 0
    while True:
        marker = key.find(_MARKER, start)
        while marker >= 0 and (marker - start) % TOKEN_BYTES:
            marker = key.find(_MARKER, marker + 1)
        if marker < 0:
            return tokens + (len(key) - start) // TOKEN_BYTES
        tokens += (marker - start) // TOKEN_BYTES
        if len(key) < marker + _FRAME_HEAD.size:
            return tokens
        start = marker + _FRAME_HEAD.size + _FRAME_HEAD.unpack_from(key, marker)[3]
        if len(key) < start:
            return tokens


def read_tokens(key: BlockKey) -> list[int]:
    """Return the token ids of a key, without its items."""
    tokens: list[int] = []
    start = 0
    while start < len(key):
        if key.startswith(_MARKER, start):
            start += _FRAME_HEAD.size + _FRAME_HEAD.unpack_from(key, start)[3]
        else:
            tokens.append(int.from_bytes(key[start : start + TOKEN_BYTES], "little"))
            start += TOKEN_BYTES
    return tokens


def common_tokens(first: BlockKey, second: BlockKey) -> int:
    """Return the number of tokens in the common head of two keys."""
    return count_tokens(first[: _common_bytes(first, second)])


def _common_bytes(first: bytes, second: bytes) -> int:
    """Return the number of equal bytes at the head of two keys."""
    shorter = min(len(first), len(second))
    difference = _to_integer(first[:shorter], "little") ^ _to_integer(second[:shorter], "little")
    if not difference:
        return shorter
    lowest: int = (difference & -difference).bit_length()
    return (lowest - 1) // 8


def differs_in_item(first: BlockKey, second: BlockKey) -> bool:
    """Return True if the first difference of two keys is an image or audio item, not a token."""
    tokens = common_tokens(first, second)
    return _frame_at(first, tokens) != _frame_at(second, tokens)


def _frame_at(key: BlockKey, token: int) -> bytes:
    """Return the frames in front of the key's token with this index."""
    start = index = 0
    frames = b""
    while start < len(key) and index <= token:
        if key.startswith(_MARKER, start):
            end = start + _FRAME_HEAD.size + _FRAME_HEAD.unpack_from(key, start)[3]
            if index == token:
                frames += key[start:end]
            start = end
        else:
            index += 1
            start += TOKEN_BYTES
    return frames


def root_hash(
    namespace: Namespace, block_size: int, model: str, digest: Digest = sha256
) -> BlockHash:
    """Return the portable hash of the empty prefix of a model, adapter, salt and block size."""
    parts = [b"headstart/1", struct.pack("<I", block_size)]
    for field in (model, namespace.adapter, namespace.salt):
        data = b"" if field is None else field.encode()
        parts.append(struct.pack("<?I", field is not None, len(data)) + data)
    return BlockHash(digest(b"".join(parts)))


def chain_hashes(
    parent: BlockHash, keys: Sequence[BlockKey], digest: Digest = sha256
) -> list[BlockHash]:
    """Return one portable hash for each key: the hash of the prefix that ends with this key.

    parent: the hash of the prefix before the first key.
    """
    frame = struct.pack("<I", len(parent))
    prefix: bytes = parent
    return cast("list[BlockHash]", [prefix := digest(frame + prefix + key) for key in keys])
