"""Checkpoints of recurrent states in tiers.

A checkpoint is stored as a separate record in a store of states. Its name is a hash of two inputs:
the hash of its last full block, which covers all earlier tokens, and the tokens after that block.
Its bytes are the states, followed by the K/V of the tokens after the block, since other records
have the K/V of full blocks only.

`headstart/cache/states.py` defines the positions of checkpoints. Of the checkpoints at regular
intervals within a prompt, only one near the prompt's end is stored. A checkpoint less than
`min_gain` tokens after the previous stored checkpoint of its path is not stored. A checkpoint is
offered to the stores when the K/V of its last tokens can be read: when these tokens fill a block,
or when their request ends.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.attention import PagedKVMemory, StateMemory
from headstart.cache import (
    BlockHash,
    BlockKey,
    Checkpoint,
    ComputedBlocks,
    KVCacheManager,
    StatePool,
)
from headstart.tiers.store import BlockStore, ModelRecord, StoredBlock
from headstart.tiers.transfers import Saver, StateName, StateSearch


class StatePayload:
    """Read and write access to the bytes of checkpoints: the states in a slot, and a block's K/V.

    has_tail: the bytes include the K/V of tokens after the last full block. If False, only
    checkpoints at block borders are stored.
    """

    def __init__(self, kv: PagedKVMemory, states: StateMemory, *, has_tail: bool) -> None:
        self.has_tail = has_tail
        self._kv = kv
        self._states = states
        self._state_bytes = states.bytes_per_slot(states.layouts)
        self.nbytes = self._state_bytes + kv.block_bytes * has_tail
        """Bytes of one checkpoint."""

    def record(self, model: ModelRecord) -> ModelRecord:
        """Return the record of a model's states. The model's fingerprint covers their layouts."""
        fingerprint = hashlib.sha256(f"states, {model.fingerprint}".encode()).hexdigest()
        title = f"{model.title.removesuffix(')')}, states)"
        return ModelRecord(fingerprint, title, 1, self.nbytes)

    def read(self, slot: int, block_id: int | None) -> memoryview:
        """Return a copy of a slot and a block; the block is None for a checkpoint at a border."""
        data = np.zeros(self.nbytes, dtype=np.uint8)
        data[: self._state_bytes] = self._states.read_slot(slot).numpy()
        if block_id is not None:
            data[self._state_bytes :] = self._kv.read_blocks([block_id]).numpy()[0]
        return data.data

    def write(self, slot: int, block_id: int | None, data: memoryview) -> None:
        """Write a slot and a block, as `read` returned them."""
        self._states.write_slot(slot, data[: self._state_bytes])
        if block_id is not None:
            self._kv.write_blocks([block_id], [data[self._state_bytes :]])


@dataclass(frozen=True)
class StateStores:
    """The stores of checkpoints, nearest first.

    min_gain: minimum number of tokens between two stored checkpoints of a path.
    """

    payload: StatePayload
    stores: Sequence[BlockStore]
    min_gain: int


def name_state(parent: BlockHash, tail: BlockKey) -> BlockHash:
    """Return a checkpoint's name. tail: the key of the tokens after its last full block."""
    return BlockHash(hashlib.sha256(b"headstart/state/1" + parent + tail).digest())


@dataclass(eq=False)
class StateOffers:
    """Offers of unsaved checkpoints to the saver of the state stores.

    seconds_of: returns the seconds that computing a number of tokens takes.
    """

    manager: KVCacheManager
    stores: StateStores
    saver: Saver
    seconds_of: Callable[[int], float]
    _requested_at: float = 0.0

    def __post_init__(self) -> None:
        assert self.manager.states is not None
        self._pool: StatePool = self.manager.states

    def offer(self, requested_at: float | None = None) -> None:
        """Offer the checkpoints that can be read, while the saver has space.

        Call before the step writes anything. requested_at: arrival time of the next step's oldest
        request, in seconds since 1970.
        """
        for checkpoint in list(self._pool.unsaved):
            if not self.saver.has_space(self.stores.payload.nbytes):
                break
            tail = None
            if checkpoint.key and self.stores.payload.has_tail:
                tail = self.manager.find_tail(checkpoint)
                if tail is None:
                    continue  # a request is filling that block
            is_complete = tail is not None or not checkpoint.key
            gain = self._pool.saved_gain(checkpoint)  # slow for deep checkpoints, so last
            if is_complete and gain >= self.stores.min_gain:
                self._offer(checkpoint, tail.block_id if tail is not None else None, gain)
            del self._pool.unsaved[checkpoint]
        if requested_at is not None:
            self._requested_at = requested_at

    def _offer(self, checkpoint: Checkpoint, tail: int | None, gain: int) -> None:
        """Offer a checkpoint. tail: the block with the tokens after its last full block."""
        assert checkpoint.node is not None
        parent = self.manager.hasher.of_node(checkpoint.node)
        block = StoredBlock(
            name_state(parent, checkpoint.key),
            parent,
            checkpoint.position,
            self.seconds_of(gain),
            self._requested_at,
            self.stores.payload.read(checkpoint.slot, tail),
        )
        checkpoint.is_saved = self.saver.offer([block])


def search_states(
    computed: ComputedBlocks,
    num_tokens: int,
    hashes: Sequence[BlockHash],
    block_size: int,
    *,
    has_tail: bool,
) -> StateSearch:
    """Return a search for states that are deeper than the deepest state in the pool.

    num_tokens: the deepest position of a state to look for. computed: the lookup in the pool.
    hashes: the hashes of all full blocks of the sequence.
    """
    sequence, size = computed.sequence, block_size
    start, first = computed.num_tokens, len(computed.blocks)

    def candidates(num_stored: int) -> Iterator[StateName]:
        """Yield the states to look for, deepest first.

        Runs in the thread of lookups, while the sequence waits and gets no tokens.
        """
        deepest = min(num_tokens, (first + num_stored + 1) * size - 1)
        for position in range(deepest, max(start, size - 1), -1):
            depth, num_tail = divmod(position, size)
            if num_tail and not has_tail:
                continue
            tail = sequence.cut_partial(position, size) if num_tail else BlockKey(b"")
            name = name_state(hashes[depth - 1], tail)
            yield StateName(name, position, max(0, depth - first))

    return StateSearch(candidates, range(start, num_tokens), size)
