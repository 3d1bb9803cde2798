"""The KV cache manager: which blocks a sequence reuses, gets, and gives back.

A step of the engine, as the manager sees it:

    get_computed_blocks   what is cached of a new sequence's prefix; changes nothing
    allocate_slots        hold the hits, take new blocks, name those that the step fills
    append_slots          the same for a sequence that runs already
    commit_step           the step's K/V are written; or fail_step, and nothing of it is cached
    free                  give the blocks back; what they cache stays until it is evicted

Source: "Automatic Prefix Caching" (vLLM v1 design), operations.
"""

from typing import NamedTuple

from headstart.cache.block import KVCacheBlock
from headstart.cache.config import CacheConfig
from headstart.cache.events import CacheEvent
from headstart.cache.identity import BlockHash
from headstart.cache.index import PrefixIndex, PrefixNode, TailNode
from headstart.cache.invariants import check_manager
from headstart.cache.lookup import (
    ComputedBlocks,
    PartialHit,
    explain_end,
    find_partial,
    is_in_other_salt,
    longest_head,
)
from headstart.cache.names import BlockNames
from headstart.cache.pool import BlockPool
from headstart.cache.progress import BlocksInProgress
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissExplanation, MissReason, PrefixCacheStats
from headstart.errors import CacheError


class RowCopy(NamedTuple):
    """Copy the K/V of the first `num_rows` slots of one block to another, before the step."""

    source_block: int
    target_block: int
    num_rows: int


class Allocation(NamedTuple):
    """A sequence was admitted: rows to copy before the step runs, and why it hit no more."""

    copies: tuple[RowCopy, ...]
    missed: MissExplanation


class KVCacheManager:
    """Allocates KV blocks to sequences, and finds cached ones again by prefix identity.

    Not thread-safe: one engine calls it. Every method either does the whole of what it says or
    raises and leaves everything as it was.
    """

    def __init__(self, config: CacheConfig, names: BlockNames | None = None) -> None:
        remember = config.num_blocks // 4 if config.remember is None else config.remember
        self.config = config
        self.block_size = config.block_size
        self.names = names or BlockNames(config.block_size)
        self.stats = PrefixCacheStats()
        self._index = PrefixIndex(remember)
        self.pool = BlockPool(config.num_blocks, config.eviction, self._index)
        if config.events:
            self.pool.names = self.names
        self._sequences: dict[str, TokenSequence] = {}
        self._in_progress = BlocksInProgress()
        self._filled: list[KVCacheBlock] = []
        self._step = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self.pool.free)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences that hold blocks."""
        return tuple(self._sequences.values())

    def is_known(self, sequence: TokenSequence) -> bool:
        """Whether this very sequence holds blocks."""
        return self._sequences.get(sequence.request_id) is sequence

    # Lookup

    def get_computed_blocks(self, sequence: TokenSequence) -> ComputedBlocks:
        """What is cached of the sequence's prefix. Changes nothing: no count, no order.

        At least one token is left to compute. Costs about 0.1 us a cached block.
        """
        version = self.pool.version
        if not self.config.enable_prefix_caching:
            return ComputedBlocks(sequence, [], 0, None, None, None, version)
        keys = sequence.cut(self.block_size)
        node: PrefixNode | None = self._index.root(sequence.namespace)
        blocks: list[KVCacheBlock] = []
        if node is not None:
            node, blocks = self._index.walk(node, keys)
        depth = len(blocks)
        num_tokens = min(depth * self.block_size, len(sequence.token_ids) - 1)
        writer = None
        if depth < len(keys):
            parent = node if node is not None and depth else sequence.namespace
            writing = self._in_progress.writer(parent, keys[depth])
            writer = writing.request_id if writing is not None else None
        partial = None
        if node is not None and self.config.partial_hits:
            partial = find_partial(sequence, node, depth, self.block_size)
            num_tokens += partial.num_rows if partial is not None else 0
        return ComputedBlocks(sequence, blocks, num_tokens, partial, writer, node, version)

    def explain(self, sequence: TokenSequence, *, across_salts: bool = False) -> MissExplanation:
        """Why the sequence would not hit more if it were looked up now.

        across_salts: also look at what other tenants have cached, which is for the operator's
        eyes alone.
        """
        if not self.config.enable_prefix_caching:
            return MissExplanation(MissReason.DISABLED, 0)
        found = self.get_computed_blocks(sequence)
        explanation = explain_end(self._index, found, self.block_size)
        if across_salts and is_in_other_salt(self._index, found):
            return MissExplanation(MissReason.SALT, explanation.position)
        return explanation

    def block_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """The portable names of the sequence's full blocks, cached or not."""
        return self.names.of_keys(sequence.namespace, sequence.cut(self.block_size))

    # Allocation

    def allocate_slots(
        self,
        sequence: TokenSequence,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
    ) -> Allocation | None:
        """Admit a sequence: hold what it hits and give it slots for `num_new_tokens` more.

        Without `computed` the sequence reuses nothing. Returns None, and moves nothing, when
        there are not enough free blocks. Raises CacheError when the sequence holds blocks
        already, `computed` is of another sequence or older than an eviction, or there are not
        `num_new_tokens` tokens left.
        """
        hits = computed.blocks if computed is not None else []
        hit_tokens = computed.num_tokens if computed is not None else 0
        self._check_admission(sequence, num_new_tokens, computed)
        end = hit_tokens + num_new_tokens
        num_new = -(-end // self.block_size) - len(hits)
        left = len(self.pool.free) - num_new
        for block in hits:
            if block.ref_cnt == 0:
                left -= 1
        if left < 0:
            return None
        missed = self._explain_admission(computed)
        self.stats.record(len(sequence.token_ids), hit_tokens, missed, resumed=sequence.step >= 0)
        self.pool.touch(hits)
        new, copies = self._take(num_new, computed.partial if computed is not None else None)
        for block in new:
            block.writer = sequence
        sequence.blocks = hits + new
        sequence.block_ids = [block.block_id for block in sequence.blocks]
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.num_named = len(hits)
        sequence.node = computed.node if computed is not None and hits else None
        self._sequences[sequence.request_id] = sequence
        self._extend_to(sequence, end)
        self._in_progress.announce(sequence)
        if copies and sequence.blocks[len(hits)] is not new[0]:  # cached since the lookup
            copies = ()
        return Allocation(copies, missed)

    def _check_admission(
        self, sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None
    ) -> None:
        name = sequence.request_id
        if name in self._sequences:
            raise CacheError(f"sequence {name!r} holds blocks already")
        if sequence.blocks:
            raise CacheError(f"sequence {name!r} holds blocks of another manager")
        start = 0
        if computed is not None:
            if computed.sequence is not sequence:
                raise CacheError(f"the lookup given for {name!r} is another sequence's")
            if computed.version != self.pool.version:
                raise CacheError(f"the lookup of {name!r} is older than an eviction: look again")
            start = computed.num_tokens
        if not 1 <= num_new_tokens <= len(sequence.token_ids) - start:
            raise _bad_count(sequence, num_new_tokens, start)
        if self.config.enable_prefix_caching:
            sequence.cut(self.block_size)  # for naming; it may raise, so before anything moves

    def _explain_admission(self, computed: ComputedBlocks | None) -> MissExplanation:
        if not self.config.enable_prefix_caching:
            return MissExplanation(MissReason.DISABLED, 0)
        if computed is None:
            return MissExplanation(MissReason.NOT_READ, 0)
        return explain_end(self._index, computed, self.block_size)

    def _take(
        self, count: int, partial: PartialHit | None
    ) -> tuple[list[KVCacheBlock], tuple[RowCopy, ...]]:
        """New blocks, and the copy that fills the head of the first from a partial hit.

        The source is held while blocks are taken, so that it counts as used now and is not
        taken itself. If it is the last free block it is taken: copies read before anybody
        writes, so its rows are still good.
        """
        if partial is None:
            return self.pool.take(count), ()
        source = partial.block
        if source.ref_cnt == 0 and len(self.pool.free) == count:
            new = self.pool.take(count)
        else:
            self.pool.touch([source])
            new = self.pool.take(count)
            self.pool.release([source])
        return new, (RowCopy(source.block_id, new[0].block_id, partial.num_rows),)

    def append_slots(self, sequence: TokenSequence, num_new_tokens: int = 1) -> bool:
        """Give a running sequence slots for its next tokens; False, and nothing moved, if short.

        Costs next to nothing while the last block has room. Raises CacheError when the
        sequence holds no blocks or has not so many tokens.
        """
        end = sequence.num_computed_tokens + num_new_tokens
        if num_new_tokens < 1 or end > len(sequence.token_ids):
            raise _bad_count(sequence, num_new_tokens, sequence.num_computed_tokens)
        if end < sequence.capacity:
            sequence.num_computed_tokens = end
            sequence.step = self._step
            return True
        name = sequence.request_id
        if self._sequences.get(name) is not sequence:
            raise CacheError(f"sequence {name!r} holds no blocks: allocate_slots comes first")
        if self.config.enable_prefix_caching:
            sequence.cut(self.block_size)  # for naming; it may raise, so before anything moves
        num_new = -(-end // self.block_size) - len(sequence.blocks)
        if num_new > 0:
            if num_new > len(self.pool.free):
                return False
            new = self.pool.take(num_new)
            for block in new:
                block.writer = sequence
            sequence.blocks += new
            sequence.block_ids += [block.block_id for block in new]
            sequence.capacity += num_new * self.block_size
        self._extend_to(sequence, end)
        if sequence.in_progress is not None or sequence.num_named < len(sequence.keys):
            self._in_progress.announce(sequence)
        return True

    def _extend_to(self, sequence: TokenSequence, end: int) -> None:
        """The sequence's tokens up to `end` are computed in this step: name what that fills."""
        sequence.num_computed_tokens = end
        sequence.step = self._step
        if not self.config.enable_prefix_caching:
            return
        full, keys = end // self.block_size, sequence.keys
        if full == sequence.num_named:
            return
        node = sequence.node or self._index.make_root(sequence.namespace)
        for at in range(sequence.num_named, full):
            if node.child is None and node.branches is None:
                blocks = sequence.blocks[at:full]
                node = self.pool.store_chain(node, keys[at:full], blocks)
                self._filled += blocks
                break
            node = self._index.child(node, keys[at])
            self._name_block(sequence, at, node)
        sequence.node, sequence.num_named = node, full

    def _name_block(self, sequence: TokenSequence, at: int, node: PrefixNode) -> None:
        """The sequence's block is full, and this is its identity."""
        block, cached = sequence.blocks[at], node.block
        if cached is None or not self.config.deduplicate:
            self.pool.store(node, block)
            self._filled.append(block)
            self._drop_outgrown(node)
        else:
            self.pool.touch([cached])
            block.writer = None
            sequence.blocks[at] = cached
            sequence.block_ids[at] = cached.block_id
            self.pool.release([block])

    # The end of a step, and of a sequence

    def commit_step(self) -> None:
        """The K/V of every slot given since the last step are written."""
        for block in self._filled:
            block.writer = None
        self._filled.clear()
        self._step += 1

    def fail_step(self) -> list[TokenSequence]:
        """The step's K/V were not written: end its sequences and keep nothing it computed.

        Returns the sequences that had slots in the step; they hold no blocks any more.
        """
        for block in self._filled:
            block.writer = None
        self.pool.forget([block for block in self._filled if block.node is not None])
        failed = [s for s in self._sequences.values() if s.step == self._step]
        self._filled.clear()
        self._step += 1
        for sequence in failed:
            self._give_back(sequence)
        return failed

    def free(self, sequence: TokenSequence) -> None:
        """The sequence holds its blocks no longer; full ones stay cached, last in line first.

        The rows in its last block stay too, to be copied by a prompt that goes on from there.
        Raises CacheError for a sequence that holds none, or one whose step is under way.
        """
        name = sequence.request_id
        if not self.is_known(sequence):
            raise CacheError(f"sequence {name!r} holds no blocks; freed twice?")
        if sequence.step == self._step:
            raise CacheError(f"{name!r} is in a step: commit_step or fail_step comes first")
        if self.config.enable_prefix_caching and self.config.partial_hits:
            self._keep_tail(sequence)
        self._give_back(sequence)

    def _keep_tail(self, sequence: TokenSequence) -> None:
        """Let the rows of the last block be found, unless a cached block has them already."""
        rows = sequence.num_computed_tokens % self.block_size
        if rows == 0:
            return
        key = sequence.cut_tail(sequence.num_computed_tokens, self.block_size)
        node = sequence.node or self._index.make_root(sequence.namespace)
        held = longest_head(node, key)
        if held is None or held.num_rows < rows:
            tail = self._index.child(node, key, TailNode)
            self._index.attach(tail, sequence.blocks[sequence.num_named])
            self._drop_outgrown(tail)

    def _drop_outgrown(self, node: PrefixNode) -> None:
        """Empty the block of a tail whose rows this node's block has too, and more."""
        tail = self._index.outgrown_tail(node)
        if isinstance(tail, TailNode) and tail.block is not None and not tail.block.ref_cnt:
            block = tail.block
            self.pool.free.claim([block])
            self.pool.forget([block])
            self.pool.free.release([block])

    def _give_back(self, sequence: TokenSequence) -> None:
        self._in_progress.withdraw(sequence)
        del self._sequences[sequence.request_id]
        blocks, sequence.blocks, sequence.block_ids = sequence.blocks, [], []
        for block in blocks[sequence.num_named :]:
            block.writer = None
        sequence.capacity = sequence.num_computed_tokens = sequence.num_named = 0
        sequence.node = None
        self.pool.release(blocks[::-1])

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing done, while a sequence holds blocks."""
        if self._sequences:
            return False
        self.pool.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if any invariant of pool, index or sequences is broken."""
        check_manager(self)
        self._in_progress.check(self.sequences)

    def take_events(self) -> list[CacheEvent]:
        """What happened to cached blocks since the last call, oldest first."""
        events, self.pool.events = self.pool.events, []
        return events


def _bad_count(sequence: TokenSequence, num_new_tokens: int, start: int) -> CacheError:
    left = len(sequence.token_ids) - start
    return CacheError(
        f"{num_new_tokens} slots asked for {sequence.request_id!r}; "
        f"from 1 to {left} tokens are left"
    )
