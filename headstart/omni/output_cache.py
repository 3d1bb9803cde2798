"""Stage-output store: output rows of stages, block by block.

A stage that skips a cached prefix must still pass the prefix's rows to the next stage. An entry
maps (block identity, stage, output) to the rows of one block in host memory, and is never
overwritten. When the store is full, it evicts the least recently used entry. Entries of the prefix
that is being stored are not evicted; if only these are left, the rest of the prefix is not stored.

    only K/V evicted           the rows stay, and serve hits again once a request has computed the
                               block's K/V again
    only rows evicted          the block is not a hit in a stage that must pass rows on
    rows in use                the caller of `find` holds the tensors, so the rows outlive their
                               eviction from the store and the reuse of the KV block

A block is identified by its stage, its namespace, and the keys of all blocks from the prompt's
start up to this block. Keys are compared by content, as in the KV cache. The store does not use
block ids, so a stage may have any number of KV groups.

Source: "Automatic Prefix Caching in Omni Models" (vLLM-Omni), whose design mirrors KV slots in one
tensor `[num_blocks, block_size, D]` per output. docs/omni.md compares both designs.
"""

import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.cache import BlockKey, Namespace, PrefixNode, PrefixTree
from headstart.engine.image_cache import EncoderKey, ImageLoads
from headstart.errors import ConfigError
from headstart.validation import Number, describe

_BYTES = Number(int, 0)
ENTRY_BYTES = 768
"""Bytes of an entry besides its rows: two tensor headers, and the entry in the eviction order."""
NODE_BYTES = 256
"""Bytes of a block identity besides its key: the node, and its entry in the tree."""


class BlockPath(NamedTuple):
    """A prefix in one stage. keys: the `TokenSequence` keys of its blocks, from position 0."""

    stage: str
    namespace: Namespace
    keys: Sequence[BlockKey]


class OutputCacheStats(NamedTuple):
    """Statistics of an `OutputCache`.

    entries, bytes: its current contents. written, evicted, refused: numbers of entries since the
    store was made. An entry is refused if it is not finite or does not fit.
    """

    entries: int
    bytes: int
    written: int
    evicted: int
    refused: int


class _Node(PrefixNode):
    """One block identity. A node without rows stays while it has children.

    required: the outputs that must be stored to make the block a hit. nbytes: size of the node and
    its rows.
    """

    __slots__ = ("nbytes", "required", "rows")

    def set_fields(self, parent: PrefixNode | None, key: BlockKey) -> None:
        super().set_fields(parent, key)
        self.rows: dict[str, Tensor] = {}
        self.required: frozenset[str] = frozenset()
        self.nbytes = NODE_BYTES + len(key)

    @property
    def is_whole(self) -> bool:
        return bool(self.rows) and self.required <= self.rows.keys()


class OutputCache:
    """Rows of whole blocks by (block identity, stage, output). Not thread-safe.

    max_bytes: size limit; with 0 nothing is stored. Raises ConfigError for a negative limit.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes not in _BYTES:
            raise ConfigError(f"cache_bytes is {describe(max_bytes)}; allowed: {_BYTES}")
        self.max_bytes = max_bytes
        self._tree = PrefixTree()  # below a namespace's root: stages, then blocks
        self._order: OrderedDict[tuple[_Node, str], int] = OrderedDict()  # sizes; oldest first
        self._bytes = 0
        self._written = self._evicted = self._refused = 0
        self._name_counts: Counter[str] = Counter()

    @property
    def stats(self) -> OutputCacheStats:
        """The current contents, and counts since the store was made."""
        return OutputCacheStats(
            len(self._order), self._bytes, self._written, self._evicted, self._refused
        )

    def reserve_name(self, stage: str) -> str:
        """Reserve a unique name for a stage, for `BlockPath.stage`.

        Two pipelines may have stages of the same name with different weights. The first stage gets
        the name unchanged.
        """
        self._name_counts[stage] += 1
        count = self._name_counts[stage]
        return stage if count == 1 else f"{stage} ({count})"

    def find(self, path: BlockPath, start: int = 0) -> list[Mapping[str, Tensor]]:
        """Return the rows of blocks from `start` on; stop where a required output is missing.

        Changes nothing. The rows are never overwritten, so the result stays valid after eviction.
        """
        return [dict(node.rows) for node in self._whole(path, start)]

    def count(self, path: BlockPath, start: int = 0) -> int:
        """Return the number of blocks that `find` would return."""
        return sum(1 for _ in self._whole(path, start))

    def touch(self, path: BlockPath) -> None:
        """Mark a prefix as just used. Its end is evicted before its beginning."""
        for node in reversed(list(self._walk(path))):
            for name in node.rows:
                self._order.move_to_end((node, name))

    def put(
        self,
        path: BlockPath,
        index: int,
        rows: Mapping[str, Tensor],
        required: Collection[str] | None = None,
    ) -> None:
        """Store a copy of a stage's outputs for block `index` of the path.

        rows: by output name, `[rows, ...]` in host memory; copies from a device must have ended.
        required: the outputs that must be stored to make the block a hit; by default the outputs in
        `rows`. An existing entry is not replaced. Rows with NaN or inf are not stored. Storing rows
        never evicts earlier blocks of the path: if no other space is left, the rows are not stored.
        Call `touch` after the last block of a prefix.
        """
        node = self._make(path, index)
        node.required = frozenset(rows if required is None else required)
        for name, tensor in rows.items():
            if name in node.rows:
                self._order.move_to_end((node, name))
                continue
            size = tensor.nbytes + ENTRY_BYTES
            if not bool(torch.isfinite(tensor).all()) or not self._make_space(node, size):
                self._refused += 1
                continue
            node.rows[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._order[node, name] = size
            node.nbytes += size
            self._bytes += size
            self._written += 1
        self._prune(node)

    def drop(self, stage: str, name: str) -> None:
        """Drop all rows of an output that turned out not to be aligned by token.

        Later hits do not require this output.
        """
        for node, entry in [key for key in self._order if key[1] == name]:
            top: PrefixNode = node
            while top.parent is not None and top.parent.parent is not None:
                top = top.parent
            if top.key == stage.encode():
                node.required -= {name}
                self._remove(node, entry)

    def clear(self) -> None:
        """Drop all entries."""
        self._tree = PrefixTree()
        self._order.clear()
        self._bytes = 0

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._bytes <= self.max_bytes, f"{self._bytes} of {self.max_bytes} bytes"
        sizes_of_rows = {}
        for root in self._tree.roots():
            assert root.child is not None, "a root has no children"
        for node in self._nodes():
            assert node.rows or node.child is not None, "a node has neither rows nor children"
            sizes = [self._order[node, name] for name in node.rows]
            assert node.nbytes == NODE_BYTES + len(node.key) + sum(sizes), (
                "a node's bytes are counted wrong"
            )
            for name, rows in node.rows.items():
                sizes_of_rows[node, name] = rows.nbytes + ENTRY_BYTES
                assert rows.untyped_storage().nbytes() == rows.nbytes, (
                    "rows are a view of a larger storage"
                )
        assert sizes_of_rows == dict(self._order), "the eviction order does not match the rows"
        total = sum(node.nbytes for node in self._nodes())
        assert self._bytes == total, "the bytes are counted wrong"

    def _nodes(self) -> list[_Node]:
        nodes: list[PrefixNode] = [*self._tree.roots()]
        for node in nodes:  # the loop appends to the list
            nodes += node.children()
        return [node for node in nodes if isinstance(node, _Node)]

    def _walk(self, path: BlockPath) -> Iterator[_Node]:
        node: PrefixNode | None = self._tree.root(path.namespace)
        for depth, key in enumerate(_keys(path)):
            node = self._tree.find(node, key) if node is not None else None
            if not isinstance(node, _Node):
                return
            if depth:
                yield node

    def _whole(self, path: BlockPath, start: int) -> Iterator[_Node]:
        return takewhile(lambda node: node.is_whole, islice(self._walk(path), start, None))

    def _make(self, path: BlockPath, index: int) -> _Node:
        node: PrefixNode = self._tree.make_root(path.namespace)
        for key in islice(_keys(path), index + 2):
            child = self._tree.find(node, key)
            if child is None:
                child = self._tree.child(node, key, _Node)
                self._bytes += NODE_BYTES + len(key)  # the node's own bytes
            node = child
        assert isinstance(node, _Node)
        return node

    def _make_space(self, node: _Node, size: int) -> bool:
        """Evict the oldest entries until `size` bytes are free; return False if it is impossible.

        The rows of the node and of its ancestors are not evicted.
        """
        if self._bytes + size <= self.max_bytes:
            return True
        protected: set[PrefixNode] = set()
        ancestor: PrefixNode | None = node
        left = self.max_bytes - size
        while isinstance(ancestor, _Node):
            protected.add(ancestor)
            left -= ancestor.nbytes
            ancestor = ancestor.parent
        if left < 0:
            return False
        while self._bytes + size > self.max_bytes:
            oldest = next(entry for entry in self._order if entry[0] not in protected)
            self._evicted += 1
            self._remove(*oldest, keep=node)
        return True

    def _remove(self, node: _Node, name: str, keep: _Node | None = None) -> None:
        del node.rows[name]
        size = self._order.pop((node, name))
        node.nbytes -= size
        self._bytes -= size
        if node is not keep:
            self._prune(node, keep)

    def _prune(self, node: PrefixNode, keep: _Node | None = None) -> None:
        leaf: PrefixNode | None = node
        while leaf is not None and leaf is not keep and leaf.child is None:
            if isinstance(leaf, _Node):
                if leaf.rows:
                    return
                self._bytes -= leaf.nbytes
            leaf = self._tree.cut_off(leaf)


def _keys(path: BlockPath) -> Iterator[BlockKey]:
    """Return the keys below a namespace's root: the stage, then the blocks."""
    return chain([BlockKey(path.stage.encode())], path.keys)


class ContentCache:
    """Tensors by digest, under a separate stage name in an `OutputCache`."""

    def __init__(self, cache: OutputCache, name: str) -> None:
        self._cache, self._name = cache, name
        self._store_name = cache.reserve_name(name)
        self._store: ImageLoads | None = None
        self._model = ""

    def add_store(self, store: ImageLoads, model: str) -> None:
        """From now on, also save tensors in a store that outlives the process.

        model: the fingerprint of the model that computes the tensors.
        """
        self._store, self._model = store, model

    def recall(self, digest: bytes, make: Callable[[], Tensor], salt: str | None = None) -> Tensor:
        """Return the cached tensor of a digest and salt, or call `make` and cache its result.

        The tensor is in host memory. Raises the exceptions of `make`.
        """
        path = BlockPath(self._store_name, Namespace(None, salt), [BlockKey(digest)])
        blocks = self._cache.find(path)
        if blocks:
            self._cache.touch(path)
            return blocks[0]["tensor"]
        key = EncoderKey(salt, content_digest(self._name, self._model, digest.hex()))
        tensor = self._store.load(key) if self._store is not None else None
        if tensor is None:
            start = time.perf_counter()
            tensor = make().cpu()
            if self._store is not None:
                self._store.save(key, tensor, time.perf_counter() - start)
        self._cache.put(path, 0, {"tensor": tensor})
        return tensor


def content_digest(*parts: Any) -> bytes:
    """Return the SHA-256 digest of the content of tensors and JSON values."""
    digest = hashlib.sha256()
    for part in parts:
        data = content_bytes(part) if isinstance(part, Tensor) else json.dumps(part).encode()
        digest.update(bytes([isinstance(part, Tensor)]) + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def content_bytes(tensor: Tensor) -> bytes:
    """Return bytes that are equal for tensors of the same dtype, shape and content."""
    head = json.dumps([str(tensor.dtype), list(tensor.shape)]).encode()
    return len(head).to_bytes(4, "little") + head + raw_bytes(tensor)


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements in order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
