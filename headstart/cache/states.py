"""The pool of states of recurrent layers.

A recurrent layer has one state of fixed size per sequence instead of K/V per token. One slot holds
the states of all recurrent layers after one prefix. A running sequence has a working slot, which
each step overwrites. A checkpoint is a slot that one step has written and that no later step
changes.

A request can resume only at a checkpoint. So sequences leave checkpoints where later prompts may
branch: before the last token of a prompt, at the end of a reply, at marks, at regular intervals,
and at forks. A fork is a position where a lookup found K/V but no state.

When no slot is free, the checkpoint with the least value is dropped (GreedyDual: Young, "On-line
file caching", 1998). The clock of the pool is the value of the checkpoint that was dropped last.
The value of a checkpoint is the clock at its last use plus the number of tokens since the previous
checkpoint on its path. As the clock rises, unused checkpoints lose value relative to new ones. For
the last checkpoint of a path, the number of tokens is multiplied by `LAST`.

Of a prompt's regular checkpoints, tiers store only the last one that is at least half an interval
before the end of the prompt.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headstart.cache.block import Checkpoint, KVCacheBlock, PrefixNode
from headstart.cache.groups import LayerGroup
from headstart.cache.identity import BlockKey
from headstart.cache.lookup import ComputedBlocks
from headstart.cache.sequence import TokenSequence

LAST = 4
"""Factor in the value of a path's last checkpoint, since most prompts continue a whole path."""

MIN_GAIN = 64
"""Minimum number of tokens for which a sequence waits for a deeper checkpoint."""

_BORDER = BlockKey(b"")


class SequenceState:
    """The working slot of a running sequence, and the positions of its next checkpoints.

    slot: the working slot. start: the position at which the sequence resumed. source: the
    checkpoint at which it resumed; None after a step has written the working slot. is_written: True
    if a step has written the working slot. step_start: the first token of its last step. planned:
    positions of checkpoints, in ascending order. next_regular: the next multiple of `interval`.
    last_regular: the last multiple that is at least half an interval before the end of the prompt.
    announced: checkpoints at forks that later steps will write. Other requests can wait for them.
    saves: checkpoints that the step under way writes. is_saved: True if a tier has the working
    slot's state.
    """

    def __init__(
        self, slot: int, source: Checkpoint | None, planned: list[int], interval: int, length: int
    ) -> None:
        start = source.position if source is not None else 0
        self.slot = slot
        self.start = start
        self.source = source
        self.is_written = False
        self.step_start = start
        self.planned = planned
        self.interval = interval
        self.next_regular = (start // interval + 1) * interval
        self.last_regular = (length - 1 - interval // 2) // interval * interval
        self.is_saved = False
        self.announced: list[Checkpoint] = []
        self.saves: list[Checkpoint] = []

    @property
    def read_slot(self) -> int:
        """The slot that the next step reads; -1 at the start of a prompt."""
        if self.source is not None:
            return self.source.slot
        return self.slot if self.is_written else -1


class StatePool(LayerGroup):
    """All slots, and the checkpoints by prefix.

    interval: the number of tokens between two regular checkpoints, a multiple of `block_size`.
    only_borders: store states only at block borders. unsaved: checkpoints that no tier has stored
    yet, oldest first.
    """

    def __init__(
        self, num_slots: int, interval: int, block_size: int, *, only_borders: bool
    ) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.interval = interval
        self.block_size = block_size
        self.only_borders = only_borders
        self.unsaved: dict[Checkpoint, None] = {}
        self._free: list[int] = []
        self._by_node: dict[PrefixNode, dict[BlockKey, Checkpoint]] = {}
        self._states: dict[TokenSequence, SequenceState] = {}
        # A heap of (value, number of the entry, checkpoint); the values may be outdated.
        self._queue: list[tuple[int, int, Checkpoint]] = []
        self._count = 0
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self.num_slots))[::-1]
        self.unsaved.clear()
        self._by_node.clear()
        self._states.clear()
        self._queue.clear()
        self._clock = 0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All written checkpoints."""
        return [c for by_key in self._by_node.values() for c in by_key.values() if c.writer is None]

    @property
    def num_working(self) -> int:
        """The number of working slots."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """The number of slots without a state."""
        return len(self._free)

    def of(self, sequence: TokenSequence) -> SequenceState:
        """Return the state of a running sequence."""
        return self._states[sequence]

    # Lookup

    def find(
        self, computed: ComputedBlocks, known_tokens: int
    ) -> tuple[int, Checkpoint | None, str | None]:
        """See `LayerGroup.find`. Return a writer only if it gains `MIN_GAIN` tokens."""
        sequence, blocks = computed.sequence, computed.blocks
        writer: str | None = None
        position_of_writer = 0
        if self.num_slots == 1:  # to resume, a sequence needs a checkpoint and a working slot
            return 0, None, None
        for depth in range(min(known_tokens // self.block_size, len(blocks)), 0, -1):
            node = blocks[depth - 1].node
            by_key = self._by_node.get(node) if node is not None else None
            if not by_key:
                continue
            key = _next_key(sequence, depth, self.block_size)
            for checkpoint in sorted(by_key.values(), key=_position, reverse=True):
                if checkpoint.position > known_tokens or not key.startswith(checkpoint.key):
                    continue
                if checkpoint.writer is None:
                    is_near = position_of_writer - checkpoint.position < MIN_GAIN
                    return checkpoint.position, checkpoint, None if is_near else writer
                if writer is None and checkpoint.writer != sequence.request_id:
                    writer, position_of_writer = checkpoint.writer, checkpoint.position
        return 0, None, writer

    # Steps

    def can_start(self, computed: ComputedBlocks | None, end: int) -> bool:
        source = computed.state if computed is not None else None
        return bool(self._free) or any(
            checkpoint.writer is None and checkpoint is not source and not checkpoint.users
            for by_key in self._by_node.values()
            for checkpoint in by_key.values()
        )

    def start(self, sequence: TokenSequence, computed: ComputedBlocks | None, end: int) -> None:
        source, known_tokens = (computed.state, computed.known_tokens) if computed else (None, 0)
        if source is not None:
            source.users += 1
        slot = self._take()
        assert slot >= 0, "start was called although can_start is False"
        length = len(sequence.token_ids)
        start = source.position if source is not None else 0
        marks = [mark.num_tokens for mark in sequence.marks]
        planned = {length - 1, known_tokens, *sequence.forks, *marks}
        if sequence.is_loaded:
            planned = set()
        if self.only_borders:
            planned = {position - position % self.block_size for position in planned}
        ahead = sorted(p for p in planned if max(start, self.block_size - 1) < p < length)
        max_regular = self.num_slots // 8 + 1  # regular checkpoints per prompt
        interval = self.interval * -(-length // (self.interval * max_regular))
        state = SequenceState(slot, source, ahead, interval, length)
        self._states[sequence] = state
        if known_tokens in ahead and sequence.is_stored:
            checkpoint = self._new_checkpoint(sequence, known_tokens)
            if checkpoint is not None:
                state.announced.append(checkpoint)

    def compute(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Save the checkpoints at positions that this step computes."""
        if sequence.is_loaded:
            return
        state = self._states[sequence]
        state.step_start = start
        due = {position: True for position in state.planned if position <= end}
        if due:
            state.planned = [position for position in state.planned if position > end]
        while state.next_regular <= end:
            due.setdefault(state.next_regular, state.next_regular == state.last_regular)
            state.next_regular += state.interval
        for position in sorted(due):
            self.save(sequence, position, should_store=due[position])

    def save(self, sequence: TokenSequence, position: int, *, should_store: bool = True) -> bool:
        """Let the step under way write a checkpoint; return False if it cannot.

        It cannot if the position has a checkpoint already, or if no slot is free. should_store:
        True if tiers should store the checkpoint.
        """
        if not sequence.is_stored:
            return False
        state = self._states[sequence]
        announced = [c for c in state.announced if c.position == position]
        if announced:
            state.announced.remove(announced[0])
        checkpoint = announced[0] if announced else self._new_checkpoint(sequence, position)
        if checkpoint is None:
            return False
        checkpoint.should_store = should_store
        before = [save.position for save in state.saves if save.position < position]
        gain = position - max(before, default=state.start)
        checkpoint.slot = self._take(gain)
        if checkpoint.slot < 0:
            self._drop(checkpoint)
            self._clock += LAST * gain  # raises the value of later checkpoints, so they get slots
            return False
        state.saves.append(checkpoint)
        return True

    def save_fork(self, computed: ComputedBlocks, step: int) -> bool:
        known_tokens, blocks = computed.known_tokens, computed.blocks
        depth = known_tokens // self.block_size
        is_far = known_tokens - computed.num_tokens >= MIN_GAIN
        if not is_far or not computed.is_fork or known_tokens % self.block_size:
            return False
        for sequence, state in self._states.items():
            if (
                sequence.step == step
                and state.step_start < known_tokens <= sequence.num_computed_tokens
                and sequence.blocks[depth - 1] is blocks[depth - 1]
            ):
                return self.save(sequence, known_tokens)
        return False

    def load(self, sequence: TokenSequence, *, is_saved: bool) -> None:
        """Note that a tier's state was loaded into the working slot of a sequence.

        The state becomes a checkpoint when the sequence ends. is_saved: True if no tier should
        store it again.
        """
        state = self._states[sequence]
        state.is_written, state.is_saved = True, is_saved

    def saved_gain(self, checkpoint: Checkpoint) -> int:
        """Return the number of tokens since the last saved checkpoint before this one."""
        previous = self._previous(checkpoint)
        while previous is not None and not previous.is_saved:
            previous = self._previous(previous)
        return checkpoint.position - (previous.position if previous is not None else 0)

    def commit(self) -> None:
        for sequence, state in self._states.items():
            if sequence.is_loaded:
                continue
            source = state.source
            if self._position(sequence) > (source.position if source is not None else 0):
                state.is_written = True
                if source is not None:
                    self._release(source)
                    state.source = None
            for checkpoint in state.saves:
                checkpoint.writer = None
                if checkpoint.node is None:
                    self._free.append(checkpoint.slot)
                else:
                    self._enter(checkpoint)
            state.saves.clear()

    def end(self, sequence: TokenSequence, *, is_cached: bool) -> None:
        state = self._states.pop(sequence)
        for checkpoint in (*state.saves, *state.announced):
            self._drop(checkpoint)
        self._free += [checkpoint.slot for checkpoint in state.saves]
        if state.source is not None:
            self._release(state.source)
        if is_cached and state.is_written and sequence.is_stored:
            last = self._new_checkpoint(sequence, self._position(sequence))
            if last is not None:
                last.slot, last.writer, last.is_saved = state.slot, None, state.is_saved
                self._enter(last)
                return
        self._free.append(state.slot)

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            node = block.node
            if node is not None and node in self._by_node:
                for checkpoint in list(self._by_node[node].values()):
                    self._drop(checkpoint)

    # Slots

    def _position(self, sequence: TokenSequence) -> int:
        """Return the position of a sequence's state after the step under way."""
        position = sequence.num_computed_tokens
        return position - position % self.block_size if self.only_borders else position

    def _new_checkpoint(self, sequence: TokenSequence, position: int) -> Checkpoint | None:
        """Return a new checkpoint without a slot, or None.

        None if the position has a checkpoint already, or is within the first block.
        """
        depth, rows = divmod(position, self.block_size)
        node = sequence.blocks[depth - 1].node if 0 < depth <= len(sequence.blocks) else None
        if node is None:
            return None
        key = sequence.cut_partial(position, self.block_size) if rows else _BORDER
        by_key = self._by_node.setdefault(node, {})
        if key in by_key:
            return None
        checkpoint = by_key[key] = Checkpoint(node, key, position, sequence.request_id)
        return checkpoint

    def _take(self, gain: int | None = None) -> int:
        """Return a free slot, or drop the checkpoint with the least value and return its slot.

        Return -1 if neither is possible. gain: the number of tokens that the new checkpoint would
        save. A checkpoint with more value than the new one is not dropped. A value in the queue is
        a lower bound, because later uses of the checkpoint may raise its value. So the value is
        computed again.
        """
        if self._free:
            return self._free.pop()
        skipped = []
        slot = -1
        while self._queue:
            bound, number, checkpoint = heappop(self._queue)
            if checkpoint.node is None or number != checkpoint.entry:
                continue
            value = self._value(checkpoint)
            if value > bound:
                heappush(self._queue, (value, number, checkpoint))
            elif checkpoint.users or (gain is not None and value > self._clock + LAST * gain):
                skipped.append((bound, number, checkpoint))
                if not checkpoint.users:
                    break
            else:
                self._clock = value
                self.num_dropped += 1
                self._drop(checkpoint)
                slot = self._free.pop()
                break
        for entry in skipped:
            heappush(self._queue, entry)
        return slot

    def _previous(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return the deepest written checkpoint before this one on its path."""
        node, key = checkpoint.node, checkpoint.key
        while node is not None:
            deepest: Checkpoint | None = None
            for other in self._by_node[node].values() if node in self._by_node else ():
                is_before = other.writer is None and other.position < checkpoint.position
                if is_before and key.startswith(other.key):
                    deepest = (
                        other if deepest is None or deepest.position < other.position else deepest
                    )
            if deepest is not None:
                return deepest
            key, node = node.key, node.parent
        return None

    def _value(self, checkpoint: Checkpoint) -> int:
        """Return the value of a checkpoint; see the docstring of the module."""
        previous = self._previous(checkpoint)
        tokens = checkpoint.position - (previous.position if previous is not None else 0)
        return checkpoint.used + tokens * (1 if checkpoint.is_passed else LAST)

    def _enter(self, checkpoint: Checkpoint) -> None:
        """Add a written checkpoint to the queue; mark the previous one on its path as passed."""
        checkpoint.used = self._clock
        self._push(checkpoint)
        if checkpoint.should_store and not checkpoint.is_saved:
            self.unsaved[checkpoint] = None
        previous = self._previous(checkpoint)
        if previous is not None and not previous.is_passed:
            previous.is_passed = True
            self._push(previous)

    def _push(self, checkpoint: Checkpoint) -> None:
        """Add an entry to the queue. An earlier entry of the checkpoint becomes invalid."""
        if len(self._queue) >= 2 * self.num_slots:  # remove invalid entries
            self._queue = [e for e in self._queue if e[1] == e[2].entry and e[2].node is not None]
            heapify(self._queue)
        self._count += 1
        checkpoint.entry = self._count
        heappush(self._queue, (self._value(checkpoint), self._count, checkpoint))

    def _release(self, checkpoint: Checkpoint) -> None:
        """Note that a sequence has read a checkpoint. The checkpoint counts as used now."""
        checkpoint.users -= 1
        if checkpoint.node is not None:
            checkpoint.used = self._clock  # `_take` corrects the value of its entry
        elif not checkpoint.users:
            self._free.append(checkpoint.slot)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint. Its slot becomes free once no step reads or writes it."""
        node = checkpoint.node
        if node is None:
            return
        by_key = self._by_node[node]
        del by_key[checkpoint.key]
        if not by_key:
            del self._by_node[node]
        checkpoint.node = None
        self.unsaved.pop(checkpoint, None)
        if checkpoint.slot >= 0 and checkpoint.writer is None and not checkpoint.users:
            self._free.append(checkpoint.slot)

    def check(self) -> None:
        saves = [c for state in self._states.values() for c in state.saves]
        dropped = {s.source for s in self._states.values() if s.source and s.source.node is None}
        slots = [state.slot for state in self._states.values()]
        slots += [c.slot for c in (*self.checkpoints, *saves, *dropped)] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or used twice"
        assert len(self._queue) <= 2 * self.num_slots, "the queue is too long"
        assert self.unsaved.keys() <= set(self.checkpoints), "a dropped checkpoint is to be saved"
        queued = {checkpoint for _, _, checkpoint in self._queue}
        sources = [state.source for state in self._states.values()]
        for node, by_key in self._by_node.items():
            assert by_key, "a prefix has an entry but no checkpoint"
            assert node.block is not None, "a checkpoint's block is not cached"
            for key, checkpoint in by_key.items():
                assert checkpoint.node is node and checkpoint.key == key, (
                    "a checkpoint is misplaced"
                )
                assert checkpoint.position >= self.block_size, f"{checkpoint} has no full block"
                assert checkpoint.writer or checkpoint in queued, f"{checkpoint} is never evicted"
                assert checkpoint.users == sources.count(checkpoint), f"{checkpoint} is miscounted"


def _position(checkpoint: Checkpoint) -> int:
    return checkpoint.position


def _next_key(sequence: TokenSequence, depth: int, block_size: int) -> BlockKey:
    """Return the key of the sequence's block `depth`, which may be partial."""
    if depth < len(sequence.keys):
        return sequence.keys[depth]
    length = len(sequence.token_ids)
    return sequence.cut_partial(length, block_size) if length > depth * block_size else _BORDER
