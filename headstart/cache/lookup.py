"""Lookups of cached prefixes, and the reasons why they end. No function changes the cache.

A lookup walks down the tree along the sequence's keys as far as blocks are cached. Then it searches
the children of the last node for the block that shares the longest head with the next key.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from headstart.cache.block import (
    Branches,
    Checkpoint,
    KVCacheBlock,
    PrefixNode,
    RootNode,
    RowCopy,
)
from headstart.cache.identity import (
    PUBLIC,
    BlockKey,
    add_salt,
    common_tokens,
    count_tokens,
    cut_salt,
    differs_in_item,
    has_salt,
    read_tokens,
)
from headstart.cache.index import PrefixIndex
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissExplanation, MissReason

MAX_ADAPTERS = 4  # adapters that are searched to explain a miss
MAX_DEPTH = 16  # after a hit of more blocks, other adapters are not searched


class PartialHit(NamedTuple):
    """A cached block whose first `num_rows` rows equal those of the sequence's next block."""

    block: KVCacheBlock
    num_rows: int


class ComputedBlocks(NamedTuple):
    """The result of a lookup for one sequence.

    blocks: the cached blocks of its prefix, in order. num_tokens: the number of tokens that need
    not be computed, `partial` included. It is less than the length of the sequence. writer: the
    request that is computing the sequence's next block, if any. If the sequence does not wait for
    this request, the block is computed twice. node: the node of the last block, or the root; None
    if there is no root. version, source: identify the state of the index, so that the manager
    rejects a lookup that is stale or of another manager.

    known_tokens: the number of tokens with cached K/V. For a model with recurrent layers or sliding
    windows, the sequence resumes at `num_tokens`, and `known_tokens` and `blocks` may reach
    further. state: the checkpoint at `num_tokens`, for recurrent layers. is_fork: True if no
    request is computing the next block, so the prompt forks at `known_tokens`.
    """

    sequence: TokenSequence
    blocks: list[KVCacheBlock]
    num_tokens: int
    partial: PartialHit | None
    writer: str | None
    node: PrefixNode | None
    version: int
    source: PrefixIndex
    known_tokens: int = 0
    state: Checkpoint | None = None
    is_fork: bool = False

    def is_written(self, index: int) -> bool:
        """Return True if earlier steps have written the rows of `blocks[index]`."""
        return self.blocks[index] not in self.source.unwritten

    def cut(self, count: int, block_size: int) -> "ComputedBlocks":
        """Return this result truncated to its first `count` blocks.

        A state beyond them is dropped. `KVCacheManager.cut` also searches for an earlier state.
        """
        node, stop = self.node, count * block_size
        if count < len(self.blocks):
            node = self.blocks[count].node
            node = node.parent if node is not None else None
        state = self.state if self.state is not None and self.state.position <= stop else None
        return self._replace(
            blocks=self.blocks[:count],
            num_tokens=min(stop, self.num_tokens) if state is self.state else 0,
            partial=None,
            writer=None,
            node=node,
            known_tokens=min(stop, self.known_tokens),
            state=state,
            is_fork=False,
        )


class Allocation(NamedTuple):
    """The result of an admission: rows to copy before the step, and why the hit ended."""

    copies: tuple[RowCopy, ...]
    missed: MissExplanation


def _nearest_children(index: PrefixIndex, parent: PrefixNode, key: BlockKey) -> list[PrefixNode]:
    """Return the written children adjacent to the key in sort order, at most one on each side."""
    child = parent.child
    if isinstance(child, Branches):
        i = bisect_left(child.order, key)
        return [child.nodes[near] for near in child.order[max(0, i - 1) : i + 1]]
    if child is None or child.block is None or child.block in index.unwritten:
        return []
    return [child]


def longest_head(index: PrefixIndex, parent: PrefixNode, key: BlockKey) -> PartialHit | None:
    """Return the written child block that shares the longest head with the key, if any."""
    best: PartialHit | None = None
    for node in _nearest_children(index, parent, key):
        rows = common_tokens(key, node.key)
        if node.block is not None and rows > (best.num_rows if best is not None else 0):
            best = PartialHit(node.block, rows)
    return best


def find_partial(
    index: PrefixIndex, sequence: TokenSequence, node: PrefixNode, depth: int, block_size: int
) -> PartialHit | None:
    """Return the partial hit that follows a hit of `depth` full blocks, if any.

    node: the node of the last full block, or the root. The partial hit never covers the sequence's
    last token.
    """
    start = depth * block_size
    limit = len(sequence.token_ids) - 1 - start
    if limit <= 0 or node.child is None:
        return None
    if depth < len(sequence.keys):
        key = sequence.keys[depth]
    else:
        key = sequence.cut_partial(len(sequence.token_ids), block_size)
    hit = longest_head(index, node, key)
    if hit is None:
        return None
    return PartialHit(hit.block, min(hit.num_rows, limit))


def find_continuation(index: PrefixIndex, sequence: TokenSequence, count: int) -> list[int]:
    """Return up to `count` tokens that follow the sequence's tokens in its namespace.

    At forks, the branch that was created last is followed.
    """
    node = sequence.node or index.root(sequence.root)
    size, length = sequence.block_size, len(sequence.token_ids)
    tail = length - sequence.num_indexed * size
    if node is None or node.child is None or not size or not 0 < tail <= size:
        return []
    key = sequence.cut_partial(length, size)
    near = _nearest_children(index, node, key)
    child = next((c for c in near[::-1] if common_tokens(key, c.key) == tail), None)
    return _read_path(child, tail + count, sequence.namespace.salt)[tail:]


def find_branch(sequence: TokenSequence, count: int) -> list[int]:
    """Return up to `count` tokens that another sequence has after this sequence's hit.

    Read them from the latest branch of the same namespace after the hit. Return an empty list if
    there was no hit.
    """
    node, depth = sequence.node, sequence.num_reused
    for _ in range(sequence.num_indexed - depth):
        node = node.parent if node is not None else None
    if node is None or not depth:
        return []
    own_key = sequence.keys[depth] if depth < sequence.num_indexed else None
    salt = sequence.namespace.salt
    return _read_path(_latest_child(node, salt, own_key), count, salt)


def _read_path(node: PrefixNode | None, count: int, salt: str | None) -> list[int]:
    """Return up to `count` tokens of a node and its descendants.

    At forks, follow the branch that was created last. Skip blocks of other salts. The K/V of the
    tokens may be evicted.
    """
    tokens: list[int] = []
    while node is not None and len(tokens) < count:
        tokens += read_tokens(node.key)
        node = _latest_child(node, salt)
    return tokens[:count]


def _latest_child(
    parent: PrefixNode, salt: str | None, excluded: BlockKey | None = None
) -> PrefixNode | None:
    """Return the child that was created last. Skip children of other salts, and the excluded key.

    Searches all children. With a limit, the result would depend on the number of children that
    belong to other salts.
    """
    salt_frame = add_salt(BlockKey(b""), salt or "")
    for child in reversed(parent.children()):
        key = child.key
        if key != excluded and (key.startswith(salt_frame) or not has_salt(key)):
            return child
    return None


def explain_end(
    index: PrefixIndex, computed: ComputedBlocks | None, block_size: int, group_reason: MissReason
) -> MissExplanation:
    """Return the reason why a lookup ended. It reveals nothing about other salts.

    computed: None if the sequence was not looked up. group_reason: the reason if K/V are cached but
    the sequence cannot resume after them.
    """
    if computed is None:
        return MissExplanation(MissReason.NOT_READ, 0)
    sequence, depth, position = computed.sequence, len(computed.blocks), computed.num_tokens
    if position == len(sequence.token_ids) - 1:
        return MissExplanation(MissReason.NONE, position)
    if position < computed.known_tokens:
        return MissExplanation(group_reason, position, known_tokens=computed.known_tokens)
    if depth == len(sequence.keys):
        return MissExplanation(MissReason.SHORT, position)
    if computed.writer is not None:
        return MissExplanation(MissReason.IN_PROGRESS, position)
    node = index.find(computed.node, sequence.keys[depth]) if computed.node is not None else None
    if node is not None:
        reason = MissReason.EVICTED if node.block is None else MissReason.OUTPUTS
        return MissExplanation(reason, position)
    if (root := _find_other_adapter(index, computed)) is not None:
        return MissExplanation(MissReason.ADAPTER, position, root.namespace.adapter)
    return _explain_child(index, computed, block_size)


def _find_other_adapter(index: PrefixIndex, computed: ComputedBlocks) -> RootNode | None:
    """Return the root of another adapter with the same salt, if it has more of the prefix cached.

    `MAX_ADAPTERS` and `MAX_DEPTH` bound the cost of an admission.
    """
    depth, (adapter, salt) = len(computed.blocks), computed.sequence.root
    if depth > MAX_DEPTH or salt == PUBLIC:  # public roots would reveal other tenants' adapters
        return None
    for root in index.recent_roots(salt, MAX_ADAPTERS):
        keys = computed.sequence.keys
        if root.namespace.adapter != adapter and _has_more(index, root, keys, depth):
            return root
    return None


def is_in_other_salt(index: PrefixIndex, computed: ComputedBlocks) -> bool:
    """Return True if more blocks of the sequence are cached under another salt.

    Searches every salt. Tenants must not see the result.
    """
    adapter = computed.sequence.namespace.adapter
    return any(
        _has_more(index, root, keys, len(computed.blocks))
        for root in index.roots()
        if root.namespace.adapter == adapter
        for keys in _keys_of_others(index, root, computed)
    )


def _has_more(index: PrefixIndex, root: RootNode, keys: list[BlockKey], depth: int) -> bool:
    return len(index.walk(root, keys[: depth + 1])[1]) > depth


def _keys_of_others(
    index: PrefixIndex, root: RootNode, computed: ComputedBlocks
) -> Iterator[list[BlockKey]]:
    """For each other salt below this root, yield the keys of the hit and of the next block.

    Below the root of another salt, no key contains a salt. Below the public root, the first key
    after the public blocks contains the salt.
    """
    sequence, public = computed.sequence, computed.sequence.num_public
    own_salt = sequence.namespace.salt
    keys = [cut_salt(key)[1] for key in sequence.keys[: len(computed.blocks) + 1]]
    if root.namespace.salt not in (PUBLIC, own_salt):
        yield keys
    elif root.namespace.salt == PUBLIC and 0 < public < len(keys):
        node, blocks = index.walk(root, keys[:public])
        salts = {cut_salt(child.key)[0] for child in node.children()} - {None, own_salt}
        for salt in salts if len(blocks) == public else ():
            assert salt is not None
            yield [*keys[:public], add_salt(keys[public], salt), *keys[public + 1 :]]


def _explain_child(
    index: PrefixIndex, computed: ComputedBlocks, block_size: int
) -> MissExplanation:
    """Explain a miss by comparing the sequence's next block with its cached siblings."""
    parent, depth, position = computed.node, len(computed.blocks), computed.num_tokens
    if parent is None or parent.child is None:
        return MissExplanation(MissReason.UNSEEN, position)
    key = computed.sequence.keys[depth]
    own_salt = cut_salt(key)[0]  # after a public prefix, blocks of other salts are not revealed
    closest = max(
        (n.key for n in _nearest_children(index, parent, key) if cut_salt(n.key)[0] == own_salt),
        key=lambda other: common_tokens(key, other),
        default=None,
    )
    if closest is None:
        return MissExplanation(MissReason.UNSEEN, position)
    common = common_tokens(key, closest)
    position = depth * block_size + common
    if common == count_tokens(closest):  # a partial block that the sequence continues
        return MissExplanation(MissReason.UNSEEN, position)
    if differs_in_item(key, closest):
        return MissExplanation(MissReason.ITEM, position)
    return MissExplanation(MissReason.TOKEN if position else MissReason.UNSEEN, position)
