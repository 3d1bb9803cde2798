"""The pool's blocks and their tiers: offers to stores, and loads from them.

A step's blocks are offered a few at a time when they are written, and all when no request is left.
If the saver has no room then, a block is offered again just before the pool reuses it. Its bytes
are copied in the engine's thread, and saved in the saver's.

A block's bytes are those of its K/V, followed by those of its rows: the values that a stage of a
pipeline made of the block's tokens for the next stage, without which its K/V are useless there. One
record holds both, so a store has either both or nothing.

A load is a sequence of the cache that is not computed: it takes blocks, they get their rows from
the store, and when all are there it gives them back, cached. So a request with the same beginning
waits for a load as it waits for another request that computes its prefix, and hits the loaded
blocks like any others. A load takes blocks only if they suffice for its request.

    queue     a request arrives: look for the blocks that the pool lacks, in the loader's thread
    take_in   between two steps: put arrived blocks into the pool
    reach     as a limit, the request waits meanwhile; others run. While the pool has no room for it
              they bypass it a few times, like any request that waits for blocks. A preempted
              request looks for the blocks that the pool lost, once there is room for it again

Blocks that do not come are computed. Nothing here fails a request.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headstart.attention import PagedKVMemory
from headstart.cache import BlockHash, KVCacheManager, TokenSequence, UnsavedBlock, UnsavedBlocks
from headstart.engine.request import Request, RequestGroup
from headstart.tiers import LoadedBlock, Loader, LoadJob, Saver, StoredBlock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOGETHER = 32  # blocks that are copied at once
_LEAST_TOKENS = 32  # of a step that shows how fast prompts are computed
_WEIGHT = 0.3  # of the last step
_LONGEST_TEXT = 80  # characters of a block

BlockText = Callable[[Sequence[int]], str]
"""Returns the text of some tokens from anywhere in a prompt. Raises nothing."""


class BlockRows(Protocol):
    """Rows that are stored with K/V.

    layout: their stage, and the order of a block's bytes; part of the fingerprint. title: the same
    for people. nbytes: of one block, may be 0.
    """

    layout: str
    title: str
    nbytes: int

    def read(self, blocks: Sequence[UnsavedBlock]) -> Sequence[bytes | None]:
        """Return the rows of each block; None for a block whose rows are not there."""
        ...

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Take rows, as `read` returned them, of the sequence's blocks from `first` on."""
        ...


class BlockPayload:
    """Bytes of the pool's blocks, to read and write. rows: None for K/V alone."""

    def __init__(self, memory: PagedKVMemory, rows: BlockRows | None = None) -> None:
        self.rows = rows
        self.nbytes = memory.block_bytes + (rows.nbytes if rows is not None else 0)
        """Bytes of one block."""
        self.on_cpu = memory.device.type == "cpu"
        self._memory = memory

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[memoryview | None]:
        """Return a copy of each block; None for a block without its rows, which is not saved."""
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
        """Write the sequence's blocks from `first` on, which have these ids."""
        size = self._memory.block_bytes
        if self.rows is not None:  # before their K/V can be found
            self.rows.write(sequence, first, [payload[size:] for payload in payloads])
        self._memory.write_blocks(block_ids, [payload[:size] for payload in payloads])


def block_text(tokenizer: PreTrainedTokenizerBase | None, is_on: bool) -> BlockText | None:
    """Return the function that formats the text of a block; None if no text is to be stored."""
    if tokenizer is None or not is_on:
        return None

    def format_text(token_ids: Sequence[int]) -> str:
        try:
            # Behind another token, or the first word would lose the space before it.
            anchor, text = (
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for ids in ([token_ids[0]], [token_ids[0], *token_ids])
            )
            return str(text[len(anchor) : len(anchor) + _LONGEST_TEXT])
        except Exception:  # from a tokenizer: a step must not fail for a label
            return ""

    return format_text


class ComputeRate:
    """Tokens of prompts computed in a second: a moving average."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step that computed so many tokens; steps that mostly decode do not count."""
        if tokens < _LEAST_TOKENS:
            return
        rate = tokens / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)


class Offers:
    """Blocks that the store does not have, passed to its saver. Times are in seconds since 1970.

    manager: collects events, which only this object takes. text: formats the text that is stored
    with a block; None to store none. num_dropped: blocks that the pool reused before the saver had
    room for them, or whose rows were gone by then.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        saver: Saver,
        rate: ComputeRate,
        text: BlockText | None,
    ) -> None:
        self.num_dropped = 0
        self._manager = manager
        self._payload = payload
        self._saver = saver
        self._rate = rate
        self._text = text
        self._unsaved = UnsavedBlocks(manager.hasher, with_tokens=text is not None)

    def note(self, asked: float, *, is_saved: bool = False) -> None:
        """Offer the blocks that the step is about to overwrite; call before anything is written.

        asked: when the oldest request of the step came. is_saved: the store has the new blocks.
        """
        events = self._manager.take_events()
        leaving = self._unsaved.note(events, asked, is_saved=is_saved)
        if leaving and not self._offer(leaving):
            self.num_dropped += len(leaving)

    def commit(self) -> None:
        """Note that the blocks which the current step filled are written."""
        self._unsaved.commit()
        if len(self._unsaved) >= _TOGETHER:
            self.flush()

    def roll_back(self) -> None:
        """Note that the current step failed."""
        self._unsaved.roll_back(self._manager.take_events())

    def flush(self) -> None:
        """Offer all that is written, while the saver has room."""
        while blocks := self._unsaved.pending(_TOGETHER):
            if not self._offer(blocks):
                return
            self._unsaved.handed_on(len(blocks))

    def _offer(self, blocks: Sequence[UnsavedBlock]) -> bool:
        """Copy blocks and offer them; return False if the saver has no room."""
        if not self._saver.has_space(len(blocks) * self._payload.nbytes):
            return False
        seconds = self._manager.block_size / self._rate.value if self._rate.value else 0.0
        offered = [
            StoredBlock(
                *(block.name, block.parent, block.depth, seconds, block.requested_at, payload),
                words=self._text(block.token_ids) if self._text and block.token_ids else "",
            )
            for block, payload in zip(blocks, self._payload.read(blocks), strict=True)
            if payload is not None
        ]
        self.num_dropped += len(blocks) - len(offered)
        return not offered or self._saver.offer(offered)


class Load:
    """One prefix on its way from the store.

    first: the block of the prompt that the job begins with. next: the block that is taken in next.
    written: the tiers of the blocks before that which it has put into the pool. sequence: holds the
    blocks; None before the first has arrived. requests: the requests that wait. lacks_room: the
    free blocks do not suffice for its request.
    """

    def __init__(self, request: Request, first: int, job: LoadJob) -> None:
        self.request = request
        self.first = self.next = first
        self.job = job
        self.sequence: TokenSequence | None = None
        self.lacks_room = False
        self.requests = {request}
        self.written: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """True while a request waits for it."""
        return any(request.finish_reason is None for request in self.requests)

    @property
    def has_all(self) -> bool:
        """True if nothing more arrives."""
        return self.job.done and not self.job.arrived

    def segments(self, block_size: int) -> list[tuple[str, range]]:
        """Return the tokens that it has put into the pool, by tier."""
        segments, start = [], self.next - len(self.written)
        for tier, blocks in itertools.groupby(self.written):
            stop = start + len(list(blocks))
            segments.append((tier, range(start * block_size, stop * block_size)))
            start = stop
        return segments


class Loads:
    """The current loads; a `Limit` of the engine's scheduler.

    waiting: the load that a request waits for. before_writing: called when blocks were taken,
    before their rows are overwritten.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        loader: Loader,
        choose: Callable[[int], int],
        before_writing: Callable[[Request, list[LoadedBlock]], None],
    ) -> None:
        self._manager = manager
        self._payload = payload
        self._loader = loader
        self._choose = choose
        self._before_writing = before_writing
        self._loads: dict[BlockHash, Load] = {}
        self.waiting: dict[Request, Load] = {}
        self._tried: dict[Request, int] = {}  # preempted, and how many blocks it hit at its load

    @property
    def are_under_way(self) -> bool:
        """True if a request waits for blocks."""
        return bool(self.waiting)

    def queue(self, group: RequestGroup) -> None:
        """Look for the blocks of a new request's prompt that the pool lacks."""
        request = group.requests[0]
        load = self._begin(request, len(request.sequence.token_ids) - 1)
        if load is not None:
            load.requests.update(group.requests)
            self.waiting |= dict.fromkeys(group.requests, load)

    def _begin(self, request: Request, num_tokens: int) -> Load | None:
        """Look for a request's first tokens that the pool lacks; return None if it has all."""
        sequence = request.sequence
        most = num_tokens // self._manager.block_size
        if not request.reads_cache or most == 0:
            return None
        computed = self._manager.get_computed_blocks(sequence)
        first = len(computed.blocks)
        if first >= most or computed.writer is not None:
            return None
        names = self._manager.block_hashes(sequence)[first:most]
        load = self._loads.get(names[0])
        if load is None or len(load.job.names) < len(names):
            job = self._loader.start(names, self._choose)
            load = self._loads[names[0]] = Load(request, first, job)
        return load

    # As a limit

    def applies(self, request: Request) -> bool:
        return request in self.waiting or request.num_preemptions > 0

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        load = self.waiting.get(request)
        if load is not None:
            return start if load.lacks_room else None
        if request.num_preemptions and start < request.num_read and self._load_again(request):
            return None
        return stop

    def _load_again(self, request: Request) -> bool:
        """Look for the lost blocks of a preempted request; return True if it waits for them.

        Not before there is room for it, or others would take the blocks again; and once for the
        same loss, or a request whose blocks the store does not have would wait forever.
        """
        manager, sequence = self._manager, request.sequence
        if manager.is_known(sequence):
            return False  # it runs
        computed = manager.get_computed_blocks(sequence)
        hit = len(computed.blocks)
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
        """Let a request look for its blocks again after another preemption."""
        self._tried.pop(request, None)

    def leave(self, request: Request) -> None:
        """Stop waiting; a load that no request waits for gives its blocks back."""
        load = self.waiting.get(request)
        if load is None:
            return
        if any(self.waiting.get(other) is load for other in load.requests - {request}):
            del self.waiting[request]
        else:
            self._end(load)

    # Between two steps

    def take_in(self) -> Counter[str]:
        """Put arrived blocks into the pool; return their numbers by tier, to be committed."""
        written: Counter[str] = Counter()
        preferred: LoadJob | None = None
        for load in list(dict.fromkeys(self.waiting.values())):
            if load.is_wanted and self._has_room(load):
                written.update(block.tier for block in self._insert(load))
                preferred = preferred or load.job
        self._loader.prefer(preferred)
        return written

    def end_those_done(self) -> list[Load]:
        """End the loads that have all, or that no request wants any more, and return them.

        Their blocks are committed.
        """
        loads = dict.fromkeys(self.waiting.values())
        ended = [load for load in loads if load.has_all or not load.is_wanted]
        for load in ended:
            self._end(load)
        return ended

    def _insert(self, load: Load) -> list[LoadedBlock]:
        """Take blocks for the arrived ones of a load, and write these; return them."""
        if not load.job.arrived:
            return []
        blocks = self._take_slots(load, self._loader.take(load.job, len(load.job.names)))
        if not blocks:
            return []
        assert load.sequence is not None
        self._before_writing(load.request, blocks)
        ids = load.sequence.block_table()[load.next : load.next + len(blocks)]
        payloads = [block.payload for block in blocks]
        self._payload.write(load.sequence, load.next, ids, payloads)
        load.next += len(blocks)
        load.written += [block.tier for block in blocks]
        return blocks

    def _has_room(self, load: Load) -> bool:
        """Return True if its blocks, arrived or arriving once it is preferred, can be taken in.

        That is if the request could be admitted. One load takes blocks at a time, or two could each
        hold blocks that the other needs.
        """
        if load.sequence is not None:
            return True
        if not (load.job.arrived or load.job.count):
            return False
        if any(other.sequence is not None for other in self.waiting.values()):
            return False
        computed = self._manager.get_computed_blocks(load.request.sequence)
        load.lacks_room = not self._manager.can_admit(computed)
        return not load.lacks_room

    def _take_slots(self, load: Load, blocks: list[LoadedBlock]) -> list[LoadedBlock]:
        """Have the load hold blocks for these; return those that the pool lacks, if it has room."""
        size = self._manager.block_size
        if load.sequence is None:
            wanted = load.request.sequence
            length = len(wanted.token_ids)
            load.sequence = sequence = TokenSequence(
                f"{load.request.group.request_id}/load",
                wanted.token_ids,
                adapter=wanted.namespace.adapter,
                salt=wanted.namespace.salt,
                # Others are of tokens yet to come, in a stage whose inputs arrive one by one.
                items=[item for item in wanted.items if item.offset + item.length <= length],
                public=wanted.public,
            )
            sequence.is_counted = False  # the request that waits is
            computed = self._manager.get_computed_blocks(sequence)
            load.next = len(computed.blocks)
            blocks = blocks[load.next - load.first :] if load.next >= load.first else []
            computed = computed.cut(load.next, size)
            is_new = computed.writer is None and blocks
            if is_new and self._manager.allocate_slots(sequence, len(blocks) * size, computed):
                return blocks
        elif self._manager.append_slots(load.sequence, len(blocks) * size):
            return blocks
        self._loader.cancel(load.job)
        return []

    def _end(self, load: Load) -> None:
        """Release all that the load and its waiting requests hold."""
        self._loader.cancel(load.job)
        if load.sequence is not None and self._manager.is_known(load.sequence):
            self._manager.free(load.sequence)
        if self._loads.get(load.job.names[0]) is load:
            del self._loads[load.job.names[0]]
        for request in load.requests:
            if self.waiting.get(request) is load:
                del self.waiting[request]

    def end_all(self) -> None:
        """End every load; blocks in the pool stay."""
        self._tried.clear()
        for load in {*self._loads.values(), *self.waiting.values()}:
            self._end(load)
