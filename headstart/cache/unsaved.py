"""Blocks that a tier does not have yet, followed through the events of a pool.

filling   named by the step under way, which may fail
pending   written, and not handed on
leaving   pending, and about to be reused: this step writes over its rows
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from headstart.cache.block import PrefixNode
from headstart.cache.events import AllBlocksCleared, BlockEvicted, BlockStored, CacheEvent
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash, BlockKey, Namespace, cut_salt, read_tokens

__all__ = ["UnsavedBlock", "UnsavedBlocks"]


class UnsavedBlock(NamedTuple):
    """A written block that no tier has: where it lies, and what it is.

    depth: blocks before it in its prompt. asked: as it was told to `note`. token_ids: its tokens,
    where they may be shown: none of a tenant's. node: its identity.
    """

    block_id: int
    name: BlockHash
    parent: BlockHash
    depth: int
    asked: float
    token_ids: list[int]
    node: PrefixNode

    def path(self) -> tuple[Namespace, list[BlockKey]]:
        """Its prefix: the namespace, and the keys of its blocks from the root on."""
        return self.node.path()


class _Place(NamedTuple):
    """Where a node stands.

    depth: blocks before it in its prompt. salt: whose it is; None, too, where nobody asks for that.
    """

    node: PrefixNode
    depth: int
    salt: str | None


class UnsavedBlocks:
    """What of one pool was not handed to a tier. Whoever uses it is told all events of the pool.

    tells_tokens: tell the tokens of blocks that are no tenant's alone.
    """

    def __init__(self, hasher: BlockHasher, *, tells_tokens: bool = False) -> None:
        self._hasher = hasher
        self._tells_tokens = tells_tokens
        self._filling: dict[PrefixNode, float] = {}
        # Oldest first. A dict walks over all that were deleted before it finds its first.
        self._pending: OrderedDict[PrefixNode, float] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are pending; a few of them may be gone."""
        return len(self._pending)

    def note(
        self, events: Iterable[CacheEvent], asked: float, *, is_saved: bool = False
    ) -> list[UnsavedBlock]:
        """Read events; the blocks that leave, whose rows are there until the step writes.

        asked: when the blocks that are stored were asked for. is_saved: a tier has these.
        """
        leaving: dict[PrefixNode, tuple[int, float]] = {}
        for event in events:
            if isinstance(event, BlockStored):
                if not is_saved:
                    self._filling[event.node] = asked
            elif isinstance(event, BlockEvicted):
                self._filling.pop(event.node, None)
                if event.node in self._pending:
                    leaving[event.node] = (event.block_id, self._pending.pop(event.node))
            else:
                self._filling.clear()
                self._pending.clear()
        return self._describe((node, at, when) for node, (at, when) in leaving.items())

    def commit(self) -> None:
        """What the step under way was to fill is written."""
        self._pending.update((n, asked) for n, asked in self._filling.items() if n.block)
        self._filling.clear()

    def roll_back(self, events: Iterable[CacheEvent]) -> None:
        """Nothing that the step was to fill is there; what it evicted may be overwritten."""
        self._filling.clear()
        if any(isinstance(event, AllBlocksCleared) for event in events):
            self._pending.clear()
        pending = self._pending.items()
        self._pending = OrderedDict((node, asked) for node, asked in pending if node.block)

    def pending(self, most: int) -> list[UnsavedBlock]:
        """The first blocks that are pending; they stay so until `handed_on`."""
        gone: list[PrefixNode] = []
        found: list[tuple[PrefixNode, int, float]] = []
        for node, asked in self._pending.items():
            if len(found) == most:
                break
            if node.block is None:
                gone.append(node)
            else:
                found.append((node, node.block.block_id, asked))
        for node in gone:
            del self._pending[node]
        return self._describe(found)

    def handed_on(self, count: int) -> None:
        """The first `count` that `pending` gave are saved, or will be."""
        for node in list(islice(self._pending, count)):
            del self._pending[node]

    def _describe(self, found: Iterable[tuple[PrefixNode, int, float]]) -> list[UnsavedBlock]:
        """Blocks by node, block id, and when they were asked for."""
        described: list[UnsavedBlock] = []
        place: _Place | None = None
        for node, block_id, asked in found:
            assert node.parent is not None
            place = self._find_place(node, place)
            name, parent = self._hasher.of_node(node), self._hasher.of_node(node.parent)
            is_told = self._tells_tokens and not place.salt  # "": what tenants share
            tokens = read_tokens(cut_salt(node.key)[1]) if is_told else []
            described.append(UnsavedBlock(block_id, name, parent, place.depth, asked, tokens, node))
        return described

    def _find_place(self, node: PrefixNode, before: _Place | None) -> _Place:
        """The place of a node. before: that of the node before, which mostly is its parent.

        Walking to the root for each block of a prompt takes the square of their number.
        """
        if before is not None and node.parent is before.node:
            salt = cut_salt(node.key)[0] if self._tells_tokens else None
            return _Place(node, before.depth + 1, before.salt if salt is None else salt)
        return _Place(node, _count_ancestors(node), node.salt() if self._tells_tokens else None)


def _count_ancestors(node: PrefixNode) -> int:
    """How many blocks come before a node's."""
    count, at = -1, node.parent
    while at is not None:
        count, at = count + 1, at.parent
    return count
