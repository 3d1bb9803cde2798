"""The KV cache manager, which allocates blocks to sequences and finds cached blocks by prefix.

Calls of an engine, in the order of a request:

    get_computed_blocks   look up the cached prefix of a new sequence; changes nothing
    allocate_slots        hold the hits, take new blocks, index the blocks that the step fills
    append_slots          give a running sequence slots for its next tokens
    commit_step           note that the step's K/V are written
    fail_step             instead of commit_step: cache nothing of the step, end its sequences
    free                  release the blocks; their content stays until it is evicted

A full block is indexed before the step that fills it runs, so other sequences of that step can hit
it. A partial block is indexed when its request ends.

Source: "Automatic Prefix Caching" (vLLM v1 design), operations.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from headstart.cache.block import (
    Checkpoint,
    KVCacheBlock,
    PrefixNode,
    RowCopy,
    block_ids,
    count_free,
)
from headstart.cache.config import CacheConfig
from headstart.cache.events import CacheEvent
from headstart.cache.free_queue import Clock
from headstart.cache.groups import LayerGroup
from headstart.cache.hasher import BlockHasher
from headstart.cache.identity import BlockHash, BlockKey, Namespace
from headstart.cache.index import PathSegment, PrefixIndex
from headstart.cache.indexing import index_blocks, index_partial
from headstart.cache.invariants import check_everything
from headstart.cache.lookup import (
    Allocation,
    ComputedBlocks,
    PartialHit,
    explain_end,
    find_branch,
    find_continuation,
    find_partial,
    is_in_other_salt,
    longest_head,
)
from headstart.cache.pool import BlockPicture, BlockPool
from headstart.cache.sequence import TokenSequence, check_count
from headstart.cache.states import StatePool
from headstart.cache.stats import MissExplanation, MissReason, PrefixCacheStats
from headstart.cache.windows import WindowPool
from headstart.errors import CacheError, ConfigError
from headstart.mypyc_hints import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager:
    """KV blocks, which are allocated to sequences and found again by prefix identity.

    Not thread-safe. A method that raises CacheError has changed nothing. After any other exception,
    such as Ctrl-C in the middle of a method, call `reset`.
    """

    def __init__(
        self, config: CacheConfig, hasher: BlockHasher | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Create a manager of empty blocks. `events` and `block_hashes` need a `hasher`.

        Raises ConfigError if the hasher is missing or has another block size.
        """
        if config.events and hasher is None:
            raise ConfigError("events need hashes; pass a BlockHasher")
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
        self.pool.hasher = hasher if config.events else None
        self.stats = PrefixCacheStats(eviction_ages=self.pool.ages)
        self.shares = self.pool.shares
        self.states: StatePool | None = None
        if config.num_states:
            self.states = StatePool(
                config.num_states,
                max(1, config.state_interval // config.block_size) * config.block_size,
                config.block_size,
                only_borders=config.states_at_borders,
            )
        self.windows: WindowPool | None = None
        if config.num_window_blocks:
            self.windows = WindowPool(config.num_window_blocks, config.window, config.block_size)
        self.group: LayerGroup | None = self.states or self.windows
        self.pool.group = self.group
        self._caching = config.enable_prefix_caching
        self._sequences: dict[str, TokenSequence] = {}
        self._holder = object()  # the `holder` of sequences that hold blocks here
        # Maps the (parent, key) of a full block to the sequence that will compute the block. A
        # sequence has at most one entry, for its next full block. This suffices, because a lookup
        # of the same prefix hits all earlier blocks, and so ends at this block.
        self._in_progress: dict[tuple[PrefixNode | Namespace, BlockKey], TokenSequence] = {}
        self._step = 0

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds, cached blocks included."""
        return len(self.pool.free)

    def count_protected(self, taker: str | None, pending: Mapping[str, int]) -> int:
        """Return the number of free cached blocks within the shares of owners other than `taker`.

        A request of `taker` must not evict them. pending: the owners that share the pool, each with
        the number of blocks that its running requests still need.
        """
        return self.pool.free.count_protected(taker, pending)

    @property
    def num_evictions(self) -> int:
        """The number of cached blocks that were evicted since the start."""
        return self.pool.num_evicted

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences that hold blocks."""
        return tuple(self._sequences.values())

    def is_known(self, sequence: TokenSequence) -> bool:
        """Return True if this sequence object holds blocks; an equal id is not enough."""
        return sequence.holder is self._holder

    @property
    def _version(self) -> int:
        """A number that changes with each eviction, so that a stale lookup is recognized."""
        dropped = self.group.num_dropped if self.group is not None else 0
        return self.pool.version + dropped

    def get_computed_blocks(self, sequence: TokenSequence) -> ComputedBlocks:
        """Look up the sequence's cached prefix. Changes neither statistics nor the eviction order.

        The result never covers the last token. Costs about 0.1 us per cached block.
        """
        version, index = self._version, self.pool.index
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
            writing = self._in_progress.get((parent, keys[depth]))
            writer = writing.request_id if writing is not None else None
        partial = None
        if node is not None and self.config.partial_hits:
            partial = find_partial(index, sequence, node, depth, self.block_size)
            num_tokens += partial.num_rows if partial is not None else 0
        computed = ComputedBlocks(
            sequence, blocks, num_tokens, partial, writer, node, version, index
        )
        return computed if self.group is None else self.group.resume(computed, num_tokens)

    def cut(self, computed: ComputedBlocks, count: int) -> ComputedBlocks:
        """Return a lookup truncated to its first `count` blocks."""
        computed = computed.cut(count, self.block_size)
        if self.group is None:
            return computed
        return self.group.resume(computed, computed.known_tokens)

    def save_fork(self, computed: ComputedBlocks) -> bool:
        """Let the step under way save a checkpoint where the lookup's cached K/V end.

        After the step, the sequence can resume there. Return False if the step saves no checkpoint,
        for example because it does not compute that position.
        """
        return self.group is not None and self.group.save_fork(computed, self._step)

    def find_tail(self, checkpoint: Checkpoint) -> KVCacheBlock | None:
        """Return the written block with the rows between the last block border and a checkpoint.

        None if the checkpoint is at a border, if a request is still filling the block, or if the
        block was evicted.
        """
        node, key = checkpoint.node, checkpoint.key
        hit = longest_head(self.pool.index, node, key) if node is not None and key else None
        rows = checkpoint.position % self.block_size
        return hit.block if hit is not None and hit.num_rows == rows else None

    def explain(self, sequence: TokenSequence, *, across_salts: bool = False) -> MissExplanation:
        """Return the reason why a lookup of the sequence does not hit more tokens.

        across_salts: also search blocks of other tenants. Only the operator may see the result.
        """
        computed = self.get_computed_blocks(sequence)
        explanation = self._explain(computed)
        is_evicted = explanation.reason is MissReason.EVICTED
        if across_salts and not is_evicted and is_in_other_salt(self.pool.index, computed):
            return MissExplanation(MissReason.SALT, explanation.position)
        return explanation

    def _explain(self, computed: ComputedBlocks | None) -> MissExplanation:
        if not self._caching:
            return MissExplanation(MissReason.DISABLED, 0)
        group_reason = self.group.miss_reason if self.group is not None else MissReason.STATE
        return explain_end(self.pool.index, computed, self.block_size, group_reason)

    def block_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """Return the portable hashes of the sequence's full blocks, cached or not.

        Raises CacheError for a manager without a `BlockHasher`.
        """
        if not self._has_hasher:
            raise CacheError("block_hashes needs a BlockHasher; pass one to the manager")
        keys = sequence.cut(self.block_size)  # cutting may change the root
        return self.hasher.of_keys(sequence.root, keys)

    def picture(self) -> list[BlockPicture]:
        """Return the state of every block, by block id, for drawing."""
        return self.pool.picture()

    def held_blocks(self) -> list[int]:
        """Return the ids of the blocks that sequences hold; reads every block."""
        return block_ids([block for block in self.pool.blocks if block.ref_cnt])

    def path_segments(self) -> list[PathSegment]:
        """Return the paths between forks of the tree of cached prefixes; reads every block."""
        return self.pool.index.path_segments()

    # Allocation

    def fits(self, sequence: TokenSequence) -> bool:
        """Return True if the empty pool can hold all tokens of the sequence."""
        return len(sequence.token_ids) <= self.config.num_blocks * self.block_size

    def can_admit(self, computed: ComputedBlocks, num_new_tokens: int = 0) -> bool:
        """Return True if blocks and states suffice for all tokens of the looked-up sequence.

        Window blocks must suffice for a window and for the `num_new_tokens` tokens of a step.
        Raises CacheError for a lookup of another manager.
        """
        self._check_source(computed)
        if self.group is not None and not self.group.can_admit(computed, num_new_tokens):
            return False
        blocks = -(-len(computed.sequence.token_ids) // self.block_size)
        needed = blocks - len(computed.blocks) + count_free(computed.blocks)
        return needed <= len(self.pool.free)

    def allocate_slots(
        self, sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None = None
    ) -> Allocation | None:
        """Admit a sequence: hold its hits, and give it slots for the next `num_new_tokens` tokens.

        Without `computed` the sequence reuses nothing. Returns None, and changes nothing, if too
        few blocks are free; see `fits`. Raises CacheError if the sequence already holds blocks, if
        `computed` is stale or not of this sequence and manager, or if the sequence has fewer than
        `num_new_tokens` tokens left.
        """
        self._check_admission(sequence, num_new_tokens, computed)
        hits, hit_tokens = (computed.blocks, computed.num_tokens) if computed else ([], 0)
        end = hit_tokens + num_new_tokens
        num_new = max(0, -(-end // self.block_size) - len(hits))
        if num_new + count_free(hits) > len(self.pool.free):
            return None
        group = self.group
        if group is not None and not group.can_start(computed, end):
            return None
        missed = self._explain(computed)
        if sequence.is_counted:
            self.stats.admit(sequence, hit_tokens, missed)
        self._sequences[sequence.request_id] = sequence
        sequence.holder = self._holder
        self.pool.touch(hits)
        partial = computed.partial if computed is not None else None
        source_window = group.window_block(partial.block) if group is not None and partial else -1
        new = self._take(sequence, num_new, partial)
        sequence.blocks = hits + new
        sequence.block_ids = block_ids(sequence.blocks)
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.num_indexed = sequence.num_reused = len(hits)
        sequence.node = computed.node if computed is not None and hits else None
        if group is not None:
            group.start(sequence, computed, end)
            sequence.num_computed_tokens = hit_tokens
        if num_new_tokens:  # otherwise the sequence is not in this step
            self._extend_to(sequence, end)
        self._announce(sequence)
        copies = () if partial is None else _copy_head(sequence, len(hits), partial, source_window)
        return Allocation(copies, missed)

    def _check_admission(
        self, sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None
    ) -> None:
        name = sequence.request_id
        if name in self._sequences:
            raise CacheError(f"sequence {name!r} holds blocks already")
        if sequence.blocks:
            raise CacheError(f"sequence {name!r} holds blocks of another manager")
        if computed is not None:
            if computed.sequence is not sequence:
                raise CacheError(f"the lookup passed for {name!r} belongs to another sequence")
            self._check_source(computed)
            if computed.version != self._version:
                raise CacheError(f"the lookup of {name!r} is older than an eviction; repeat it")
        if num_new_tokens or not sequence.is_loaded:  # a loaded sequence may need none
            check_count(sequence, num_new_tokens, computed.num_tokens if computed else 0)
        if self._caching:
            sequence.cut(self.block_size)  # before any change, because it may raise

    def _check_source(self, computed: ComputedBlocks) -> None:
        if computed.source is not self.pool.index:
            name = computed.sequence.request_id
            raise CacheError(f"the lookup of {name!r} belongs to another manager")

    def _take(
        self, sequence: TokenSequence, count: int, partial: PartialHit | None
    ) -> list[KVCacheBlock]:
        """Take new blocks. The rows of a partial hit, if any, will be copied to the first of them.

        The copy counts as a use of its source block. While the new blocks are taken, the source is
        held, so that it is not one of them. If the sequence needs all free blocks, the source is
        not held and becomes a new block. This is safe because the copy reads its rows before the
        step overwrites them.
        """
        if partial is None:
            return self.pool.take(count, sequence.namespace.salt)
        source = partial.block
        needs_source = source.ref_cnt == 0 and len(self.pool.free) == count
        self.pool.touch([source])
        if needs_source:
            self.pool.release([source])
        new = self.pool.take(count, sequence.namespace.salt)
        if not needs_source:
            self.pool.release([source])
        return new

    def append_slots(
        self, sequence: TokenSequence, num_new_tokens: int = 1, num_drafted: int = 0
    ) -> bool:
        """Give a running sequence slots for its next tokens, and for drafted tokens after them.

        Drafted tokens are not part of the sequence yet: call `accept` after the step. Returns
        False, and changes nothing, if too few blocks are free. Fast while the last block has free
        slots. Raises CacheError if the sequence holds no blocks, or has fewer than `num_new_tokens`
        tokens left.
        """
        end = sequence.num_computed_tokens + num_new_tokens
        if num_new_tokens < 1 or end > len(sequence.token_ids):
            check_count(sequence, num_new_tokens, sequence.num_computed_tokens)
        stop = end + num_drafted
        has_slots = stop < sequence.capacity and sequence.holder is self._holder
        group = self.group
        if has_slots and (group is None or group.has_slots(sequence, stop)):
            sequence.step = self._step
            sequence.num_computed_tokens = end
            return True
        if sequence.holder is not self._holder:
            raise CacheError(f"{sequence.request_id!r} holds no blocks: allocate_slots comes first")
        if self._caching:
            sequence.cut(self.block_size)  # before any change, because it may raise
        num_new = max(0, -(-(stop - sequence.capacity) // self.block_size))
        if num_new > len(self.pool.free):
            return False
        if group is not None and not group.extend(sequence, stop):
            return False
        if num_new:
            new = self.pool.take(num_new, sequence.namespace.salt)
            sequence.blocks += new
            sequence.block_ids += block_ids(new)
            sequence.capacity += num_new * self.block_size
        self._extend_to(sequence, end)
        if sequence.in_progress is not None or sequence.num_indexed < len(sequence.keys):
            self._announce(sequence)
        return True

    def accept(self, sequence: TokenSequence, count: int) -> None:
        """Note, after the step, that `count` drafted tokens were appended to the sequence.

        The step has written their K/V. The slots of the other drafted tokens are released.
        """
        end = sequence.num_computed_tokens + count
        if count and self._caching:
            sequence.cut(self.block_size)
        self._extend_to(sequence, end)
        self.pool.index.commit()
        num_blocks = -(-end // self.block_size)
        if self.group is not None:
            self.group.accept(sequence, num_blocks)
        surplus = sequence.blocks[num_blocks:]
        if surplus:
            del sequence.blocks[num_blocks:], sequence.block_ids[num_blocks:]
            sequence.capacity = num_blocks * self.block_size
            self.pool.release(surplus[::-1])
        sequence.step = -1

    def draft(self, sequence: TokenSequence, count: int) -> list[int]:
        """Return up to `count` tokens that followed the sequence's tokens in another sequence.

        Other tenants' sequences are not read.
        """
        return find_continuation(self.pool.index, sequence, count) if self._caching else []

    def branch(self, sequence: TokenSequence, count: int) -> list[int]:
        """Return up to `count` tokens that another sequence has after this sequence's hit."""
        return find_branch(sequence, count)

    def share_prefix(self, sequences: Sequence[TokenSequence], num_tokens: int) -> bool:
        """Return True if two of the sequences share the block of position `num_tokens`."""
        index = num_tokens // self.block_size
        held = [s.block_ids[index] for s in sequences if len(s.block_ids) > index]
        return len(set(held)) < len(held)

    # The index

    def _extend_to(self, sequence: TokenSequence, end: int) -> None:
        """Note that this step computes tokens up to `end`; index the new full blocks."""
        start = sequence.num_computed_tokens
        sequence.step = self._step
        sequence.num_computed_tokens = end
        full = end // self.block_size
        if full > sequence.num_indexed and self._caching and sequence.is_stored:
            index_blocks(self.pool, sequence, full, deduplicate=self.config.deduplicate)
        if self.group is not None:
            self.group.compute(sequence, start, end)

    def _announce(self, sequence: TokenSequence) -> None:
        """Announce the sequence's next full block, so that other sequences can wait for it.

        Announces nothing if the block's tokens are not known yet, or if it will not be stored.
        """
        self._withdraw(sequence)
        if sequence.num_indexed < len(sequence.keys) and sequence.is_stored:
            block = (sequence.node or sequence.root, sequence.keys[sequence.num_indexed])
            if block not in self._in_progress:
                self._in_progress[block] = sequence
                sequence.in_progress = block

    def _withdraw(self, sequence: TokenSequence) -> None:
        if sequence.in_progress is not None:
            del self._in_progress[sequence.in_progress]
            sequence.in_progress = None

    # The end of a step, and of a sequence

    def commit_step(self) -> None:
        """Note that the step has written the rows of all its slots."""
        self.pool.index.commit()
        if self.group is not None:
            self.group.commit()
        self.stats.commit()
        self._step += 1

    def fail_step(self) -> list[TokenSequence]:
        """End and return the sequences of a step that failed; cache nothing of the step."""
        failed = [s for s in self._sequences.values() if s.step == self._step]
        index = self.pool.index
        filled = dict.fromkeys(b for s in failed for b in s.blocks if b in index.unwritten)
        self.pool.forget(list(filled))
        index.commit()
        if self.group is not None:
            self.group.fail()
        self.stats.roll_back()
        self._step += 1
        for sequence in failed:
            self._release(sequence)
        return failed

    def reset(self) -> None:
        """End all sequences and empty the cache, even if an exception left it half changed."""
        for sequence in self._sequences.values():
            sequence.pop_blocks()
        self._sequences = {}
        self._in_progress = {}
        self.pool.clear()
        self.stats.roll_back()
        self._step += 1

    def free(self, sequence: TokenSequence) -> None:
        """Release a sequence's blocks. They stay cached; the last block is evicted first.

        A prompt that continues the sequence can copy the rows of its last, partial block. Raises
        CacheError for a sequence that holds no blocks, or that the step under way computes.
        """
        self._check_known(sequence)
        if sequence.step == self._step:
            name = sequence.request_id
            raise CacheError(f"{name!r} is in a step: commit_step or fail_step comes first")
        if self._caching and self.config.partial_hits and sequence.is_stored:
            index_partial(self.pool, sequence)
        self._release(sequence, is_cached=self._caching)

    def discard(self, sequences: Sequence[TokenSequence]) -> None:
        """Release the sequences' blocks, and cache nothing that they computed.

        Blocks that they hit at admission and blocks that other sequences hold stay cached. May be
        called within a step, which continues for the other sequences. Raises CacheError for a
        sequence that holds no blocks.
        """
        for sequence in sequences:
            self._check_known(sequence)
        unwritten = self.pool.index.unwritten
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        new: dict[KVCacheBlock, None] = {}  # computed in this step, or since the admission
        for sequence in sequences:
            new.update(dict.fromkeys(b for b in sequence.blocks if b in unwritten))
            new.update(dict.fromkeys(sequence.blocks[sequence.num_reused :]))
        # The identity of a forgotten block moves to its first copy, which may be one of these
        # blocks. So forget all of them before the first is freed.
        self.pool.forget([b for b in new if b.node is not None and b.ref_cnt == held[b]])
        for sequence in sequences:
            if self.group is not None:
                self.group.discard(sequence)
            self._release(sequence)
        unwritten.difference_update([b for b in new if b.node is None])

    def _check_known(self, sequence: TokenSequence) -> None:
        if not self.is_known(sequence):
            raise CacheError(f"sequence {sequence.request_id!r} holds no blocks; freed twice?")

    def _release(self, sequence: TokenSequence, *, is_cached: bool = False) -> None:
        """Release the sequence's blocks; with `is_cached` its last state becomes a checkpoint."""
        self._withdraw(sequence)
        if self.group is not None:
            self.group.end(sequence, is_cached=is_cached)
        for mark in sequence.marks:
            marked = min(sequence.num_indexed, mark.num_tokens // self.block_size)
            self.pool.free.retain(sequence.blocks[:marked], mark.seconds)
        self.pool.release(sequence.pop_blocks()[::-1])
        del self._sequences[sequence.request_id]

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; return False, and change nothing, while a sequence holds blocks."""
        if self._sequences:
            return False
        self.pool.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        check_everything(self.config, self.pool, self.sequences)
        if self.group is not None:
            self.group.check()
        assert all(self.is_known(s) for s in self.sequences), "a sequence has another holder"
        for block, sequence in self._in_progress.items():
            name = sequence.request_id
            following = (sequence.node or sequence.root, sequence.keys[sequence.num_indexed])
            assert sequence.in_progress == block == following, f"{name} announces another block"
            assert self._sequences.get(name) is sequence, f"{name} announces a block after its end"

    def take_events(self) -> list[CacheEvent]:
        """Return the events of cached blocks since the last call, oldest first."""
        events, self.pool.events = self.pool.events, []
        return events


def _copy_head(
    sequence: TokenSequence, index: int, partial: PartialHit, source_window: int
) -> tuple[RowCopy, ...]:
    """Return the copy of a partial hit's rows to the sequence's block `index`, if it is needed.

    The rows of the window block are copied too, unless the sequence uses a cached window block. A
    cached block that the sequence has switched to has the rows already. Then only the window rows
    are copied: the `RowCopy` has the source block as its target, so copying the other rows changes
    nothing. source_window: the window block of the partial hit's block.
    """
    source, window = partial.block.block_id, sequence.window
    target_window = window.ids[index] if window is not None and index not in window.shared else -1
    if index not in sequence.switched:
        target = sequence.block_ids[index]
    elif target_window >= 0:
        target = source
    else:
        return ()
    return (RowCopy(source, target, partial.num_rows, source_window, target_window),)
