"""The prefix index: the tree of the identities that are cached, or were until lately.

A node whose block was evicted is remembered for a while, so that a miss can be told from an
eviction (the last `remember` of them). Then it is cut off, unless a descendant is cached or
remembered, whose identity includes it: it outlives its time, and goes with that descendant.

A node may also stand for less than a block: a tail, the rows that a finished request left in
its last block. A tail has no children and no name; its rows can only be copied.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from headstart.cache.block import Branches, KVCacheBlock, PrefixNode, TailNode
from headstart.cache.identity import BlockKey
from headstart.cache.tree import PrefixTree


class PrefixIndex(PrefixTree):
    """All prefix identities that are cached, or were until lately.

    `unwritten` has the blocks that the step under way fills: they have a name and can be hit,
    but nothing may be copied from them, and the name goes if the step fails. A block is put
    there before it gets its name.
    """

    def __init__(self, remember: int) -> None:
        super().__init__()
        self.remember = remember
        self.unwritten: set[KVCacheBlock] = set()
        self._unlisted: list[PrefixNode] = []  # unwritten siblings, in no `order` yet
        self._evicted: deque[PrefixNode] = deque()
        self._outlived: set[PrefixNode] = set()  # forgotten, but for a descendant

    def clear(self) -> None:
        """Know nothing any more."""
        self._roots.clear()
        self._evicted.clear()
        self._outlived.clear()

    def check(self, nodes: set[PrefixNode]) -> None:
        """Raise AssertionError if one of these, all nodes there are, is kept for nothing."""
        remembered = {node for node in self._evicted if node.block is None}
        assert len(self._evicted) <= self.remember, "more is remembered than should be"
        assert TailNode not in map(type, self._evicted), "a tail is remembered"
        for node in nodes - remembered:
            assert node.block is not None or node.child is not None, "a node is kept for nothing"
            if node.parent is not None:
                known = (node.block is None) == (node in self._outlived)
                assert known, "an evicted node is neither remembered nor outlived"
        assert self._outlived <= nodes, "a node that was cut off is kept"

    def walk(self, root: PrefixNode, keys: list[BlockKey]) -> tuple[PrefixNode, list[KVCacheBlock]]:
        """The deepest cached node along the keys, and the blocks on the way. Changes nothing."""
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

    def branch(self, parent: PrefixNode, only: PrefixNode) -> Branches:
        """Have the only child be one of several, in order if its rows are written."""
        branches = super().branch(parent, only)
        if only.block is not None:
            if only.block in self.unwritten:
                self._unlisted.append(only)
            else:
                branches.order.append(only.key)
        return branches

    def outgrown_tail(self, node: PrefixNode) -> PrefixNode | None:
        """A sibling that is a tail and the head of this node's content: it is of no more use."""
        assert node.parent is not None
        branches = node.parent.child
        if not isinstance(branches, Branches):
            return None
        before = bisect_left(branches.order, node.key) - 1
        if before >= 0 and node.key.startswith(branches.order[before]):
            return branches.nodes[branches.order[before]]
        return None

    def attach(self, node: PrefixNode, block: KVCacheBlock) -> None:
        """The block holds the node's content from now on."""
        node.block = block
        block.node = node
        self._outlived.discard(node)
        parent = node.parent
        if parent is not None and isinstance(parent.child, Branches):
            if block in self.unwritten:
                self._unlisted.append(node)
            else:
                _list(node, parent.child.order)

    def replace(self, node: PrefixNode, block: KVCacheBlock) -> None:
        """Another block that holds the same content stands for the node from now on."""
        node.block = block
        assert node.parent is not None
        branches = node.parent.child
        if isinstance(branches, Branches) and block in self.unwritten:
            _unlist(node, branches.order)
            self._unlisted.append(node)

    def commit(self) -> None:
        """The rows of all blocks are written: they may be copied from."""
        for node in self._unlisted:
            if node.block is not None and node.parent is not None:
                branches = node.parent.child
                if isinstance(branches, Branches):
                    _list(node, branches.order)
        self._unlisted.clear()
        self.unwritten.clear()

    def detach(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The blocks hold their identity no longer; full blocks' are remembered for a while."""
        evicted = self._evicted
        for block in blocks:
            node = block.node
            assert node is not None
            node.block = block.node = None
            parent = node.parent
            assert parent is not None
            if parent.child is not node and isinstance(parent.child, Branches):
                _unlist(node, parent.child.order)
            if node.__class__ is TailNode:
                self._prune(node)
                continue
            evicted.append(node)
        if len(evicted) > self.remember:
            self._forget_oldest(len(evicted) - self.remember)

    def _forget_oldest(self, count: int) -> None:
        """Remember `count` evicted nodes no longer."""
        evicted, outlived = self._evicted, self._outlived
        for _ in range(count):
            node = evicted.popleft()
            if node.block is not None:
                continue
            parent = node.parent
            if node.child is not None:
                outlived.add(node)
            elif parent is None or parent.child is not node or outlived or parent.parent is None:
                self._prune(node)
            else:  # as most are: an only child whose parent goes on
                parent.child = None

    def outlive(self, nodes: Iterable[PrefixNode]) -> None:
        """These nodes have no block and are kept for a descendant."""
        self._outlived.update(nodes)

    def _prune(self, node: PrefixNode) -> None:
        """Cut off a node without block or child, and the ancestors that were kept for it."""
        while (parent := self.cut_off(node)) is not None:
            if parent.parent is not None:  # a root stays for its children alone
                if parent not in self._outlived:
                    return
                self._outlived.remove(parent)
            node = parent


def _list(node: PrefixNode, order: list[BlockKey]) -> None:
    at = bisect_left(order, node.key)
    if at == len(order) or order[at] != node.key:
        order.insert(at, node.key)


def _unlist(node: PrefixNode, order: list[BlockKey]) -> None:
    at = bisect_left(order, node.key)
    if at < len(order) and order[at] == node.key:
        del order[at]
