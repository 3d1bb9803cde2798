"""A tree of prefixes: what is equal from position 0 on is one node, found by comparing content.

Two prompts that begin alike walk the same nodes, and a step of the walk compares keys, so a match
is exact by construction; no digest is trusted, and none is computed. Most nodes have one child,
which hangs directly on the node: no dictionary, no hash, one `memcmp` a block.
"""

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from headstart.cache.block import Branches, PrefixNode, RootNode, block_ids, make_node
from headstart.cache.identity import BlockKey, Namespace, cut_salt
from headstart.mypyc_hints import mypyc_attr


class Stretch(NamedTuple):
    """A piece of the tree of prefixes without a fork: the blocks that hold it, first one first.

    It ends where a salt enters the chain, too: `namespace` is that of the blocks' owner.

    parent: place in the list of the stretch that it goes on from, -1 for none. start: blocks
    before it. keys, ids: of its cached blocks. num_held: how many of these some request holds.
    """

    parent: int
    namespace: Namespace
    start: int
    keys: list[BlockKey]
    ids: list[int]
    num_held: int


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixTree:
    """Nodes under the root of their namespace. The caller that makes a node also removes it."""

    def __init__(self) -> None:
        self._roots: dict[str | None, dict[str | None, RootNode]] = {}  # by salt, by adapter

    def root(self, namespace: Namespace) -> RootNode | None:
        """The namespace's root, if anything of it is known."""
        roots = self._roots.get(namespace.salt)
        return roots.get(namespace.adapter) if roots is not None else None

    def make_root(self, namespace: Namespace) -> RootNode:
        """The namespace's root, made when there is none."""
        root = self.root(namespace)
        if root is None:
            root = RootNode(namespace)
            roots = self._roots.get(namespace.salt)
            if roots is None:
                self._roots[namespace.salt] = {namespace.adapter: root}
            elif isinstance(roots, OrderedDict):
                roots[namespace.adapter] = root
            else:  # for `recent_roots`: a dict walks over all that were deleted after its last
                both = [*roots.items(), (namespace.adapter, root)]
                self._roots[namespace.salt] = OrderedDict(both)
        return root

    def roots(self) -> list[RootNode]:
        """All namespaces' roots."""
        return [root for roots in self._roots.values() for root in roots.values()]

    def recent_roots(self, salt: str | None, count: int) -> list[RootNode]:
        """At most `count` roots of a salt: without an adapter, then the adapters known last."""
        roots = self._roots.get(salt, {})
        plain = roots.get(None)
        recent = [] if plain is None else [plain]
        latest = (root for root in reversed(roots.values()) if root is not plain)
        return recent + list(islice(latest, count - len(recent)))

    def stretches(self) -> list[Stretch]:
        """The tree from fork to fork, a stretch after the one that it goes on from.

        One whose blocks were all evicted has none, and may go on in others that have some.
        """
        found: list[Stretch] = []
        pending = [
            (root.namespace, child, -1, 0) for root in self.roots() for child in root.children()
        ]
        while pending:
            namespace, node, parent, start = pending.pop()
            salt = cut_salt(node.key)[0]
            if salt is not None:
                namespace = Namespace(namespace.adapter, salt)
            depth, nodes = start + 1, [node] if node.block is not None else []
            while (only := node.child) is not None and not _is_fork(only):
                node, depth = only, depth + 1
                if node.block is not None:
                    nodes.append(node)
            blocks = [one.block for one in nodes if one.block is not None]
            pending += [(namespace, child, len(found), depth) for child in node.children()]
            found.append(
                Stretch(
                    parent,
                    namespace,
                    start,
                    [one.key for one in nodes],
                    block_ids(blocks),
                    len(blocks) - [block.ref_cnt for block in blocks].count(0),
                )
            )
        return found

    def find(self, parent: PrefixNode, key: BlockKey) -> PrefixNode | None:
        """The child of this key."""
        child = parent.child
        if isinstance(child, Branches):
            return child.nodes.get(key)
        return child if child is not None and child.key == key else None

    def child(
        self, parent: PrefixNode, key: BlockKey, kind: type[PrefixNode] = PrefixNode
    ) -> PrefixNode:
        """The child of this key, which is not empty; made when there is none."""
        only = parent.child
        if only is None:
            parent.child = node = make_node(parent, key, kind)
            return node
        if only.key == key:
            return only
        branches = only if isinstance(only, Branches) else self.branch(parent, only)
        found = branches.nodes.get(key)
        if found is None:
            found = branches.nodes[key] = make_node(parent, key, kind)
        return found

    def branch(self, parent: PrefixNode, only: PrefixNode) -> Branches:
        """Replace an only child by `Branches` that hold it."""
        branches = Branches(parent)
        branches.nodes[only.key] = only
        parent.child = branches
        return branches

    def cut_off(self, node: PrefixNode) -> PrefixNode | None:
        """Take a node without children out; its parent, if that has no child any more.

        None, and nothing done, for a node that is cut off already.
        """
        parent = node.parent
        if parent is None:
            assert isinstance(node, RootNode)
            self._drop_root(node.namespace)
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

    def _drop_root(self, namespace: Namespace) -> None:
        roots = self._roots[namespace.salt]
        if len(roots) > 1:
            del roots[namespace.adapter]
        else:
            del self._roots[namespace.salt]


def _is_fork(child: PrefixNode) -> bool:
    """True if another stretch begins with what hangs on a node."""
    return isinstance(child, Branches) or cut_salt(child.key)[0] is not None
