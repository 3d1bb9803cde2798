"""Prefix identities and the blocks that hold them.

A `PrefixNode` stands for one prefix identity: it is its parent's prefix and one more block.
Two prompts that begin alike walk the same nodes, and a step of the walk compares content, so a
hit is exact by construction; no digest is trusted, and none is computed. Most nodes have one
child, which hangs directly on the node: no dictionary, no hash, one `memcmp` a block.

A node whose block was evicted is remembered for a while, so that a miss can be told from an
eviction (the last `remember` of them). Then it is cut off, unless a descendant is cached or
remembered, whose identity includes it: it outlives its time, and goes with that descendant.

A node may also stand for less than a block: a tail, the rows that a finished request left in
its last block. A tail has no children and no name; its rows can only be copied.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headstart.cache.identity import BlockHash, BlockKey, Namespace

if TYPE_CHECKING:
    from headstart.cache.block import KVCacheBlock


class Branches:
    """The children of a node that has several: by key, and in order those with a block.

    The order finds the child with the longest common head: it is beside the place where the
    key would stand. Keeping it costs one `memmove` of 8 bytes a child.
    """

    __slots__ = ("nodes", "order")

    def __init__(self) -> None:
        self.nodes: dict[BlockKey, PrefixNode] = {}
        self.order: list[BlockKey] = []


class PrefixNode:
    """One prefix identity; `block` holds its K/V, or None.

    `child` is the only child, `branches` the children when there have been several.
    """

    __slots__ = ("block", "block_hash", "branches", "child", "key", "parent")

    def __init__(self, parent: "PrefixNode | None", key: BlockKey) -> None:
        self.parent = parent
        self.key = key
        self.block: KVCacheBlock | None = None
        self.child: PrefixNode | None = None
        self.branches: Branches | None = None
        self.block_hash: BlockHash | None = None

    def children(self) -> list["PrefixNode"]:
        """All children, with a block or without."""
        if self.branches is not None:
            return list(self.branches.nodes.values())
        return [] if self.child is None else [self.child]


class TailNode(PrefixNode):
    """Less than a block: rows that a finished request left behind."""

    __slots__ = ()


class RootNode(PrefixNode):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, BlockKey(b""))
        self.namespace = namespace


class PrefixIndex:
    """All prefix identities that are cached, or were until lately."""

    def __init__(self, remember: int) -> None:
        self._roots: dict[str | None, dict[str | None, RootNode]] = {}  # by salt, by adapter
        self._evicted: deque[PrefixNode] = deque()
        self._outlived: set[PrefixNode] = set()  # forgotten, but for a descendant
        self._remember = remember

    def root(self, namespace: Namespace) -> RootNode | None:
        """The namespace's root, if anything of it is known."""
        roots = self._roots.get(namespace.salt)
        return roots.get(namespace.adapter) if roots is not None else None

    def make_root(self, namespace: Namespace) -> RootNode:
        """The namespace's root, made when there is none."""
        roots = self._roots.setdefault(namespace.salt, {})
        root = roots.get(namespace.adapter)
        if root is None:
            root = roots[namespace.adapter] = RootNode(namespace)
        return root

    def clear(self) -> None:
        """Know nothing any more."""
        self._roots.clear()
        self._evicted.clear()
        self._outlived.clear()

    def roots(self) -> list[RootNode]:
        """All namespaces' roots."""
        return [root for roots in self._roots.values() for root in roots.values()]

    def roots_of_salt(self, salt: str | None) -> list[RootNode]:
        """The roots of all adapters under one salt."""
        return list(self._roots.get(salt, {}).values())

    def check(self, nodes: set[PrefixNode]) -> None:
        """Raise AssertionError if one of these, all nodes there are, is kept for nothing."""
        remembered = {node for node in self._evicted if node.block is None}
        assert len(self._evicted) <= self._remember, "more is remembered than should be"
        assert TailNode not in map(type, self._evicted), "a tail is remembered"
        for node in nodes - remembered:
            leaf = node.child is None and node.branches is None
            assert node.block is not None or not leaf, "a node is kept for nothing"
            if node.parent is not None:
                known = (node.block is None) == (node in self._outlived)
                assert known, "an evicted node is neither remembered nor outlived"
        assert self._outlived <= nodes, "a node that was cut off is kept"

    def walk(
        self, root: PrefixNode, keys: list[BlockKey]
    ) -> tuple[PrefixNode, list["KVCacheBlock"]]:
        """The deepest cached node along the keys, and the blocks on the way. Changes nothing."""
        node = root
        blocks = []
        for key in keys:
            child = node.child
            if child is None:
                child = node.branches.nodes.get(key) if node.branches is not None else None
                if child is None:
                    break
            elif child.key != key:
                break
            block = child.block
            if block is None:
                break
            blocks.append(block)
            node = child
        return node, blocks

    def find(self, parent: PrefixNode, key: BlockKey) -> PrefixNode | None:
        """The child of this key, with a block or without."""
        if parent.branches is not None:
            return parent.branches.nodes.get(key)
        child = parent.child
        return child if child is not None and child.key == key else None

    def child(
        self, parent: PrefixNode, key: BlockKey, kind: type[PrefixNode] = PrefixNode
    ) -> PrefixNode:
        """The child of this key, made when there is none. The caller gives it a block."""
        only = parent.child
        if only is None and parent.branches is None:
            parent.child = node = kind(parent, key)
            return node
        if only is not None and only.key == key:
            return only
        branches = parent.branches or self._branch(parent)
        found = branches.nodes.get(key)
        if found is None:
            found = branches.nodes[key] = kind(parent, key)
        return found

    def grow(
        self, parent: PrefixNode, keys: Sequence[BlockKey], blocks: Sequence["KVCacheBlock"]
    ) -> PrefixNode:
        """A chain of new nodes, one a key and block, under a node without children; its end.

        What `child` and `attach` do, for the case that all of a long prompt's blocks are.
        """
        node = parent
        for key, block in zip(keys, blocks, strict=True):
            node.child = child = PrefixNode(node, key)
            child.block = block
            block.node = node = child
        return node

    def outgrown_tail(self, node: PrefixNode) -> PrefixNode | None:
        """A sibling that is a tail and the head of this node's content: it is of no more use."""
        assert node.parent is not None
        branches = node.parent.branches
        if branches is None:
            return None
        before = bisect_left(branches.order, node.key) - 1
        if before >= 0 and node.key.startswith(branches.order[before]):
            return branches.nodes[branches.order[before]]
        return None

    def _branch(self, parent: PrefixNode) -> Branches:
        branches = parent.branches = Branches()
        only, parent.child = parent.child, None
        if only is not None:
            branches.nodes[only.key] = only
            if only.block is not None:
                branches.order.append(only.key)
        return branches

    def attach(self, node: PrefixNode, block: "KVCacheBlock") -> None:
        """The block holds the node's content from now on."""
        node.block = block
        block.node = node
        self._outlived.discard(node)
        parent = node.parent
        if parent is not None and parent.branches is not None:
            insort(parent.branches.order, node.key)

    def detach(self, blocks: Iterable["KVCacheBlock"]) -> None:
        """The blocks hold their identity no longer; full blocks' are remembered for a while."""
        evicted = self._evicted
        for block in blocks:
            node = block.node
            assert node is not None
            assert node.parent is not None
            node.block = block.node = None
            branches = node.parent.branches
            if branches is not None:
                del branches.order[bisect_left(branches.order, node.key)]
            if node.__class__ is TailNode:
                self._prune(node)
                continue
            evicted.append(node)
        for _ in range(len(evicted) - self._remember):
            node = evicted.popleft()
            if node.block is not None:
                continue
            if node.child is None and node.branches is None:
                self._prune(node)
            else:
                self._outlived.add(node)

    def _prune(self, node: PrefixNode) -> None:
        """Cut off a node without block or child, and the ancestors that were kept for it."""
        while True:
            parent = node.parent
            if parent is None:
                assert isinstance(node, RootNode)
                self._drop_root(node.namespace)
                return
            if parent.child is node:
                parent.child = None
            elif parent.branches is not None and parent.branches.nodes.get(node.key) is node:
                del parent.branches.nodes[node.key]
                if not parent.branches.nodes:
                    parent.branches = None
            else:  # cut off before, and remembered twice
                return
            if parent.child is not None or parent.branches is not None:
                return
            if parent.parent is not None:
                if not self._outlived or parent not in self._outlived:
                    return
                self._outlived.remove(parent)
            node = parent

    def _drop_root(self, namespace: Namespace) -> None:
        roots = self._roots[namespace.salt]
        del roots[namespace.adapter]
        if not roots:
            del self._roots[namespace.salt]
