"""An engine without a model that records the real content of memory."""

from headstart.cache import (
    AllBlocksCleared,
    BlockStored,
    CacheEvent,
    KVCacheManager,
    RowCopy,
    TokenSequence,
)
from headstart.cache.identity import PUBLIC

GARBAGE = object()


class TinyEngine:
    """Run sequences, and write to `memory` what each slot really holds: a whole prefix."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.size = manager.block_size
        self.memory: dict[int, object] = {}
        self.mirror: set[bytes] = set()
        self._events: list[CacheEvent] = []
        self._copies: list[RowCopy] = []
        self._chunks: list[tuple[TokenSequence, int, int]] = []
        self._slots: list[int] = []  # that the step under way may have written to
        self._kept: set[object] = set()
        self._num_evicted = 0
        self.may_forget = False

    def content(self, sequence: TokenSequence, position: int) -> object:
        is_public = position // self.size < sequence.num_public
        salt = PUBLIC if is_public else sequence.namespace.salt
        return (sequence.namespace.adapter, salt, *sequence.token_ids[: position + 1])

    def admit(
        self, sequence: TokenSequence, count: int | None = None, *, reads: bool = True
    ) -> None:
        match = self.manager.get_computed_blocks(sequence) if reads else None
        start = match.num_tokens if match is not None else 0
        count = len(sequence.token_ids) - start if count is None else count
        allocation = self.manager.allocate_slots(sequence, count, match)
        assert allocation is not None
        self._copies += allocation.copies
        self._add_chunk(sequence, start, start + count)

    def append(self, sequence: TokenSequence, *tokens: int, count: int | None = None) -> None:
        for token in tokens:
            sequence.append(token)
        start = sequence.num_computed_tokens
        count = len(sequence.token_ids) - start if count is None else count
        assert self.manager.append_slots(sequence, count)
        self._add_chunk(sequence, start, start + count)

    def _add_chunk(self, sequence: TokenSequence, start: int, stop: int) -> None:
        self._chunks.append((sequence, start, stop))
        self._slots += [s for s in sequence.slots(start, stop, self.size, -1) if s >= 0]

    def commit(self) -> None:
        """Let the model write, then commit."""
        size = self.size
        read = [
            [self.memory.get(copy.source_block * size + row) for row in range(copy.num_rows)]
            for copy in self._copies
        ]
        for copy, rows in zip(self._copies, read, strict=True):
            target = copy.target_block * size
            self.memory |= {target + row: content for row, content in enumerate(rows)}
        for sequence, start, stop in self._chunks:
            if sequence.blocks:
                self.write(sequence, start, stop)
        self._slots = []
        self.manager.commit_step()
        self.end_step()

    def write(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Write the rows of a chunk."""
        for at, slot in enumerate(sequence.slots(start, stop, self.size, -1), start):
            if slot >= 0:
                self.memory[slot] = self.content(sequence, at)

    def end_step(self) -> None:
        self._copies, self._chunks, self._slots = [], [], []
        self._kept = self.cached()
        self._num_evicted = self.manager.pool.num_evicted

    def scribble(self) -> None:
        """Write garbage: the model was interrupted while it wrote."""
        self.memory |= dict.fromkeys(self._slots, GARBAGE)

    def cached(self) -> set[object]:
        """Return the contents of all full blocks that are cached."""
        ends = [
            self.memory.get(block.block_id * self.size + self.size - 1)
            for block in self.manager.pool.blocks
            if block.node is not None and len(block.node.key) == 4 * self.size
        ]
        return set(ends)

    def replay(self) -> None:
        """Take the events and apply them to the mirror, each exactly once."""
        self._events += self.manager.take_events()
        while self._events:
            event = self._events[0]
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
            elif isinstance(event, BlockStored):
                self.mirror.add(event.block_hash)
            else:
                self.mirror.discard(event.block_hash)
            self._events.pop(0)

    def verify(self, probes: list[TokenSequence]) -> None:
        """Check that each hit row is in memory, and that only evictions remove cached rows."""
        self.manager.check()
        size = self.size
        for sequence in self.manager.sequences:
            for at in range(sequence.num_computed_tokens):
                slot = sequence.block_ids[at // size] * size + at % size
                assert self.memory[slot] == self.content(sequence, at), "a lost row"
        for probe in probes:
            match = self.manager.get_computed_blocks(probe)
            slots = [b.block_id * size + row for b in match.blocks for row in range(size)]
            if match.partial is not None:
                first = match.partial.block.block_id * size
                slots += range(first, first + match.partial.num_rows)
            for at, slot in enumerate(slots[: match.num_tokens]):
                assert self.memory[slot] == self.content(probe, at), "a false hit"
        if not self.may_forget:
            evicted = self.manager.pool.num_evicted - self._num_evicted
            assert len(self._kept - self.cached()) <= evicted, "more was lost than was evicted"
        if self.manager.config.events:
            self.replay()
            blocks = self.manager.pool.blocks
            full = [b.node for b in blocks if b.node and len(b.node.key) == 4 * size]
            assert self.mirror == {self.manager.hasher.of_node(node) for node in full}
