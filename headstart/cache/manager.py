"""The KV cache manager: which blocks a sequence reuses, gets, and gives back.

A step of the engine, as the manager sees it:

    get_computed_blocks   what is cached of a new sequence's prefix; changes nothing
    allocate_slots        hold the hits, take new blocks, name those that the step fills
    append_slots          the same for a sequence that runs already
    commit_step           the step's K/V are written; or fail_step, and nothing of it is cached
    free                  give the blocks back; what they cache stays until it is evicted

Source: "Automatic Prefix Caching" (vLLM v1 design), operations.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headstart.cache.block import KVCacheBlock, PrefixNode, block_ids, count_free
from headstart.cache.config import CacheConfig
from headstart.cache.events import CacheEvent
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash
from headstart.cache.index import PathSegment, PrefixIndex
from headstart.cache.indexer import BlockIndexer, BlocksInProgress
from headstart.cache.invariants import check_everything
from headstart.cache.lookup import ComputedBlocks, explain_end, find_partial, is_in_other_salt
from headstart.cache.policies import Clock
from headstart.cache.pool import BlockPicture, BlockPool
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissExplanation, MissReason, PrefixCacheStats
from headstart.errors import CacheError, ConfigError
from headstart.mypyc_hints import mypyc_attr


class RowCopy(NamedTuple):
    """Copy the K/V of the first `num_rows` slots of one block to another, before the step."""

    source_block: int
    target_block: int
    num_rows: int


class Allocation(NamedTuple):
    """A sequence was admitted: rows to copy before the step runs, and why it hit no more."""

    copies: tuple[RowCopy, ...]
    missed: MissExplanation


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager:
    """Allocates KV blocks to sequences, and finds cached ones again by prefix identity.

    Not thread-safe: one engine calls it. Every method either does the whole of what it says or
    raises CacheError and leaves everything as it was. After any other exception, such as Ctrl-C in
    the middle of a method, call `reset`.
    """

    def __init__(
        self,
        config: CacheConfig,
        hasher: BlockHasher | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make a manager of empty blocks. `hasher` is needed for events and `block_hashes`.

        Raises ConfigError if it is missing, or for another block size.
        """
        if config.events and hasher is None:
            raise ConfigError("events is True, and events have hashes; pass a BlockHasher")
        if hasher is not None and hasher.block_size != config.block_size:
            raise ConfigError(
                f"block_size of the hasher is {hasher.block_size}; allowed: {config.block_size}, "
                "as in the configuration"
            )
        ghosts = config.num_blocks // 10 if config.ghost_entries is None else config.ghost_entries
        self.config = config
        self.block_size = config.block_size
        self.hasher = hasher or BlockHasher(config.block_size)
        self._has_hasher = hasher is not None
        self.pool = BlockPool(config.num_blocks, config.eviction, PrefixIndex(ghosts), clock)
        self.pool.hasher = self.hasher if config.events else None
        self.stats = PrefixCacheStats(eviction_ages=self.pool.ages)
        self.shares = self.pool.shares
        self._indexer = BlockIndexer(config, self.pool)
        self._caching = config.enable_prefix_caching
        self._sequences: dict[str, TokenSequence] = {}
        self._mark = object()  # of these sequences
        self._in_progress = BlocksInProgress()
        self._step = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self.pool.free)

    def count_kept(self, taker: str | None, to_come: Mapping[str, int]) -> int:
        """Free blocks that owners other than the taker cached within their shares.

        to_come: by owner, as if no others shared the pool, how many blocks it is yet to get.
        """
        return self.pool.free.count_kept(taker, to_come)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were reused for other content."""
        return self.pool.num_evicted

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences that hold blocks."""
        return tuple(self._sequences.values())

    def is_known(self, sequence: TokenSequence) -> bool:
        """True if this very sequence holds blocks."""
        return sequence.holder is self._mark

    def get_computed_blocks(self, sequence: TokenSequence) -> ComputedBlocks:
        """Look up the sequence's cached prefix. Changes nothing: no count, no order.

        At least one token is left to compute. Costs about 0.1 us a cached block.
        """
        version, index = self.pool.version, self.pool.index
        if not self._caching:
            return ComputedBlocks(sequence, [], 0, None, None, None, version, index)
        keys = sequence.cut(self.block_size)
        node: PrefixNode | None = index.root(sequence.root)
        blocks: list[KVCacheBlock] = []
        if node is not None:
            node, blocks = index.walk(node, keys)
        depth = len(blocks)
        num_tokens = min(depth * self.block_size, len(sequence.token_ids) - 1)
        writer = None
        if depth < len(keys):
            parent = node if node is not None and depth else sequence.root
            writing = self._in_progress.writer(parent, keys[depth])
            writer = writing.request_id if writing is not None else None
        partial = None
        if node is not None and self.config.partial_hits:
            partial = find_partial(index, sequence, node, depth, self.block_size)
            num_tokens += partial.num_rows if partial is not None else 0
        return ComputedBlocks(sequence, blocks, num_tokens, partial, writer, node, version, index)

    def explain(self, sequence: TokenSequence, *, across_salts: bool = False) -> MissExplanation:
        """Why the sequence would not hit more if it were looked up now.

        across_salts: ask what other tenants have cached too; for the operator's eyes alone.
        """
        found = self.get_computed_blocks(sequence)
        explanation = explain_end(self.pool.index, found, self.block_size, is_caching=self._caching)
        is_evicted = explanation.reason is MissReason.EVICTED
        if across_salts and not is_evicted and is_in_other_salt(self.pool.index, found):
            return MissExplanation(MissReason.SALT, explanation.position)
        return explanation

    def block_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """Return the portable hashes of the sequence's full blocks, cached or not.

        Raises CacheError for a manager without a `BlockHasher`, which does not know the model.
        """
        if not self._has_hasher:
            raise CacheError("block_hashes needs a BlockHasher; pass one to the manager")
        keys = sequence.cut(self.block_size)  # which may change the root
        return self.hasher.of_keys(sequence.root, keys)

    def picture(self) -> list[BlockPicture]:
        """Every block of the pool as it is now, by block id; for those who draw it."""
        return self.pool.picture()

    def held_blocks(self) -> list[int]:
        """The ids of the blocks that some request holds; asks every block."""
        return block_ids([block for block in self.pool.blocks if block.ref_cnt])

    def path_segments(self) -> list[PathSegment]:
        """Return the tree of cached prefixes from fork to fork; takes time by number of blocks."""
        return self.pool.index.path_segments()

    # Allocation

    def fits(self, sequence: TokenSequence) -> bool:
        """Return True if the empty pool can hold all tokens of the sequence."""
        return len(sequence.token_ids) <= self.config.num_blocks * self.block_size

    def can_admit(self, computed: ComputedBlocks) -> bool:
        """True if the free blocks suffice for all tokens of the sequence that was looked up.

        Raises CacheError for a lookup of another manager.
        """
        check_source(computed, self.pool)
        blocks = -(-len(computed.sequence.token_ids) // self.block_size)
        needed = blocks - len(computed.blocks) + count_free(computed.blocks)
        return needed <= len(self.pool.free)

    def allocate_slots(
        self,
        sequence: TokenSequence,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
    ) -> Allocation | None:
        """Admit a sequence: hold what it hits and give it slots for `num_new_tokens` more.

        Without `computed` the sequence reuses nothing. Returns None, and moves nothing, when
        there are not enough free blocks; see `fits`. Raises CacheError when the sequence holds
        blocks already, `computed` is of another sequence or manager or older than an eviction, or
        there are not `num_new_tokens` tokens left.
        """
        self._check_admission(sequence, num_new_tokens, computed)
        hits, hit_tokens = (computed.blocks, computed.num_tokens) if computed else ([], 0)
        end = hit_tokens + num_new_tokens
        num_new = -(-end // self.block_size) - len(hits)
        if num_new + count_free(hits) > len(self.pool.free):
            return None
        missed = explain_end(self.pool.index, computed, self.block_size, is_caching=self._caching)
        if sequence.is_counted:
            self.stats.admit(sequence, hit_tokens, missed.reason)
        self._sequences[sequence.request_id] = sequence
        sequence.holder = self._mark
        self.pool.touch(hits)
        new, copies = self._take(sequence, num_new, computed)
        sequence.blocks = hits + new
        sequence.block_ids = block_ids(sequence.blocks)
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.num_indexed = sequence.num_reused = len(hits)
        sequence.node = computed.node if computed is not None and hits else None
        self._extend_to(sequence, end)
        self._in_progress.announce(sequence)
        if copies and sequence.blocks[len(hits)] is not new[0]:  # cached since the lookup
            copies = ()
        return Allocation(copies, missed)

    def _check_admission(
        self, sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None
    ) -> None:
        if sequence.request_id in self._sequences:
            raise CacheError(f"sequence {sequence.request_id!r} holds blocks already")
        check_admission(sequence, num_new_tokens, computed, self.pool)
        if self._caching:
            sequence.cut(self.block_size)  # for naming; it may raise, so before anything moves

    def _take(
        self, sequence: TokenSequence, count: int, computed: ComputedBlocks | None
    ) -> tuple[list[KVCacheBlock], tuple[RowCopy, ...]]:
        """New blocks, and the copy that fills the head of the first from a partial hit.

        The source is held while blocks are taken, so that it counts as used now and is not
        taken itself. If it is the last free block it is taken: copies read before anybody
        writes, so its rows are still good.
        """
        if computed is None or computed.partial is None:
            return self.pool.take(count, sequence.namespace.salt), ()
        source, num_rows = computed.partial
        is_last = source.ref_cnt == 0 and len(self.pool.free) == count
        self.pool.touch([source])
        if is_last:
            self.pool.release([source])
        new = self.pool.take(count, sequence.namespace.salt)
        if not is_last:
            self.pool.release([source])
        return new, (RowCopy(source.block_id, new[0].block_id, num_rows),)

    def append_slots(self, sequence: TokenSequence, num_new_tokens: int = 1) -> bool:
        """Give a running sequence slots for its next tokens; False, and nothing moved, if short.

        Costs next to nothing while the last block has room. Raises CacheError when the
        sequence holds no blocks or has not so many tokens.
        """
        end = sequence.num_computed_tokens + num_new_tokens
        if num_new_tokens < 1 or end > len(sequence.token_ids):
            check_count(sequence, num_new_tokens, sequence.num_computed_tokens)
        if end < sequence.capacity and sequence.holder is self._mark:
            sequence.step = self._step
            sequence.num_computed_tokens = end
            return True
        if sequence.holder is not self._mark:
            raise CacheError(f"{sequence.request_id!r} holds no blocks: allocate_slots comes first")
        if self._caching:
            sequence.cut(self.block_size)  # for naming; it may raise, so before anything moves
        if end > sequence.capacity:
            num_new = -(-(end - sequence.capacity) // self.block_size)
            if num_new > len(self.pool.free):
                return False
            new = self.pool.take(num_new, sequence.namespace.salt)
            sequence.blocks += new
            sequence.block_ids += block_ids(new)
            sequence.capacity += num_new * self.block_size
        self._extend_to(sequence, end)
        if sequence.in_progress is not None or sequence.num_indexed < len(sequence.keys):
            self._in_progress.announce(sequence)
        return True

    def _extend_to(self, sequence: TokenSequence, end: int) -> None:
        sequence.step = self._step
        sequence.num_computed_tokens = end
        full = end // self.block_size
        if full > sequence.num_indexed and self._caching and sequence.is_stored:
            self._indexer.index_full_blocks(sequence, full)

    # The end of a step, and of a sequence

    def commit_step(self) -> None:
        """The K/V of every slot given since the last step are written."""
        self.pool.index.commit()
        self.stats.commit()
        self._step += 1

    def fail_step(self) -> list[TokenSequence]:
        """The step's K/V were not written: end its sequences and keep nothing it computed.

        Returns the sequences that had slots in the step and hold no blocks any more.
        """
        failed = [s for s in self._sequences.values() if s.step == self._step]
        index = self.pool.index
        filled = dict.fromkeys(b for s in failed for b in s.blocks if b in index.unwritten)
        self.pool.forget(list(filled))
        index.commit()
        self.stats.take_back()
        self._step += 1
        for sequence in failed:
            self._give_back(sequence)
        return failed

    def reset(self) -> None:
        """End all sequences and forget everything cached, whatever state an exception left."""
        for sequence in self._sequences.values():
            sequence.give_up()
        self._sequences = {}
        self._in_progress = BlocksInProgress()
        self.pool.clear()
        self.stats.take_back()
        self._step += 1

    def free(self, sequence: TokenSequence) -> None:
        """The sequence holds its blocks no longer; full ones stay cached, last in line first.

        The rows in its last block stay too, to be copied by a prompt that goes on from there.
        Raises CacheError for a sequence that holds none, or one whose step is under way.
        """
        self._check_out_of_step(sequence)
        if self._caching and self.config.partial_hits and sequence.is_stored:
            self._indexer.keep_partial(sequence)
        self._give_back(sequence)

    def discard(self, sequences: Sequence[TokenSequence]) -> None:
        """The sequences hold their blocks no longer, and nothing that they computed is kept.

        What they hit when they were admitted stays cached, and so does a block that somebody
        else holds. May be called within a step, which goes on for the others. Raises CacheError
        for a sequence that holds no blocks.
        """
        for sequence in sequences:
            self._check_known(sequence)
        unwritten = self.pool.index.unwritten
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        computed: dict[KVCacheBlock, None] = {}  # in this step, or since the admission
        for one in sequences:
            computed.update(dict.fromkeys(b for b in one.blocks if b in unwritten))
            computed.update(dict.fromkeys(one.blocks[one.num_reused :]))
        # First of all, since a block that is freed would leave its identity to a copy of these.
        self.pool.forget([b for b in computed if b.node is not None and b.ref_cnt == held[b]])
        for sequence in sequences:
            self._give_back(sequence)
        unwritten.difference_update([b for b in computed if b.node is None])

    def _check_known(self, sequence: TokenSequence) -> None:
        if not self.is_known(sequence):
            raise CacheError(f"sequence {sequence.request_id!r} holds no blocks; freed twice?")

    def _check_out_of_step(self, sequence: TokenSequence) -> None:
        self._check_known(sequence)
        if sequence.step == self._step:
            name = sequence.request_id
            raise CacheError(f"{name!r} is in a step: commit_step or fail_step comes first")

    def _give_back(self, sequence: TokenSequence) -> None:
        self._in_progress.withdraw(sequence)
        for mark in sequence.marks:
            self.pool.free.retain(sequence.marked(mark, self.block_size), mark.seconds)
        self.pool.release(sequence.give_up()[::-1])
        del self._sequences[sequence.request_id]

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing done, while a sequence holds blocks."""
        if self._sequences:
            return False
        self.pool.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        check_everything(self.config, self.pool, self.sequences)
        assert all(self.is_known(sequence) for sequence in self.sequences), "one has no mark"
        self._in_progress.check(self.sequences)

    def take_events(self) -> list[CacheEvent]:
        """Events of cached blocks since the last call, oldest first."""
        events, self.pool.events = self.pool.events, []
        return events


def check_admission(
    sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None, pool: BlockPool
) -> None:
    """Raise CacheError if the sequence cannot be admitted to the pool with this lookup."""
    name = sequence.request_id
    if sequence.blocks:
        raise CacheError(f"sequence {name!r} holds blocks of another manager")
    start = 0
    if computed is not None:
        if computed.sequence is not sequence:
            raise CacheError(f"the lookup given for {name!r} is another sequence's")
        check_source(computed, pool)
        if computed.version != pool.version:
            raise CacheError(f"the lookup of {name!r} is older than an eviction: look again")
        start = computed.num_tokens
    check_count(sequence, num_new_tokens, start)


def check_source(computed: ComputedBlocks, pool: BlockPool) -> None:
    """Raise CacheError if the lookup is another pool's."""
    if computed.source is not pool.index:
        name = computed.sequence.request_id
        raise CacheError(f"the lookup of {name!r} is another manager's: look again")


def check_count(sequence: TokenSequence, num_new_tokens: int, start: int) -> None:
    """Raise CacheError unless from token `start` on the sequence has so many tokens."""
    left = len(sequence.token_ids) - start
    if not 1 <= num_new_tokens <= left:
        raise CacheError(
            f"{num_new_tokens} slots asked for {sequence.request_id!r}; "
            f"from 1 to {left} tokens are left"
        )
