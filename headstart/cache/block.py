"""Blocks of KV memory, and the nodes of the prefix tree, which identify the content of blocks.

    state    ref_cnt   node  on the free queue   found by lookup
    empty    0         None  yes                 no
    cached   0         set   yes                 yes
    held     1 or more any    no                 once it is full

Source: "Automatic Prefix Caching" (vLLM v1 design), data structure.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headstart.cache.identity import BlockHash, BlockKey, Namespace, cut_salt
from headstart.mypyc_hints import mypyc_attr


class KVCacheBlock:
    """`block_size` slots of KV memory. The pool creates all blocks; `block_id` never changes.

    `prev_free_block` and `next_free_block` are its neighbors on the free queue. A block outside of
    the queue links to itself.
    """

    __slots__ = ("_block_id", "next_free_block", "node", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self._block_id = block_id
        self.ref_cnt = 0
        self.node: PrefixNode | None = None
        self.prev_free_block: KVCacheBlock = self
        self.next_free_block: KVCacheBlock = self

    @property
    def block_id(self) -> int:
        """Index of the block in the pool."""
        return self._block_id

    def __repr__(self) -> str:
        return f"KVCacheBlock({self._block_id}, ref_cnt={self.ref_cnt})"


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixNode:
    """A node of the prefix tree. Its prefix is the prefix of `parent`, followed by one more block.

    `key` is the content of this block. `block` holds the K/V; None after the block was evicted.
    `parent` and `key` never change. `child` is the only child, or a `Branches` with several
    children. Most nodes have one child.
    """

    __slots__ = ("block", "block_hash", "child", "key", "parent")

    parent: "PrefixNode | None"
    key: BlockKey
    block: KVCacheBlock | None
    child: "PrefixNode | None"
    block_hash: BlockHash | None

    def set_fields(self, parent: "PrefixNode | None", key: BlockKey) -> None:
        """Initialize a new node, without a block or a child."""
        self.parent = parent
        self.key = key
        self.block = self.child = self.block_hash = None

    def salt(self) -> str | None:
        """Return the node's salt: the last salt in the keys on its path, or else the root's."""
        node = self
        while node.parent is not None:
            salt = cut_salt(node.key)[0]
            if salt is not None:
                return salt
            node = node.parent
        return node.namespace.salt if isinstance(node, RootNode) else None

    def path(self) -> tuple[Namespace, list[BlockKey]]:
        """Return the namespace, and every key from the root to this node."""
        keys: list[BlockKey] = []
        node = self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        assert isinstance(node, RootNode)
        return node.namespace, keys[::-1]

    def children(self) -> list["PrefixNode"]:
        """Return all children, cached or evicted."""
        child = self.child
        if isinstance(child, Branches):
            return list(child.nodes.values())
        return [] if child is None else [child]


class Branches(PrefixNode):
    """The children of a node that has several children. The key of this object is empty.

    `nodes` has all children by key. `order` has the sorted keys of the children whose K/V are
    written. Bisection finds where a key would be inserted. The child that shares the longest head
    with the key is next to this position. An insertion costs one `memmove` of 8 bytes per child.
    """

    __slots__ = ("nodes", "order")

    def __init__(self, parent: PrefixNode) -> None:
        self.set_fields(parent, BlockKey(b""))
        self.nodes: dict[BlockKey, PrefixNode] = {}
        self.order: list[BlockKey] = []


class RowCopy(NamedTuple):
    """A copy of the first `num_rows` rows from one block to another, made before the step.

    source_window, target_window: the window blocks between which these rows are copied; or -1.
    """

    source_block: int
    target_block: int
    num_rows: int
    source_window: int = -1
    target_window: int = -1


class Checkpoint:
    """A stored state of the recurrent layers after `position` tokens.

    These tokens are the prefix of `node`, followed by the tokens of `key`.

    node: None after the checkpoint was dropped. key: the head of the next block; empty at a block
    border. writer: the request whose step writes the checkpoint; None after this step is committed.
    users: the number of sequences whose next step reads it. used: the clock of the `StatePool` at
    its last use. is_passed: True if a deeper checkpoint on its path is written. should_store: True
    if tiers should store it. is_saved: True if a tier has it or will save it. entry: the number of
    its newest entry in the eviction queue; older entries are skipped.
    """

    def __init__(self, node: PrefixNode, key: BlockKey, position: int, writer: str) -> None:
        self.node: PrefixNode | None = node
        self.key = key
        self.position = position
        self.slot = -1
        self.writer: str | None = writer
        self.users = 0
        self.used = 0
        self.is_passed = False
        self.should_store = True
        self.is_saved = False
        self.entry = 0

    def __repr__(self) -> str:
        return f"Checkpoint(position={self.position}, slot={self.slot}, writer={self.writer!r})"


def block_ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Return the ids of blocks. Reading the field is faster than the property."""
    return [block._block_id for block in blocks]


def count_free(blocks: Iterable[KVCacheBlock]) -> int:
    """Return the number of these blocks that no sequence holds."""
    return [block.ref_cnt for block in blocks].count(0)


def make_node(
    parent: PrefixNode | None, key: BlockKey, kind: type[PrefixNode] = PrefixNode
) -> PrefixNode:
    """Return a new node of this class, without a block or a child."""
    node = kind()
    node.set_fields(parent, key)
    return node


class PartialNode(PrefixNode):
    """The node of a partial block: the last block of a finished request, if it is not full."""

    __slots__ = ()


class RootNode(PrefixNode):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        self.set_fields(None, BlockKey(b""))
        self.namespace = namespace
