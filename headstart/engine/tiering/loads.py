"""The pool's blocks and their tiers: offers to stores, and loads from them.

Computed blocks are offered to the saver in batches. When no request is left, all remaining blocks
are offered. If the saver has no space, a block is offered again just before the pool reuses it. The
engine's thread copies the bytes, and the saver's thread saves them.

A block's bytes are its K/V, followed by its rows: the outputs of a pipeline's stage for the block's
tokens, which the next stage needs. One record holds both, so a store has either both or neither.

A load uses a cache sequence that no step computes. The sequence takes blocks, and the store's bytes
are written to these. When all bytes are written, the sequence is freed, and its blocks stay cached.
The request that waited for the load then hits these blocks, as if another request had computed
them. A load takes blocks only if the free blocks suffice for its whole request.

    queue     a request arrives: look up the blocks that the pool lacks, in the loader's thread
    poll      between two steps: write arrived blocks to the pool
    reach     as a limit: the request waits for its load, and other requests bypass it. If the pool
              lacks space for the load, the number of bypasses is limited. When there is space for a
              preempted request, its evicted blocks are looked up again

A model with recurrent layers resumes only from a state (`headstart/engine/tiering/states.py`). Its
load first loads the deepest stored state, and then only the blocks before this state. The state is
written to the slot of the load's sequence. The slot becomes a checkpoint when the load ends.

Blocks that do not arrive are computed. An error of a load ends no request.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headstart.attention import PagedKVMemory
from headstart.cache import (
    BlockHash,
    BlockKey,
    ComputedBlocks,
    KVCacheManager,
    TokenSequence,
    UnsavedBlock,
    UnsavedBlocks,
)
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tiering.states import StateStores, name_state, search_states
from headstart.models.tokenizer import Tokenizer
from headstart.tiers.store import LoadedBlock, StoredBlock
from headstart.tiers.transfers import Loader, LoadJob, Saver

_BATCH = 32  # blocks that are copied and offered at once
_MIN_TOKENS = 32  # steps with fewer tokens are not measured
_WEIGHT = 0.3  # weight of the last step in the moving average
_MAX_TEXT = 80  # characters stored with a block

BlockText = Callable[[Sequence[int]], str]
"""Returns the text of consecutive tokens of a prompt. Does not raise."""


class BlockRows(Protocol):
    """Rows that are stored with K/V.

    layout: identifies the stage and the order of a block's bytes; part of the fingerprint. title:
    the display name of the rows. nbytes: bytes of the rows of one block, may be 0.
    """

    layout: str
    title: str
    nbytes: int

    def read(self, blocks: Sequence[UnsavedBlock]) -> Sequence[bytes | None]:
        """Return the rows of each block; None for a block whose rows were dropped."""

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Store rows, as `read` returned them, for the sequence's blocks from `first` on."""


class BlockPayload:
    """Read and write access to the bytes of the pool's blocks. rows: None to store only K/V."""

    def __init__(self, memory: PagedKVMemory, rows: BlockRows | None = None) -> None:
        self.rows = rows
        self.nbytes = memory.block_bytes + (rows.nbytes if rows is not None else 0)
        """Bytes of one block."""
        self.on_cpu = memory.device.type == "cpu"
        self._memory = memory

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[memoryview | None]:
        """Return a copy of each block; None for a block that lacks its rows."""
        rows = self.rows.read(blocks) if self.rows is not None else [b""] * len(blocks)
        ids = [b.block_id for b, data in zip(blocks, rows, strict=True) if data is not None]
        if not ids:
            return [None] * len(blocks)
        copied = self._memory.read_blocks(ids).numpy()
        if self.nbytes > self._memory.block_bytes:
            present = [np.frombuffer(data, dtype=np.uint8) for data in rows if data is not None]
            copied = np.concatenate([copied, np.stack(present)], axis=1)
        payloads = iter(copied)
        return [next(payloads).data if data is not None else None for data in rows]

    def write(
        self,
        sequence: TokenSequence,
        first: int,
        block_ids: Sequence[int],
        payloads: Sequence[memoryview],
    ) -> None:
        """Write bytes to a sequence's blocks from `first` on. block_ids: these blocks' ids."""
        size = self._memory.block_bytes
        if self.rows is not None:  # rows first, before a request can hit the K/V
            self.rows.write(sequence, first, [payload[size:] for payload in payloads])
        self._memory.write_blocks(block_ids, [payload[:size] for payload in payloads])


def block_text(tokenizer: Tokenizer | None, is_on: bool) -> BlockText | None:
    """Return a function that returns the text of a block; None if texts are not stored."""
    if tokenizer is None or not is_on:
        return None

    def format_text(token_ids: Sequence[int]) -> str:
        try:
            # Some tokenizers drop the space before the first word, so put a token before it.
            anchor, text = (
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for ids in ([token_ids[0]], [token_ids[0], *token_ids])
            )
            return str(text[len(anchor) : len(anchor) + _MAX_TEXT])
        except Exception:  # a tokenizer's error must not fail the step
            return ""

    return format_text


class ComputeRate:
    """A moving average of the prompt tokens computed per second."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step; steps with few tokens do not count, since they mostly decode."""
        if tokens < _MIN_TOKENS:
            return
        rate = tokens / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)


@dataclass(eq=False)
class Offers:
    """Offers of unsaved blocks to the saver of the stores.

    manager: the cache manager, whose events only this object may take. text: returns the text that
    is stored with a block; None to store no text. num_dropped: number of blocks that were not
    saved, since the pool reused them before the saver had space, or since their rows were dropped.
    """

    manager: KVCacheManager
    payload: BlockPayload
    saver: Saver
    rate: ComputeRate
    text: BlockText | None
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self._unsaved = UnsavedBlocks(self.manager.hasher, with_tokens=self.text is not None)

    def note(self, requested_at: float, *, is_saved: bool = False) -> None:
        """Record the blocks that the step adds, and offer the blocks that it will overwrite.

        Call before the step writes. requested_at: the arrival of the step's oldest request, in
        seconds since 1970. is_saved: the store has the added blocks, so they are not offered.
        """
        events = self.manager.take_events()
        leaving = self._unsaved.note(events, requested_at, is_saved=is_saved)
        if leaving and not self._offer(leaving):
            self.num_dropped += len(leaving)

    def commit(self) -> None:
        """Note that the current step has written its blocks."""
        self._unsaved.commit()
        if len(self._unsaved) >= _BATCH:
            self.flush()

    def roll_back(self) -> None:
        """Note that the current step failed."""
        self._unsaved.roll_back(self.manager.take_events())

    def flush(self) -> None:
        """Offer all written blocks, as long as the saver has space."""
        while blocks := self._unsaved.pending(_BATCH):
            if not self._offer(blocks):
                return
            self._unsaved.remove(len(blocks))

    def _offer(self, blocks: Sequence[UnsavedBlock]) -> bool:
        """Copy blocks and offer them; return False if the saver has no space."""
        if not self.saver.has_space(len(blocks) * self.payload.nbytes):
            return False
        seconds = self.manager.block_size / self.rate.value if self.rate.value else 0.0
        offered = [
            StoredBlock(
                *(block.name, block.parent, block.depth, seconds, block.requested_at, payload),
                text=self.text(block.token_ids) if self.text and block.token_ids else "",
            )
            for block, payload in zip(blocks, self.payload.read(blocks), strict=True)
            if payload is not None
        ]
        self.num_dropped += len(blocks) - len(offered)
        return not offered or self.saver.offer(offered)


class Load:
    """The load of one prefix.

    key: identifies the prefix to load. first: index in the prompt of the first block that the job
    loads. start: number of tokens that would hit without the load. known_tokens: number of tokens
    whose K/V the pool has; more than `start` if the pool has K/V beyond its deepest state. next:
    index of the block that is written to the pool next. written: the tiers of the blocks so far.
    state_tier: the tier of the state that was written to the pool. sequence: holds the blocks; None
    before anything has arrived. requests: the requests that wait for the load. lacks_space: too few
    blocks are free for `request`.
    """

    def __init__(self, request: Request, key: BlockHash, computed: ComputedBlocks, job: LoadJob):
        self.request = request
        self.key = key
        self.first = self.next = len(computed.blocks)
        self.start, self.known_tokens = computed.num_tokens, computed.known_tokens
        self.job = job
        self.state_tier: str | None = None
        self.sequence: TokenSequence | None = None
        self.lacks_space = False
        self.requests = {request}
        self.written: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """True while a request waits for the load."""
        return any(request.finish_reason is None for request in self.requests)

    @property
    def has_all(self) -> bool:
        """True if all blocks that arrived were written, and no more will arrive."""
        is_taken = not self.job.arrived and not self.has_state
        return self.state_tier is not None or (self.job.done and is_taken)

    @property
    def has_state(self) -> bool:
        """True if the state and all blocks before it have arrived."""
        state = self.job.state
        if state is None or state.block is None:
            return False
        return self.job.num_loaded == self.job.count

    @property
    def position(self) -> int:
        """Number of tokens before the state; 0 without a state."""
        state = self.job.state
        return state.match.position if state is not None and state.match is not None else 0

    @property
    def state_name(self) -> BlockHash | None:
        """The name of the state that was written to the pool."""
        state = self.job.state if self.state_tier is not None else None
        return state.match.name if state is not None and state.match is not None else None

    def segments(self, block_size: int) -> list[tuple[str, range]]:
        """Return the ranges of tokens that were written to the pool, with their tiers."""
        if self.state_tier is not None:
            return [(self.state_tier, range(self.start, self.position))]
        segments, start = [], self.next - len(self.written)
        for tier, blocks in itertools.groupby(self.written):
            stop = start + len(list(blocks))
            segments.append((tier, range(start * block_size, stop * block_size)))
            start = stop
        return segments


@dataclass(eq=False)
class Loads:
    """The current loads; a `Limit` of the engine's scheduler.

    choose: takes the number of blocks that are computed if nothing is loaded, and the bytes of the
    load; returns the number of blocks to load, or 0 if computing is faster. before_writing:
    called when a load has taken blocks, before it overwrites them. states: None for a model without
    recurrent layers. waiting: the load that each request waits for.
    """

    manager: KVCacheManager
    payload: BlockPayload
    loader: Loader
    choose: Callable[[int, int], int]
    before_writing: Callable[[Request, list[LoadedBlock]], None]
    states: StateStores | None = None
    waiting: dict[Request, Load] = field(default_factory=dict)
    _loads: dict[BlockHash, Load] = field(default_factory=dict)
    _tried: dict[Request, int] = field(default_factory=dict)  # tokens hit at the last `_load_again`

    @property
    def are_under_way(self) -> bool:
        """True if a request waits for blocks."""
        return bool(self.waiting)

    def queue(self, group: RequestGroup) -> None:
        """Start a load of the blocks of a new request's prompt that the pool lacks."""
        request = group.requests[0]
        load = self._begin(request, len(request.sequence.token_ids) - 1)
        if load is not None:
            load.requests.update(group.requests)
            self.waiting |= dict.fromkeys(group.requests, load)

    def _begin(self, request: Request, num_tokens: int) -> Load | None:
        """Start a load of a request's first tokens; return None if there is nothing to load."""
        sequence = request.sequence
        num_blocks = num_tokens // self.manager.block_size
        if not request.reads_cache or num_blocks == 0:
            return None
        computed = self.manager.get_computed_blocks(sequence)
        if computed.writer is not None:
            return None
        if self.states is not None:
            return self._begin_state(request, num_tokens, computed)
        first = len(computed.blocks)
        if first >= num_blocks:
            return None
        names = self.manager.block_hashes(sequence)[first:num_blocks]
        load = self._loads.get(names[0])
        if load is None or len(load.job.names) < len(names):
            size = self.payload.nbytes
            job = self.loader.start(names, lambda count: self.choose(count, count * size))
            load = self._loads[names[0]] = Load(request, names[0], computed, job)
        return load

    def _begin_state(
        self, request: Request, num_tokens: int, computed: ComputedBlocks
    ) -> Load | None:
        """Start a load of a state deeper than the pool's; return None if none can exist."""
        states, pool, size = self.states, self.manager.states, self.manager.block_size
        assert states is not None and pool is not None
        if computed.num_tokens >= num_tokens or pool.num_slots == 1:
            return None
        has_tail, sequence = states.payload.has_tail, request.sequence
        hashes = self.manager.block_hashes(sequence)[: num_tokens // size]
        is_whole = not has_tail or num_tokens % size == 0
        tail = BlockKey(b"") if is_whole else sequence.cut_partial(num_tokens, size)
        key = name_state(hashes[-1], tail)
        load = self._loads.get(key)
        if load is None:
            search = search_states(computed, num_tokens, hashes, size, has_tail=has_tail)

            def choose(num_skipped: int) -> int:
                count = search.match.num_blocks if search.match is not None else 0
                nbytes = states.payload.nbytes + count * self.payload.nbytes
                return self.choose(num_skipped, nbytes)

            job = self.loader.start(hashes[len(computed.blocks) :], choose, search)
            load = self._loads[key] = Load(request, key, computed, job)
        return load

    # As a limit

    def applies(self, request: Request) -> bool:
        return request in self.waiting or request.num_preemptions > 0

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        load = self.waiting.get(request)
        if load is not None:
            return start if load.lacks_space else None
        if request.num_preemptions and start < request.num_read and self._load_again(request):
            return None
        return stop

    def _load_again(self, request: Request) -> bool:
        """Load the lost blocks of a preempted request; return True if it waits for them.

        A load begins only when there is space for the request, since other requests would otherwise
        take the blocks again. If the load has ended and the request has not run yet, a second load
        begins only if the request hits fewer tokens than before the first. Otherwise, it could wait
        forever for blocks that the store does not have.
        """
        manager, sequence = self.manager, request.sequence
        if manager.is_known(sequence):
            return False  # the request runs already
        computed = manager.get_computed_blocks(sequence)
        hit = computed.num_tokens
        if self._tried.get(request, hit + 1) <= hit or not manager.can_admit(computed):
            return False
        load = self._begin(request, min(request.num_read, len(sequence.token_ids) - 1))
        if load is None:
            return False
        self._tried = {r: n for r, n in self._tried.items() if r.finish_reason is None}
        self._tried[request] = hit
        load.requests.add(request)
        self.waiting[request] = load
        return True

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Allow a load after the request's next preemption."""
        self._tried.pop(request, None)

    def leave(self, request: Request) -> None:
        """Stop waiting for a load; end the load if no other request waits for it."""
        load = self.waiting.get(request)
        if load is None:
            return
        if any(self.waiting.get(other) is load for other in load.requests - {request}):
            del self.waiting[request]
        else:
            self._end(load)

    # Between two steps

    def poll(self) -> Counter[str]:
        """Write arrived blocks to the pool; return their tokens by tier.

        If the result is not empty, the caller must commit the step, even if all counts are 0.
        """
        written: Counter[str] = Counter()
        preferred: LoadJob | None = None
        for load in list(dict.fromkeys(self.waiting.values())):
            if load.is_wanted and self._can_write(load):
                self._insert(load, written)
                preferred = preferred or load.job
        self.loader.prefer(preferred)
        return written

    def end_done(self) -> list[Load]:
        """End and return the loads that are complete, or for which no request waits.

        Call after their blocks are committed.
        """
        loads = dict.fromkeys(self.waiting.values())
        ended = [load for load in loads if load.has_all or not load.is_wanted]
        for load in ended:
            self._end(load)
        return ended

    def _insert(self, load: Load, written: Counter[str]) -> None:
        """Write a load's arrived blocks to the pool; add their tokens to `written`, by tier."""
        has_state = load.has_state  # read before `take`: if True, `take` returns all blocks
        if not load.job.arrived and not has_state:
            return
        blocks = self._take_slots(load, self.loader.take(load.job, len(load.job.names)))
        state = self._take_state(load, len(blocks)) if has_state else None
        if not blocks and state is None:
            return
        assert load.sequence is not None
        self.before_writing(load.request, blocks)
        table = load.sequence.block_table()
        if blocks:
            ids = table[load.next : load.next + len(blocks)]
            payloads = [block.payload for block in blocks]
            self.payload.write(load.sequence, load.next, ids, payloads)
        load.next += len(blocks)
        load.written += [block.tier for block in blocks]
        # Tokens before a state are counted below; an entry of 0 shows that blocks were written.
        tokens = self.manager.block_size if load.job.state is None else 0
        for block in blocks:
            written[block.tier] += tokens
        if state is not None:
            self._write_state(load, load.sequence, state)
            written[state.tier] += load.position - load.start

    def _take_state(self, load: Load, num_blocks: int) -> LoadedBlock | None:
        """Take slots for the last tokens before a state; return the state, or None on failure."""
        depth, num_tail = divmod(load.position, self.manager.block_size)
        if not load.has_state or load.sequence is None or load.next + num_blocks != depth:
            return None  # the load was cancelled
        if num_tail and not self.manager.append_slots(load.sequence, num_tail):
            self.loader.cancel(load.job)
        return self.loader.take_state(load.job)

    def _write_state(self, load: Load, sequence: TokenSequence, state: LoadedBlock) -> None:
        """Write a state into the slot of a load's sequence, and the K/V of its last tokens."""
        pool = self.manager.states
        assert self.states is not None and pool is not None
        depth, num_tail = divmod(load.position, self.manager.block_size)
        block_id = sequence.block_table()[depth] if num_tail else None
        self.states.payload.write(pool.of(sequence).slot, block_id, state.payload)
        pool.load(sequence, is_saved=state.tier == self.states.stores[0].tier)
        load.state_tier = state.tier

    def _can_write(self, load: Load) -> bool:
        """Return True if blocks of a load can be written to the pool.

        The pool must have space for the load's whole request. Only one load holds blocks at a time,
        since two loads could each hold blocks that the other needs.
        """
        if load.sequence is not None:
            return True
        if not (load.job.arrived or load.job.has_work):
            return False
        if any(other.sequence is not None for other in self.waiting.values()):
            return False
        computed = self.manager.get_computed_blocks(load.request.sequence)
        load.lacks_space = not self.manager.can_admit(computed)
        return not load.lacks_space

    def _take_slots(self, load: Load, blocks: list[LoadedBlock]) -> list[LoadedBlock]:
        """Take slots for arrived blocks; return the blocks that the pool lacks.

        If the pool has no space or can no longer use the load, cancel the load and return no
        blocks. The sequence of a load with a state holds all blocks before the state, including
        blocks that were already in the pool.
        """
        size = self.manager.block_size
        if load.sequence is None:
            original = load.request.sequence
            length = len(original.token_ids)
            load.sequence = sequence = TokenSequence(
                f"{load.request.group.request_id}/load",
                original.token_ids,
                adapter=original.namespace.adapter,
                salt=original.namespace.salt,
                # In a pipeline, later items may belong to tokens that have not arrived yet.
                items=[item for item in original.items if item.offset + item.length <= length],
                public=original.public,
            )
            sequence.is_counted = False  # statistics count the waiting request
            sequence.is_loaded = True
            computed = self.manager.get_computed_blocks(sequence)
            load.next = len(computed.blocks)
            if load.job.state is not None:
                load.next = min(load.next, load.position // size)
            blocks = blocks[load.next - load.first :] if load.next >= load.first else []
            computed = computed.cut(load.next, size)
            is_wanted = blocks if load.job.state is None else self._needs_state(load)
            if is_wanted and self.manager.allocate_slots(sequence, len(blocks) * size, computed):
                return blocks
        elif not blocks or self.manager.append_slots(load.sequence, len(blocks) * size):
            return blocks
        self.loader.cancel(load.job)
        return []

    def _needs_state(self, load: Load) -> bool:
        """Return True if the pool can use a load's state.

        It must have all blocks before the load's first block, and no state as deep as the load's.
        """
        computed = self.manager.get_computed_blocks(load.request.sequence)
        first = min(load.first, load.position // self.manager.block_size)
        return load.next >= first and computed.num_tokens < load.position

    def _leave_checkpoint(self, load: Load) -> None:
        """Plan a checkpoint at the end of the stored blocks, if the stores have no state near it.

        A later prompt that branches off at this position can resume from the checkpoint.
        """
        state = load.job.state
        if state is None or self.states is None or not load.job.done:
            return
        end = (load.first + state.num_stored) * self.manager.block_size
        if end > load.known_tokens and end - load.position >= self.states.min_gain:
            for request in load.requests:
                request.sequence.forks = (*request.sequence.forks, end)

    def _end(self, load: Load) -> None:
        """End a load: release its blocks and its waiting requests."""
        self._leave_checkpoint(load)
        self.loader.cancel(load.job)
        if load.sequence is not None and self.manager.is_known(load.sequence):
            self.manager.free(load.sequence)
        if self._loads.get(load.key) is load:
            del self._loads[load.key]
        for request in load.requests:
            if self.waiting.get(request) is load:
                del self.waiting[request]

    def end_all(self) -> None:
        """End all loads; blocks in the pool stay."""
        self._tried.clear()
        for load in {*self._loads.values(), *self.waiting.values()}:
            self._end(load)
