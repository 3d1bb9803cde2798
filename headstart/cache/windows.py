"""The pool of window blocks, which hold the K/V of the layers with a sliding window.

In a layer with a sliding window of w tokens, a token attends to itself and to the w - 1 tokens
before it. So the layer's K/V of older tokens need no memory. A running sequence has window blocks
only for blocks that its next tokens attend to. It releases a window block when no later token
attends to it.

A full window block is attached to the block with the same tokens. A released window block stays
cached until its memory is needed. A request resumes at a position only if all window blocks of the
window before this position are cached.

Most released window blocks are evicted in the order of their release. Windows where later prompts
may branch (at the ends of prompts and replies, at marks, at forks, and at regular intervals) are
evicted after all other window blocks, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headstart.cache.block import Checkpoint, KVCacheBlock
from headstart.cache.groups import LayerGroup
from headstart.cache.lookup import ComputedBlocks
from headstart.cache.sequence import SequenceWindow, TokenSequence
from headstart.cache.stats import MissReason


class WindowPool(LayerGroup):
    """All window blocks, and the blocks to which they are attached.

    width: the number of tokens that a token attends to, itself included.
    """

    miss_reason = MissReason.WINDOW

    def __init__(self, num_blocks: int, width: int, block_size: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.width = width
        self.block_size = block_size
        self._attached: dict[KVCacheBlock, int] = {}
        self._blocks: list[KVCacheBlock | None] = []  # the block of each window block
        self._users: list[int] = []  # number of sequences that use each window block
        self._empty: list[int] = []
        self._evict_first: OrderedDict[int, None] = OrderedDict()  # unused, evicted first
        self._evict_last: OrderedDict[int, None] = OrderedDict()  # unused, evicted last
        self._fresh: set[int] = set()  # attached in the step under way
        self._sequences: dict[TokenSequence, SequenceWindow] = {}
        self.clear()

    def clear(self) -> None:
        self._attached.clear()
        self._blocks = [None] * self.num_blocks
        self._users = [0] * self.num_blocks
        self._empty = list(range(self.num_blocks))[::-1]
        self._evict_first.clear()
        self._evict_last.clear()
        self._fresh.clear()
        self._sequences.clear()

    @property
    def num_free(self) -> int:
        """The number of window blocks that no sequence uses, cached blocks included."""
        return len(self._empty) + len(self._evict_first) + len(self._evict_last)

    @property
    def num_empty(self) -> int:
        """The number of window blocks without content."""
        return len(self._empty)

    def window_block(self, block: KVCacheBlock) -> int:
        return self._attached.get(block, -1)

    def first(self, position: int) -> int:
        """Return the index of the first block that tokens from this position on attend to.

        An engine may compute whole blocks. So the window is measured from the first token in the
        position's block.
        """
        start = position - position % self.block_size
        return max(0, start - self.width + 1) // self.block_size

    def find(
        self, computed: ComputedBlocks, known_tokens: int
    ) -> tuple[int, Checkpoint | None, str | None]:
        """Search backward for a position whose window is cached; see `LayerGroup.find`."""
        blocks, partial = computed.blocks, computed.partial
        end = known_tokens
        if partial is not None and not self._is_written(partial.block):
            end = min(end, len(blocks) * self.block_size)
        for index in range(min(len(blocks), -(-end // self.block_size)) - 1, -1, -1):
            if index < self.first(end):
                break
            if blocks[index] not in self._attached:
                end = index * self.block_size
        return end, None, None

    def _is_written(self, block: KVCacheBlock) -> bool:
        """Return True if a block has a window block that earlier steps have written."""
        block_id = self._attached.get(block)
        return block_id is not None and block_id not in self._fresh

    # Steps

    def can_admit(self, computed: ComputedBlocks, num_new_tokens: int) -> bool:
        """Return True if window blocks suffice for a window and for `num_new_tokens` more tokens.

        The check never requires more window blocks than the pool has.
        """
        start = computed.num_tokens
        limit = (self.first(start) + self.num_blocks) * self.block_size
        end = min(start + self.width + num_new_tokens, len(computed.sequence.token_ids), limit)
        return self.can_start(computed, end)

    def can_start(self, computed: ComputedBlocks | None, end: int) -> bool:
        hits, start = (computed.blocks, computed.num_tokens) if computed is not None else ([], 0)
        return self._has_free(hits, len(hits), self.first(start), end)

    def _has_free(
        self, blocks: Sequence[KVCacheBlock], num_hits: int, first: int, end: int
    ) -> bool:
        """Return True if enough window blocks are free, from block `first` to token `end - 1`.

        The first `num_hits` blocks are hits, which may share window blocks with other sequences.
        """
        stop = -(-end // self.block_size)
        hits = blocks[first : min(stop, num_hits)]
        attached = [self._attached.get(block, -1) for block in hits]
        num_used = sum(block_id >= 0 and self._users[block_id] > 0 for block_id in attached)
        return stop - first - num_used <= self.num_free

    def start(self, sequence: TokenSequence, computed: ComputedBlocks | None, end: int) -> None:
        start, known_tokens = (computed.num_tokens, computed.known_tokens) if computed else (0, 0)
        length = len(sequence.token_ids)
        marks = [mark.num_tokens for mark in sequence.marks]
        planned = [length - 1, known_tokens, *sequence.forks, *marks]
        per_window = self.width // self.block_size + 2
        max_windows = max(1, self.num_blocks // (4 * per_window))  # regular windows of a prompt
        interval = max(4 * self.width, -(-length // (max_windows + 1)))
        window = SequenceWindow(self.first(start), planned, interval)
        sequence.window = self._sequences[sequence] = window
        self._fill(sequence, window, end)

    def has_slots(self, sequence: TokenSequence, end: int) -> bool:
        return end < len(sequence.window_table()) * self.block_size

    def extend(self, sequence: TokenSequence, end: int) -> bool:
        """Move a sequence's window to its next tokens; see `LayerGroup.extend`."""
        window = self._sequences[sequence]
        first = self.first(sequence.num_computed_tokens)
        for index in range(window.first, first):
            self._release(window.ids[index], evict_last=self._is_wanted(window, index))
            window.shared.discard(index)
            window.ids[index] = 0
        window.first = max(first, window.first)
        has_free = self._has_free(sequence.blocks, sequence.num_reused, len(window.ids), end)
        if has_free:
            self._fill(sequence, window, end)
        return has_free

    def _fill(self, sequence: TokenSequence, window: SequenceWindow, end: int) -> None:
        """Add the window blocks for tokens up to `end - 1` to a sequence's window."""
        start, stop = len(window.ids), -(-end // self.block_size)
        window.ids += [self._attached.get(block, -1) for block in sequence.blocks[start:stop]]
        window.ids += [-1] * (stop - len(window.ids))  # blocks without a window block yet
        missing = []
        for index in range(start, stop):  # claim cached window blocks before any is evicted
            if window.ids[index] < 0:
                missing.append(index)
            else:
                window.shared.add(index)
                self._claim(window.ids[index])
        for index in missing:
            window.ids[index] = self._take()

    def _is_wanted(self, window: SequenceWindow, index: int) -> bool:
        """Return True if a block is in the window of a position where later prompts may branch."""
        start = index * self.block_size
        regular = (start // window.interval + 1) * window.interval
        return any(start < p and self.first(p) <= index for p in (*window.planned, regular))

    def compute(self, sequence: TokenSequence, start: int, end: int) -> None:
        self._attach(sequence, start // self.block_size, end // self.block_size, is_written=False)

    def attach_partial(self, sequence: TokenSequence, index: int) -> None:
        self._attach(sequence, index, index + 1, is_written=True)

    def _attach(self, sequence: TokenSequence, start: int, stop: int, *, is_written: bool) -> None:
        """Attach the sequence's window blocks to its blocks `start` to `stop - 1`.

        is_written: False if the step under way writes some of their rows. If a block has another
        window block already, the sequence switches to that window block.
        """
        window = self._sequences[sequence]
        for index in range(start, stop):
            block, own_id = sequence.blocks[index], window.ids[index]
            if index in window.shared or block.node is None:
                continue
            attached = self._attached.get(block)
            if attached is None:
                self._attached[block] = own_id
                self._blocks[own_id] = block
                if not is_written:
                    self._fresh.add(own_id)
            elif attached != own_id:
                self._claim(attached)
                self._release(own_id, evict_last=False)
                window.ids[index] = attached
                window.shared.add(index)

    def accept(self, sequence: TokenSequence, num_blocks: int) -> None:
        self.commit()
        ids = self._sequences[sequence].ids
        while len(ids) > num_blocks:
            self._release(ids.pop(), evict_last=False)

    def commit(self) -> None:
        self._fresh.clear()

    def fail(self) -> None:
        for block_id in self._fresh:
            self._detach(block_id)
        self._fresh.clear()

    def discard(self, sequence: TokenSequence) -> None:
        window = self._sequences[sequence]
        for index in range(window.first, len(window.ids)):
            if index not in window.shared:
                self._detach(window.ids[index])

    def end(self, sequence: TokenSequence, *, is_cached: bool) -> None:
        window = self._sequences.pop(sequence)
        for block_id in window.ids[window.first :]:
            self._release(block_id, evict_last=True)

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            block_id = self._attached.get(block)
            if block_id is not None:
                self._detach(block_id)

    # Window blocks

    def _claim(self, block_id: int) -> None:
        if not self._users[block_id]:
            self._evict_first.pop(block_id, None)
            self._evict_last.pop(block_id, None)
        self._users[block_id] += 1

    def _release(self, block_id: int, *, evict_last: bool) -> None:
        self._users[block_id] -= 1
        if self._users[block_id]:
            return
        if self._blocks[block_id] is None:
            self._empty.append(block_id)
        elif evict_last:
            self._evict_last[block_id] = None
        else:
            self._evict_first[block_id] = None

    def _take(self) -> int:
        """Return an empty window block; evict a cached one if none is empty."""
        if not self._empty:
            block_id, _ = (self._evict_first or self._evict_last).popitem(last=False)
            self.num_dropped += 1
            self._empty.append(block_id)
            self._unlink(block_id)
        block_id = self._empty.pop()
        self._users[block_id] = 1
        return block_id

    def _unlink(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block is not None:
            del self._attached[block]
            self._blocks[block_id] = None

    def _detach(self, block_id: int) -> None:
        """Remove a window block from its block. It becomes empty when no sequence uses it."""
        if self._blocks[block_id] is None:
            return
        self._unlink(block_id)
        if not self._users[block_id]:
            self._evict_first.pop(block_id, None)
            self._evict_last.pop(block_id, None)
            self._empty.append(block_id)

    def check(self) -> None:
        users = [0] * self.num_blocks
        for sequence, window in self._sequences.items():
            assert sequence.window is window, f"{sequence.request_id} has another window"
            assert len(window.ids) <= len(sequence.blocks), "a window extends beyond the blocks"
            for index in range(window.first, len(window.ids)):
                users[window.ids[index]] += 1
        assert users == self._users, "the users of a window block are miscounted"
        unused = [*self._empty, *self._evict_first, *self._evict_last]
        expected = [i for i, count in enumerate(users) if not count]
        assert sorted(unused) == expected, "a window block is lost"
        for block, block_id in self._attached.items():
            assert self._blocks[block_id] is block, "a window block is attached to another block"
            assert block.node is not None, "a block that is not cached has a window block"
        assert len(self._attached) == self.num_blocks - self._blocks.count(None)
        assert all(self._blocks[i] is None for i in self._empty), "an empty block is attached"
        unused = [*self._evict_first, *self._evict_last]
        assert all(self._blocks[i] for i in unused), "a cached window block is not attached"
