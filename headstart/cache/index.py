"""The prefix index: the tree of prefixes that are cached, or were evicted recently.

A node whose block was evicted stays as a ghost, so that a miss can be explained as an eviction. The
latest `max_ghosts` ghosts stay. An older ghost stays only if a lookup can end there: its parent is
cached or a root. An evicted node also stays while it has descendants. If older ghosts and
these ancestors exceed `OLD_GHOSTS * max_ghosts` nodes, older ghosts are removed, oldest first.

The node of a partial block (the last block of a finished request, if it is not full) has no
children and no hash. Its rows can only be copied.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from headstart.cache.block import (
    Branches,
    KVCacheBlock,
    PartialNode,
    PrefixNode,
    RootNode,
    block_ids,
    count_free,
    make_node,
)
from headstart.cache.identity import BlockKey, Namespace, cut_salt
from headstart.mypyc_hints import mypyc_attr


class PathSegment(NamedTuple):
    """A path of the prefix tree between two forks, with its cached blocks in prefix order.

    A segment also ends where public blocks end. So all its blocks belong to `namespace`.

    parent: the index of the segment before it, or -1. start: the number of blocks before it. keys,
    ids: the keys and ids of its cached blocks. num_held: the number of its blocks that sequences
    hold.
    """

    parent: int
    namespace: Namespace
    start: int
    keys: list[BlockKey]
    ids: list[int]
    num_held: int


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixTree:
    """A tree of nodes for each namespace. A caller that creates a node must also remove it."""

    def __init__(self) -> None:
        self._roots: dict[str | None, dict[str | None, RootNode]] = {}  # by salt, by adapter

    def root(self, namespace: Namespace) -> RootNode | None:
        """Return the namespace's root, if any."""
        roots = self._roots.get(namespace.salt)
        return roots.get(namespace.adapter) if roots is not None else None

    def make_root(self, namespace: Namespace) -> RootNode:
        """Return the namespace's root; create it if there is none."""
        root = self.root(namespace)
        if root is None:
            root = RootNode(namespace)
            roots = self._roots.get(namespace.salt)
            if roots is None:
                self._roots[namespace.salt] = {namespace.adapter: root}
            elif isinstance(roots, OrderedDict):
                roots[namespace.adapter] = root
            else:  # a dict's `reversed` would scan deleted entries
                entries = [*roots.items(), (namespace.adapter, root)]
                self._roots[namespace.salt] = OrderedDict(entries)
        return root

    def roots(self) -> list[RootNode]:
        """Return the roots of all namespaces."""
        return [root for roots in self._roots.values() for root in roots.values()]

    def recent_roots(self, salt: str | None, count: int) -> list[RootNode]:
        """Return at most `count` roots of a salt: the root without adapter, then the latest."""
        roots = self._roots.get(salt, {})
        plain = roots.get(None)
        recent = [] if plain is None else [plain]
        latest = (root for root in reversed(roots.values()) if root is not plain)
        return recent + list(islice(latest, count - len(recent)))

    def path_segments(self) -> list[PathSegment]:
        """Return the tree as paths between forks, parents first.

        If all blocks of a path were evicted, its segment is empty. Its children may have blocks.
        """
        segments: list[PathSegment] = []
        pending = [
            (root.namespace, child, -1, 0) for root in self.roots() for child in root.children()
        ]
        while pending:
            namespace, node, parent, start = pending.pop()
            salt = cut_salt(node.key)[0]
            if salt is not None:
                namespace = Namespace(namespace.adapter, salt)
            depth, nodes = start + 1, [node] if node.block is not None else []
            while (only_child := node.child) is not None:
                if isinstance(only_child, Branches) or cut_salt(only_child.key)[0] is not None:
                    break
                node, depth = only_child, depth + 1
                if node.block is not None:
                    nodes.append(node)
            blocks = [node.block for node in nodes if node.block is not None]
            pending += [(namespace, child, len(segments), depth) for child in node.children()]
            segments.append(
                PathSegment(
                    parent,
                    namespace,
                    start,
                    [node.key for node in nodes],
                    block_ids(blocks),
                    len(blocks) - count_free(blocks),
                )
            )
        return segments

    def find(self, parent: PrefixNode, key: BlockKey) -> PrefixNode | None:
        """Return the child with this key, if any."""
        child = parent.child
        if isinstance(child, Branches):
            return child.nodes.get(key)
        return child if child is not None and child.key == key else None

    def child(
        self, parent: PrefixNode, key: BlockKey, kind: type[PrefixNode] = PrefixNode
    ) -> PrefixNode:
        """Return the child with this key; create it if there is none. The key must not be empty."""
        child = parent.child
        if child is None:
            parent.child = node = make_node(parent, key, kind)
            return node
        if child.key == key:
            return child
        branches = child if isinstance(child, Branches) else self.branch(parent, child)
        child = branches.nodes.get(key)
        if child is None:
            child = branches.nodes[key] = make_node(parent, key, kind)
        return child

    def branch(self, parent: PrefixNode, only_child: PrefixNode) -> Branches:
        """Replace an only child with `Branches` that contain it."""
        branches = Branches(parent)
        branches.nodes[only_child.key] = only_child
        parent.child = branches
        return branches

    def use(self, node: PrefixNode) -> None:
        """Move a node to the end of its parent's children, as if it had been created last."""
        branches = node.parent.child if node.parent is not None else None
        if isinstance(branches, Branches):
            branches.nodes[node.key] = branches.nodes.pop(node.key)

    def cut_off(self, node: PrefixNode) -> PrefixNode | None:
        """Remove a node without children; return its parent if the parent has no other child.

        Return None, and change nothing, for a node that was removed before.
        """
        parent = node.parent
        if parent is None:
            assert isinstance(node, RootNode)
            roots = self._roots[node.namespace.salt]
            del roots[node.namespace.adapter]
            if not roots:
                del self._roots[node.namespace.salt]
            return None
        branches = parent.child
        if branches is not node:
            if not isinstance(branches, Branches) or branches.nodes.get(node.key) is not node:
                return None
            if len(branches.nodes) > 1:
                del branches.nodes[node.key]
                return None
        parent.child = None
        return parent


OLD_GHOSTS = 5
"""Limit on the older ghosts, as a multiple of `max_ghosts`."""


class PrefixIndex(PrefixTree):
    """The tree of all prefixes that are cached, or were evicted recently.

    `unwritten` has the blocks that the step under way fills. They have an identity and can be hit,
    but their rows cannot be copied yet. If the step fails, they lose their identity.
    """

    def __init__(self, max_ghosts: int) -> None:
        super().__init__()
        self.max_ghosts = max_ghosts
        self.unwritten: set[KVCacheBlock] = set()
        self._unordered: list[PrefixNode] = []  # nodes that `commit` adds to an `order`
        self._ghosts: deque[PrefixNode] = deque()
        self._old_ghosts: deque[PrefixNode] = deque()  # their parents are cached or roots
        self._ancestors: set[PrefixNode] = set()  # evicted nodes that stay for their descendants

    def clear(self) -> None:
        self._roots.clear()
        self.unwritten.clear()
        self._unordered.clear()
        self._ghosts.clear()
        self._old_ghosts.clear()
        self._ancestors.clear()

    def check(self, nodes: set[PrefixNode]) -> None:
        """Raise AssertionError if the tree has a node that should have been removed.

        nodes: all nodes of the tree.
        """
        ghosts = {node for node in (*self._ghosts, *self._old_ghosts) if node.block is None}
        assert len(self._ghosts) <= self.max_ghosts, "there are too many ghosts"
        assert len(self._old_ghosts) <= OLD_GHOSTS * self.max_ghosts, "there are too many ghosts"
        assert PartialNode not in map(type, self._ghosts), "a partial block is a ghost"
        for node in nodes - ghosts:
            assert node.block is not None or node.child is not None, "an unused node is left"
            if node.parent is not None:
                is_ancestor = (node.block is None) == (node in self._ancestors)
                assert is_ancestor, "an evicted node is neither a ghost nor an ancestor"
        assert self._ancestors <= nodes, "a removed node is still an ancestor"

    def walk(self, root: PrefixNode, keys: list[BlockKey]) -> tuple[PrefixNode, list[KVCacheBlock]]:
        """Return the deepest cached node along the keys, and the blocks on the path to it."""
        node = root
        blocks = []
        for key in keys:
            child = node.child
            if child is None:
                break
            if child.key != key:
                child = child.nodes.get(key) if isinstance(child, Branches) else None
                if child is None:
                    break
            block = child.block
            if block is None:
                break
            blocks.append(block)
            node = child
        return node, blocks

    def branch(self, parent: PrefixNode, only_child: PrefixNode) -> Branches:
        """Replace an only child with `Branches`; add its key to `order` if its K/V are written."""
        branches = super().branch(parent, only_child)
        if only_child.block is not None:
            if only_child.block in self.unwritten:
                self._unordered.append(only_child)
            else:
                branches.order.append(only_child.key)
        return branches

    def covered_partial(self, node: PrefixNode) -> PrefixNode | None:
        """Return a written sibling whose key is the head of this node's key, if any."""
        assert node.parent is not None
        branches = node.parent.child
        if not isinstance(branches, Branches):
            return None
        before = bisect_left(branches.order, node.key) - 1
        if before >= 0 and node.key.startswith(branches.order[before]):
            return branches.nodes[branches.order[before]]
        return None

    def attach(self, node: PrefixNode, block: KVCacheBlock) -> None:
        """Store the node's content in the block."""
        node.block = block
        block.node = node
        self._ancestors.discard(node)
        parent = node.parent
        if parent is not None and isinstance(parent.child, Branches):
            if block in self.unwritten:
                self._unordered.append(node)
            else:
                _add_key(node, parent.child.order)

    def replace(self, node: PrefixNode, block: KVCacheBlock) -> None:
        """Replace the node's block with another block of the same content."""
        node.block = block
        assert node.parent is not None
        branches = node.parent.child
        if isinstance(branches, Branches) and block in self.unwritten:
            _remove_key(node, branches.order)
            self._unordered.append(node)

    def commit(self) -> None:
        """Mark all blocks as written, so that their rows may be copied."""
        for node in self._unordered:
            if node.block is not None and node.parent is not None:
                branches = node.parent.child
                if isinstance(branches, Branches):
                    _add_key(node, branches.order)
        self._unordered.clear()
        self.unwritten.clear()

    def detach(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove the identity of blocks. Nodes of full blocks stay as ghosts."""
        ghosts = self._ghosts
        for block in blocks:
            node = block.node
            assert node is not None and node.parent is not None
            node.block = block.node = None
            child = node.parent.child
            if child is not node and isinstance(child, Branches):
                _remove_key(node, child.order)
            if node.__class__ is PartialNode:
                self._prune(node)
            else:
                ghosts.append(node)
        if len(ghosts) > self.max_ghosts:
            self._drop_ghosts(len(ghosts) - self.max_ghosts)

    def _drop_ghosts(self, count: int) -> None:
        """Remove the oldest `count` ghosts, or make them old ghosts or ancestors."""
        ghosts, ancestors, old_ghosts = self._ghosts, self._ancestors, self._old_ghosts
        for _ in range(count):
            node = ghosts.popleft()
            if node.block is not None:
                continue
            parent = node.parent
            if node.child is not None:
                ancestors.add(node)
            elif parent is None or parent.block is not None or parent.parent is None:
                old_ghosts.append(node)
            elif parent.child is not node or (ancestors and parent in ancestors):
                self._prune(node)
            else:  # the common case: an only child whose parent is a ghost
                parent.child = None
        # The limit includes ancestors, because a single old ghost may need a whole path of them.
        while old_ghosts and len(old_ghosts) + len(ancestors) > OLD_GHOSTS * self.max_ghosts:
            node = old_ghosts.popleft()
            if node.block is None:
                if node.child is not None:
                    ancestors.add(node)
                else:
                    self._prune(node)

    def _prune(self, node: PrefixNode) -> None:
        """Remove a node without block and child, and ancestors that stayed only for this node."""
        while (parent := self.cut_off(node)) is not None:
            if parent.parent is not None:  # a root stays only while it has children
                if parent not in self._ancestors:
                    return
                self._ancestors.remove(parent)
            node = parent


def _add_key(node: PrefixNode, order: list[BlockKey]) -> None:
    i = bisect_left(order, node.key)
    if i == len(order) or order[i] != node.key:
        order.insert(i, node.key)


def _remove_key(node: PrefixNode, order: list[BlockKey]) -> None:
    i = bisect_left(order, node.key)
    if i < len(order) and order[i] == node.key:
        del order[i]
