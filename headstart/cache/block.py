"""Blocks of KV memory and the prefix identities that they hold.

    state    ref_cnt   node  on the free queue   found by lookup
    empty    0         None  yes                 no
    cached   0         set   yes                 yes
    held     1 or more either no                 once it is full

A block points at the node of its content, and the node at its block, so both types stand here.

Source: "Automatic Prefix Caching" (vLLM v1 design), data structure.
"""

from collections.abc import Iterable, Sequence

from headstart.cache.identity import BlockHash, BlockKey, Namespace, cut_salt
from headstart.mypyc_hints import mypyc_attr


class KVCacheBlock:
    """`block_size` slots of KV memory.

    All blocks are made with the pool and live as long as it does, so that no step pays for
    making them. `block_id` never changes.
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
        """Its place in the pool."""
        return self._block_id

    def __repr__(self) -> str:
        return f"KVCacheBlock({self._block_id}, ref_cnt={self.ref_cnt})"


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixNode:
    """One prefix identity: its parent's prefix and one more block. `block` holds its K/V, or None.

    `parent` and `key` never change. `child` is the only child, or the `Branches` that stand in
    for several: most nodes have one child, which needs no dictionary.
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
        """Whose it is: the salt that entered the chain last, or the root's."""
        node = self
        while node.parent is not None:
            salt = cut_salt(node.key)[0]
            if salt is not None:
                return salt
            node = node.parent
        return node.namespace.salt if isinstance(node, RootNode) else None

    def path(self) -> tuple[Namespace, list[BlockKey]]:
        """The namespace, and every key from the root to this node."""
        keys: list[BlockKey] = []
        node = self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        assert isinstance(node, RootNode)
        return node.namespace, keys[::-1]

    def children(self) -> list["PrefixNode"]:
        """All children, with a block or without."""
        child = self.child
        if isinstance(child, Branches):
            return list(child.nodes.values())
        return [] if child is None else [child]


class Branches(PrefixNode):
    """Stands in for the children of a node that has several; its key is no child's.

    `nodes` has all children by key. `order` has the keys of those whose K/V are written, in
    byte order: the child with the longest common head is beside the place where a key would
    stand. Keeping the order costs one `memmove` of 8 bytes a child.
    """

    __slots__ = ("nodes", "order")

    def __init__(self, parent: PrefixNode) -> None:
        self.place(parent, BlockKey(b""))
        self.nodes: dict[BlockKey, PrefixNode] = {}
        self.order: list[BlockKey] = []


def block_ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """The block ids; reads the field itself, which costs a third of the property."""
    return [block._block_id for block in blocks]


def count_free(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of these blocks nobody holds."""
    return [block.ref_cnt for block in blocks].count(0)


def make_node(
    parent: PrefixNode | None, key: BlockKey, kind: type[PrefixNode] = PrefixNode
) -> PrefixNode:
    """A new node of this kind, without a block or a child."""
    node = kind()
    node.place(parent, key)
    return node


def make_chain(
    parent: PrefixNode, keys: Sequence[BlockKey], blocks: Sequence[KVCacheBlock]
) -> PrefixNode:
    """New nodes, one a key and block, each the only child of the one before; returns the last."""
    node = parent
    for key, block in zip(keys, blocks, strict=True):
        child = PrefixNode()
        child.parent = node
        child.key = key
        child.block = block
        child.child = child.block_hash = None
        node.child = child
        block.node = node = child
    return node


class PartialNode(PrefixNode):
    """Less than a block: rows that a finished request left behind."""

    __slots__ = ()


class RootNode(PrefixNode):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        self.place(None, BlockKey(b""))
        self.namespace = namespace
