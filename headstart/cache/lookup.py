"""Finding what a sequence can reuse, and saying why it is not more. Nothing here changes anything.

A lookup walks the sequence's keys from its namespace's root as far as blocks are cached, then
looks at the children of the last node for the one with the longest common head.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from headstart.cache.block import KVCacheBlock
from headstart.cache.identity import BlockKey, common_tokens, count_tokens, differs_in_item
from headstart.cache.index import PrefixIndex, PrefixNode, RootNode
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissExplanation, MissReason


class PartialHit(NamedTuple):
    """The first `num_rows` rows of a cached block are those of the sequence's next block."""

    block: KVCacheBlock
    num_rows: int


class ComputedBlocks(NamedTuple):
    """What a lookup found for a sequence.

    blocks: the cached blocks its prefix fills, in order. num_tokens: tokens that need no
    computing, rows of `partial` included; always less than the sequence has. writer: the
    request that is computing the sequence's next block, if there is one: wait for it, or the
    block is computed twice. node and version: for the manager.
    """

    sequence: TokenSequence
    blocks: list[KVCacheBlock]
    num_tokens: int
    partial: PartialHit | None
    writer: str | None
    node: PrefixNode | None
    version: int

    def cut(self, count: int, block_size: int) -> "ComputedBlocks":
        """The same without what comes after the first `count` blocks, for who cannot use it."""
        node = self.node
        if count < len(self.blocks):
            node = self.blocks[count].node
            node = node.parent if node is not None else None
        return self._replace(
            blocks=self.blocks[:count],
            num_tokens=min(count * block_size, self.num_tokens),
            partial=None,
            writer=None,
            node=node,
        )


def _cached_children(parent: PrefixNode, key: BlockKey) -> tuple[Iterable[PrefixNode], ...]:
    """Children with a block, on either side of where the key would stand, nearest first."""
    if parent.branches is None:
        child = parent.child
        return ((child,),) if child is not None and child.block is not None else ()
    order, nodes = parent.branches.order, parent.branches.nodes
    at = bisect_left(order, key)
    before = (nodes[order[i]] for i in range(at - 1, -1, -1))
    return before, (nodes[order[i]] for i in range(at, len(order)))


def longest_head(parent: PrefixNode, key: BlockKey) -> PartialHit | None:
    """The written child block that shares most rows with the key.

    Common heads only get shorter on the way outwards, so on either side the nearest written
    block is the best; only blocks of the step that is under way are passed over.
    """
    best: PartialHit | None = None
    for side in _cached_children(parent, key):
        for node in side:
            block = node.block
            if block is not None and block.writer is None:
                rows = common_tokens(key, node.key)
                if rows > (best.num_rows if best is not None else 0):
                    best = PartialHit(block, rows)
                break
    return best


def find_partial(
    sequence: TokenSequence, node: PrefixNode, depth: int, block_size: int
) -> PartialHit | None:
    """What a written child of the last hit has of the sequence's next block, but its last token."""
    start = depth * block_size
    limit = len(sequence.token_ids) - 1 - start
    if limit <= 0 or (node.child is None and node.branches is None):
        return None
    if depth < len(sequence.keys):
        key = sequence.keys[depth]
    else:
        key = sequence.cut_tail(len(sequence.token_ids), block_size)
    hit = longest_head(node, key)
    if hit is None:
        return None
    return PartialHit(hit.block, min(hit.num_rows, limit))


def explain_end(index: PrefixIndex, found: ComputedBlocks, block_size: int) -> MissExplanation:
    """Why a lookup ended where it did, as far as the sequence's own salt may see."""
    sequence, depth, position = found.sequence, len(found.blocks), found.num_tokens
    if position == len(sequence.token_ids) - 1:
        return MissExplanation(MissReason.NONE, position)
    if depth == len(sequence.keys):
        return MissExplanation(MissReason.SHORT, position)
    if found.writer is not None:
        return MissExplanation(MissReason.IN_PROGRESS, position)
    if (root := _find_elsewhere(index, found, same_salt=True)) is not None:
        return MissExplanation(MissReason.ADAPTER, position, root.namespace.adapter)
    return _explain_child(index, found, block_size)


def is_in_other_salt(index: PrefixIndex, found: ComputedBlocks) -> bool:
    """Whether more of the sequence is cached under another salt: one tenant's news of another."""
    return _find_elsewhere(index, found, same_salt=False) is not None


def _find_elsewhere(
    index: PrefixIndex, found: ComputedBlocks, *, same_salt: bool
) -> RootNode | None:
    """Another namespace that has more of the sequence; one step for each that might."""
    adapter, salt = found.sequence.namespace
    keys, depth = found.sequence.keys, len(found.blocks)
    if same_salt:
        others = [r for r in index.roots_of_salt(salt) if r.namespace.adapter != adapter]
    else:
        others = [
            r for r in index.roots() if r.namespace.adapter == adapter and r.namespace.salt != salt
        ]
    longer = (root for root in others if len(index.walk(root, keys[: depth + 1])[1]) > depth)
    return next(longer, None)


def _explain_child(index: PrefixIndex, found: ComputedBlocks, block_size: int) -> MissExplanation:
    """Why no cached child of the last hit is the sequence's next block."""
    parent, depth, position = found.node, len(found.blocks), found.num_tokens
    if parent is None:
        return MissExplanation(MissReason.UNSEEN, position)
    key = found.sequence.keys[depth]
    known = index.find(parent, key)
    if known is not None:
        reason = MissReason.EVICTED if known.block is None else MissReason.OUTPUTS
        return MissExplanation(reason, position)
    nearest = [next(iter(side), None) for side in _cached_children(parent, key)]
    closest = max(
        (node.key for node in nearest if node is not None),
        key=lambda other: common_tokens(key, other),
        default=None,
    )
    if closest is None:
        return MissExplanation(MissReason.UNSEEN, position)
    common = common_tokens(key, closest)
    position = depth * block_size + common
    if common == count_tokens(closest):  # a tail that the sequence goes on from
        return MissExplanation(MissReason.UNSEEN, position)
    if differs_in_item(key, closest):
        return MissExplanation(MissReason.ITEM, position)
    return MissExplanation(MissReason.TOKEN if position else MissReason.UNSEEN, position)
