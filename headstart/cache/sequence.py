"""Sequences: the tokens of a request, their identity, and the blocks that hold their K/V."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, SupportsIndex

from headstart.cache.block import KVCacheBlock, PrefixNode
from headstart.cache.identity import (
    MAX_TOKEN_ID,
    PUBLIC,
    TOKEN_BYTES,
    BlockKey,
    MultiModalItem,
    Namespace,
    PublicBlocks,
    add_salt,
    check_token,
    cut_keys,
    encode_tokens,
    slice_keys,
)
from headstart.errors import CacheError
from headstart.mypyc_hints import mypyc_attr
from headstart.validation import Name, check_name


class Mark(NamedTuple):
    """A mark that retains the full blocks of the first `num_tokens` tokens for `seconds`.

    The time starts when the sequence releases the blocks.
    """

    num_tokens: int
    seconds: float


class SequenceWindow:
    """The window blocks of a running sequence; see `headstart.cache.windows`.

    ids: the window block of each block; 0 before block `first`, where the window begins. shared:
    indices of blocks whose window block was cached, so the sequence does not write to it. A window
    that ends at a position in `planned`, or at a multiple of `interval`, is evicted last.
    """

    def __init__(self, first: int, planned: Sequence[int], interval: int) -> None:
        self.ids = [0] * first
        self.first = first
        self.shared: set[int] = set()
        self.planned = planned
        self.interval = interval


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenSequence:
    """The tokens of one request, prompt and output, and its block table.

    `token_ids` grows only by `append`. `num_computed_tokens` is the number of tokens whose K/V are
    in the blocks at the end of the step under way. A block's key is created when its last token is
    known. Before the sequence is admitted, a caller may set these fields; all others belong to the
    manager:

    marks: blocks to retain.
    forks: positions where later prompts may branch off.
    is_stored: if False, nothing that the sequence computes is cached.
    is_counted: if False, statistics leave the sequence out.
    is_loaded: if True, a tier supplies its K/V and its state, so it needs no checkpoint.

    `namespace` has the adapter and the salt. `root` is the namespace of the first block. It differs
    from `namespace` if this block is public. `public` has the public blocks; None without a salt.

    Raises CacheError for no tokens, a token id out of range, an adapter or salt that is empty or
    cannot be encoded in UTF-8, or items that overlap or extend beyond the tokens.
    """

    __slots__ = (
        "_following",
        "_prompt",
        "block_ids",
        "block_size",
        "blocks",
        "capacity",
        "forks",
        "holder",
        "in_progress",
        "is_counted",
        "is_loaded",
        "is_stored",
        "items",
        "keys",
        "marks",
        "namespace",
        "node",
        "num_computed_tokens",
        "num_indexed",
        "num_public",
        "num_reused",
        "public",
        "request_id",
        "root",
        "step",
        "switched",
        "token_ids",
        "window",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: Iterable[int],
        *,
        adapter: Name = None,
        salt: Name = None,
        items: Sequence[MultiModalItem] = (),
        public: PublicBlocks | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(token_ids)
        check_name("adapter", adapter, CacheError)
        check_name("salt", salt, CacheError)
        self.namespace = self.root = Namespace(adapter, salt)
        self.public = public if salt is not None else None
        self._following = self.public  # public blocks that may follow; None after a private block
        self.num_public = 0  # number of public blocks at the beginning
        self.items = sorted(items, key=_offset)
        for left, right in pairwise(self.items):
            if _end(left) > right.offset:
                raise CacheError(f"items overlap: {left} and {right}")
        if self.items and _end(self.items[-1]) > len(self.token_ids):
            last, count = self.items[-1], len(self.token_ids)
            raise CacheError(f"{last} extends beyond the {count} tokens")
        if not self.token_ids:
            raise CacheError(f"sequence {request_id!r} has no tokens")
        self._prompt = encode_tokens(self.token_ids)
        self.marks: Sequence[Mark] = ()
        self.forks: Sequence[int] = ()
        self.is_stored = self.is_counted = True
        self.is_loaded = False
        self.num_computed_tokens = 0
        self.blocks: list[KVCacheBlock] = []
        self.holder: object = None  # identifies the manager that gave it blocks
        self.block_ids: list[int] = []  # the ids of `blocks`
        self.capacity = 0  # slots in `blocks`, in tokens
        self.block_size = 0  # block size of the keys; 0 before the first `cut`
        self.keys: list[BlockKey] = []  # keys of the full blocks, created by `cut`
        self.num_indexed = 0  # the first `num_indexed` blocks have an identity in the index
        self.node: PrefixNode | None = None  # the node of the last indexed block
        self.num_reused = 0  # the first `num_reused` blocks were hit at admission
        self.switched: set[int] = set()  # indices of blocks that were replaced by cached blocks
        self.in_progress: tuple[PrefixNode | Namespace, BlockKey] | None = None
        self.step = -1  # the last step that gave it slots
        self.window: SequenceWindow | None = None  # for layers with a sliding window

    def append(self, token_id: SupportsIndex) -> None:
        """Add a generated token. Raises CacheError if it is not a token id."""
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            token_id = check_token(token_id)
        self.token_ids.append(token_id)

    def add_item(self, item: MultiModalItem, block_size: int) -> None:
        """Add an item, whose placeholders may be appended later.

        Raises CacheError if it overlaps another item or a block that has a key already.
        """
        end = _end(self.items[-1]) if self.items else 0
        if item.offset < max(end, len(self.keys) * block_size):
            raise CacheError(f"{item} overlaps another item, or a block that has an identity")
        self.items.append(item)

    def cut(self, block_size: int) -> list[BlockKey]:
        """Return the keys of all full blocks so far.

        Raises CacheError if the sequence was cut before into blocks of another size.
        """
        if block_size != self.block_size:
            if self.block_size:
                raise CacheError(
                    f"sequence {self.request_id!r} is cut into blocks of {self.block_size} tokens; "
                    f"it cannot be used with blocks of {block_size}"
                )
            self.block_size = block_size
        keys = self.keys
        full = len(self.token_ids) // block_size
        if len(keys) < full:
            new = self._cut(len(keys) * block_size, full * block_size, block_size)
            keys += new if self._following is None else self._salt_keys(new, self._following)
        return keys

    def _salt_keys(self, keys: list[BlockKey], public: PublicBlocks) -> list[BlockKey]:
        """Return the keys, with the salt added to the first private key; count the public keys.

        public: the public blocks that may come next.
        """
        for i, key in enumerate(keys):
            following = public.get(key)
            if following is None:
                self._following = None
                return [*keys[:i], self._salt_key(key, self.num_public), *keys[i + 1 :]]
            self._following = public = following
            self.num_public += 1
            self.root = Namespace(self.namespace.adapter, PUBLIC)
        return keys

    def _salt_key(self, key: BlockKey, index: int) -> BlockKey:
        """Return the key of a private block, with its salt if it follows a public block."""
        salt = self.namespace.salt
        return add_salt(key, salt) if salt and 0 < index <= self.num_public else key

    def cut_partial(self, stop: int, block_size: int) -> BlockKey:
        """Return the key of the tokens from the last block border before `stop` to `stop`.

        A partial block is never public. So if it is the first block, its root is `namespace`, which
        may differ from `root`.
        """
        index = (stop - 1) // block_size
        return self._salt_key(self._cut(index * block_size, stop, block_size)[0], index)

    def _cut(self, start: int, stop: int, block_size: int) -> list[BlockKey]:
        if stop * TOKEN_BYTES > len(self._prompt):  # the block includes generated tokens
            data = encode_tokens(self.token_ids[start:stop])
        else:
            data = self._prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        if not self.items:
            return slice_keys(data, block_size)
        first = bisect_right(self.items, start, key=_end)
        items = self.items[first : bisect_left(self.items, stop, lo=first, key=_offset)]
        return cut_keys(data, range(start, stop), block_size, items)

    def pop_blocks(self) -> list[KVCacheBlock]:
        """Return the sequence's blocks, and reset the sequence to hold no blocks."""
        blocks, self.blocks, self.block_ids = self.blocks, [], []
        self.capacity = self.num_computed_tokens = self.num_indexed = self.num_reused = 0
        self.node = self.in_progress = self.holder = self.window = None
        self.switched.clear()
        return blocks

    def block_table(self) -> Sequence[int]:
        """Return the sequence's list of block ids in prefix order, not a copy."""
        return self.block_ids

    def slots(self, start: int, stop: int, block_size: int, scratch: int) -> list[int]:
        """Return the slots to which a step writes the rows of tokens `start` to `stop - 1`.

        For rows in a shared block the slot is `scratch`, because the block has these rows already,
        or another sequence writes them in the same step.
        """
        if stop - start == 1:  # a sequence that decodes
            index, offset = divmod(start, block_size)
            if index < self.num_reused or index in self.switched:
                return [scratch]
            return [self.block_ids[index] * block_size + offset]
        slots: list[int] = []
        while start < stop:
            index, offset = divmod(start, block_size)
            count = min(stop - start, block_size - offset)
            if index < self.num_reused or index in self.switched:
                slots += [scratch] * count
            else:
                first = self.block_ids[index] * block_size + offset
                slots += range(first, first + count)
            start += count
        return slots

    def window_table(self) -> Sequence[int]:
        """Return the window block of each block; 0 before the window."""
        return self.window.ids if self.window is not None else []

    def window_slots(self, start: int, stop: int, block_size: int, scratch: int) -> list[int]:
        """Return the slots as `slots` does, for the layers with a sliding window."""
        window = self.window
        assert window is not None
        positions = [divmod(position, block_size) for position in range(start, stop)]
        shared, ids = window.shared, window.ids
        return [scratch if i in shared else ids[i] * block_size + row for i, row in positions]


def check_count(sequence: TokenSequence, num_new_tokens: int, start: int) -> None:
    """Raise CacheError unless the sequence has `num_new_tokens` tokens from `start` on."""
    left = len(sequence.token_ids) - start
    if not 1 <= num_new_tokens <= left:
        raise CacheError(
            f"{num_new_tokens} slots requested for {sequence.request_id!r}, "
            f"which has {left} tokens left"
        )


def _offset(item: MultiModalItem) -> int:
    return item.offset


def _end(item: MultiModalItem) -> int:
    return item.offset + item.length
