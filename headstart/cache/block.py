"""Blocks of KV memory and the prefix identities that they hold.

    state    ref_cnt   node  on the free queue   found by lookup
    empty    0         None  yes                 no
    cached   0         set   yes                 yes
    held     1 or more either no                 once it is full

Source: "Automatic Prefix Caching" (vLLM v1 design), data structure.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headstart.cache.identity import BlockHash, BlockKey, Namespace, cut_salt
from headstart.mypyc_hints import mypyc_attr


class KVCacheBlock:
    """`block_size` slots of KV memory, created with the pool. `block_id` never changes."""

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
    """One prefix identity: its parent's prefix and one more block.

    `block` holds the K/V of that block; None once it is evicted. `parent` and `key` never change.
    `child` is the only child, or a `Branches` with several; most nodes have one child.
    """

    __slots__ = ("block", "block_hash", "child", "key", "parent")

    parent: "PrefixNode | None"
    key: BlockKey
    block: KVCacheBlock | None
    child: "PrefixNode | None"
    block_hash: BlockHash | None

    def place(self, parent: "PrefixNode | None", key: BlockKey) -> None:
        """Set every field of a new node, without a block or a child."""
        self.parent = parent
        self.key = key
        self.block = self.child = self.block_hash = None

    def salt(self) -> str | None:
        """Return the owner's salt: the last salt in the keys of the node's path, or the root's."""
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
    """The children of a node that has several children. Its own key is empty.

    `nodes` has all children by key. `order` has the sorted keys of the children whose K/V are
    written. In this order, the child that shares the longest head with a key is next to the
    position where the key would be inserted. An insertion costs one `memmove` of 8 bytes per child.
    """

    __slots__ = ("nodes", "order")

    def __init__(self, parent: PrefixNode) -> None:
        self.place(parent, BlockKey(b""))
        self.nodes: dict[BlockKey, PrefixNode] = {}
        self.order: list[BlockKey] = []


class RowCopy(NamedTuple):
    """The first `num_rows` slots of a block, to copy to another block before the step.

    source_window and target_window: the window blocks of these blocks; -1 without sliding windows.
    """

    source_block: int
    target_block: int
    num_rows: int
    source_window: int = -1
    target_window: int = -1


class Checkpoint:
    """The state after `position` tokens: the prefix of `node`, then the tokens of `key`.

    node: None once it is dropped. key: the head of the next block, empty at a block border. writer:
    the request whose step writes it; None once that step is committed. users: the number of
    sequences whose next step reads it. used: the pool's clock at its last use. is_passed: a later
    checkpoint on its path has been written. is_lasting: tiers are to store it. is_saved: a tier has
    it, or was offered it. entry: the number of its entry in the queue.
    """

    __slots__ = (
        "entry",
        "is_lasting",
        "is_passed",
        "is_saved",
        "key",
        "node",
        "position",
        "slot",
        "used",
        "users",
        "writer",
    )

    def __init__(self, node: PrefixNode, key: BlockKey, position: int, writer: str) -> None:
        self.node: PrefixNode | None = node
        self.key = key
        self.position = position
        self.slot = -1
        self.writer: str | None = writer
        self.users = 0
        self.used = 0
        self.is_passed = False
        self.is_lasting = True
        self.is_saved = False
        self.entry = 0

    def __repr__(self) -> str:
        return f"Checkpoint(position={self.position}, slot={self.slot}, writer={self.writer!r})"


def block_ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Return the block ids; reads the field, which is faster than the property."""
    return [block._block_id for block in blocks]


def count_free(blocks: Iterable[KVCacheBlock]) -> int:
    """Return the number of these blocks that no sequence holds."""
    return [block.ref_cnt for block in blocks].count(0)


def make_node(
    parent: PrefixNode | None, key: BlockKey, kind: type[PrefixNode] = PrefixNode
) -> PrefixNode:
    """Return a new node of this class, without a block or a child."""
    node = kind()
    node.place(parent, key)
    return node


class PartialNode(PrefixNode):
    """A partly filled block that a finished request left."""

    __slots__ = ()


class RootNode(PrefixNode):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        self.place(None, BlockKey(b""))
        self.namespace = namespace
