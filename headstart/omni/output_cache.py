"""What stages handed on, kept block by block, so that a hit skips a prefix in the stage and loses
nothing of it for the next one.

An entry is (block identity, stage, output) -> the rows of one block, in host memory, in the
dtype and the trailing shape that the stage gave. It is made when a block's rows are written, it is
never written again, and the one used longest ago goes when the bytes run out. So

    KV evicted, rows kept      the rows stay until their own turn; they are of use again as soon
                               as somebody computes the block's K/V anew
    rows evicted, KV kept      the block is no hit for a stage that must hand its rows on
    a reader that comes late   holds the tensors themselves: nothing that happens to the store,
                               or to the KV block's slots, changes them

A block is known by its stage, its namespace, and every key from the root on, compared by content
as in the KV cache: two blocks with equal names are equal prefixes. Nothing here knows where the
KV cache keeps a block, so rows outlive the recycling of block ids, and a stage may have as many
KV groups as it likes.

Source: "Automatic Prefix Caching in Omni Models" (vLLM-Omni). The reference mirrors KV slots in
one tensor `[num_blocks, block_size, D]` a key; docs/omni.md says what this does better.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.cache import BlockKey, Namespace
from headstart.errors import ConfigError

__all__ = ["ENTRY_BYTES", "BlockPath", "OutputCache", "OutputCacheStats"]

ENTRY_BYTES = 1024
"""What an entry costs beside its rows: its node, two tensor headers and its place in the order."""


class BlockPath(NamedTuple):
    """A prefix of one stage: `keys` of its blocks from position 0, as `TokenSequence` cuts them."""

    stage: str
    namespace: Namespace
    keys: Sequence[BlockKey]


class OutputCacheStats(NamedTuple):
    """What the store holds and what became of what it was given, in entries and bytes."""

    entries: int
    bytes: int
    written: int
    evicted: int
    refused: int


class _Node:
    """One block identity. `needed`: the outputs without which the block is no hit."""

    __slots__ = ("children", "key", "needed", "parent", "rows")

    def __init__(self, parent: "_Node | None", key: object) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[object, _Node] = {}
        self.rows: dict[str, Tensor] = {}
        self.needed: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        return bool(self.rows) and self.needed <= self.rows.keys()


class OutputCache:
    """Rows of whole blocks by (block identity, stage, output), within `max_bytes`.

    Not thread-safe. Raises ConfigError for a bound below 0; with 0 it keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 0")
        self.max_bytes = max_bytes
        self._root = _Node(None, None)
        self._order: OrderedDict[tuple[_Node, str], int] = OrderedDict()  # to bytes; oldest first
        self._bytes = 0
        self._written = self._evicted = self._refused = 0
        self._places: Counter[str] = Counter()
        self._changing = False  # also after a change that was interrupted: it is mended by the next

    @property
    def stats(self) -> OutputCacheStats:
        """What it holds now, and counts since it was made."""
        self._mend()
        return OutputCacheStats(
            len(self._order), self._bytes, self._written, self._evicted, self._refused
        )

    def place(self, stage: str) -> str:
        """A stage's name in the store, which no other stage has: for `BlockPath.stage`.

        Two pipelines may name their stages alike and have other weights. The first gets the name
        as it is.
        """
        self._places[stage] += 1
        count = self._places[stage]
        return stage if count == 1 else f"{stage} ({count})"

    def find(self, path: BlockPath, start: int = 0) -> list[Mapping[str, Tensor]]:
        """The rows of blocks `start`, `start + 1`, ... as far as every needed output is there.

        Changes nothing. The result holds the rows themselves, which nobody ever writes to: it
        stays right whatever becomes of the store. Costs about 0.2 us a block.
        """
        return [dict(node.rows) for node in self._whole(path, start)]

    def count(self, path: BlockPath, start: int = 0) -> int:
        """How many blocks `find` would give."""
        return sum(1 for _ in self._whole(path, start))

    def touch(self, path: BlockPath) -> None:
        """The prefix was of use, or ended: its rows go later now, its last block before its first.

        So a prefix is worn away from its end, as the KV cache's is, and what is left of it still
        begins at position 0.
        """
        on_path = []
        node: _Node | None = self._root.children.get((path.stage, path.namespace))
        for key in path.keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            on_path.append(node)
        self._mend()
        for node in reversed(on_path):
            for name in node.rows:
                self._order.move_to_end((node, name))

    def put(
        self,
        path: BlockPath,
        index: int,
        rows: Mapping[str, Tensor],
        needed: Collection[str] | None = None,
    ) -> None:
        """Keep a copy of what a stage gave for block `index` of the path: by name, `[rows, ...]`.

        The rows are written: a copy that is still on its way from a device is waited for first.
        needed: the outputs that a request must get if it is to skip this block; by default those
        in `rows`. While one of them is missing the block is no hit. An entry that is there stays
        as it is.
        """
        self._mend()
        self._changing = True
        node = self._make(path, index)
        node.needed = frozenset(rows if needed is None else needed)
        for name, tensor in rows.items():
            if name in node.rows:
                self._order.move_to_end((node, name))
                continue
            size = tensor.nbytes + ENTRY_BYTES
            if size > self.max_bytes:
                self._refused += 1
                continue
            while self._bytes + size > self.max_bytes:
                self._evicted += 1
                self._remove(*next(iter(self._order)), keep=node)
            node.rows[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._order[node, name] = size
            self._bytes += size
            self._written += 1
        self._prune(node)
        self._changing = False

    def drop(self, stage: str, name: str) -> None:
        """Forget all rows of one output: it turned out to be something else."""
        self._mend()
        self._changing = True
        for node, entry in [key for key in self._order if key[1] == name]:
            if self._stage_of(node) == stage:
                self._remove(node, entry)
        self._changing = False

    def clear(self) -> None:
        """Forget everything."""
        self._changing = True
        self._root = _Node(None, None)
        self._order.clear()
        self._bytes = 0
        self._changing = False

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._mend()
        assert self._bytes <= self.max_bytes, f"{self._bytes} of {self.max_bytes} bytes"
        assert self._bytes == sum(self._order.values()), "the bytes are counted wrong"
        found = {}
        todo = [self._root]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            useful = node.rows or node.children or node is self._root
            assert useful, "a node is kept for nothing"
            for name, rows in node.rows.items():
                found[node, name] = rows.nbytes + ENTRY_BYTES
                assert rows.untyped_storage().nbytes() == rows.nbytes, "rows hold more than theirs"
        assert found == dict(self._order), "the order is not that of the rows"

    def _mend(self) -> None:
        """Complete a change that was interrupted: forget rows that are not in the order yet.

        Whatever was found meanwhile was right, since a block's rows enter it one whole output at a
        time, and it is no hit until all that are needed are there.
        """
        if not self._changing:
            return
        todo, nodes = [self._root], []
        while todo:
            nodes.append(todo.pop())
            todo += nodes[-1].children.values()
        for node in nodes:
            node.rows = {
                name: rows for name, rows in node.rows.items() if (node, name) in self._order
            }
        here = {(node, name) for node in nodes for name in node.rows}
        self._order = OrderedDict(item for item in self._order.items() if item[0] in here)
        self._bytes = sum(self._order.values())
        for leaf in [node for node in nodes if not node.children]:
            self._prune(leaf)
        self._changing = False

    def _whole(self, path: BlockPath, start: int) -> Iterator[_Node]:
        node: _Node | None = self._root.children.get((path.stage, path.namespace))
        for at, key in enumerate(path.keys):
            node = node.children.get(key) if node is not None else None
            if node is None or (at >= start and not node.is_whole):
                return
            if at >= start:
                yield node

    def _make(self, path: BlockPath, index: int) -> _Node:
        node = self._root
        for key in ((path.stage, path.namespace), *path.keys[: index + 1]):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key)
            node = child
        return node

    def _remove(self, node: _Node, name: str, keep: _Node | None = None) -> None:
        del node.rows[name]
        self._bytes -= self._order.pop((node, name))
        if node is not keep:
            self._prune(node, keep)

    def _prune(self, node: _Node, keep: _Node | None = None) -> None:
        """Cut off nodes that have neither rows nor children."""
        at = node
        while at.parent is not None and at is not keep and not at.rows and not at.children:
            del at.parent.children[at.key]
            at = at.parent

    def _stage_of(self, node: _Node) -> str:
        at = node
        while at.parent is not None and at.parent.parent is not None:
            at = at.parent
        assert isinstance(at.key, tuple)
        return str(at.key[0])
