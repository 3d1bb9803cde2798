"""Drafted tokens have K/V, but no identity, until they are accepted.

The oracle is the memory of `TinyEngine`, whose rows are the tokens that they were computed from.
"""

import random

import pytest

from headstart.cache import (
    BlockHash,
    BlockHasher,
    BlockStored,
    CacheConfig,
    KVCacheManager,
    TokenSequence,
)
from tests.cache.tiny_engine import TinyEngine


class DraftingEngine(TinyEngine):
    """A `TinyEngine` whose steps also compute drafts."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__(manager)
        self.may_forget = True
        self.drafts: list[tuple[TokenSequence, list[int]]] = []
        self.computed: set[BlockHash] = set()

    def decode(self, sequence: TokenSequence, draft: list[int]) -> bool:
        """Compute the last token, and drafted ones after it; return False without free blocks."""
        start = sequence.num_computed_tokens
        if not self.manager.append_slots(sequence, 1, len(draft)):
            return False
        self._add_chunk(sequence, start, start + 1)
        self.drafts.append((sequence, draft))
        return True

    def write_drafts(self) -> None:
        for sequence, draft in self.drafts:
            start = sequence.num_computed_tokens
            for count in range(1, len(draft) + 1):
                position = start + count - 1
                block = sequence.block_ids[position // self.size]
                row = (None, None, *sequence.token_ids, *draft[:count])
                self.memory[block * self.size + position % self.size] = row

    def note_blocks(self) -> None:
        """Check that no block is stored with a token that was not accepted."""
        for sequence in self.manager.sequences:
            self.computed.update(self.manager.block_hashes(sequence))
        events = self.manager.take_events()
        self._events += events
        for event in events:
            assert not isinstance(event, BlockStored) or event.block_hash in self.computed


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_random_drafts(size: int, window: int) -> None:
    for seed in range(30):
        chance = random.Random(seed)
        blocks = chance.choice([8, 12, 40])
        windows = {"window": window, "num_window_blocks": blocks} if window else {}
        config = CacheConfig(num_blocks=blocks, block_size=size, events=True, **windows)
        engine = DraftingEngine(KVCacheManager(config, BlockHasher(size)))
        manager = engine.manager
        for number in range(30):
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 3 * size + 2))]
            sequence = TokenSequence(f"r{number}", tokens)
            computed = manager.get_computed_blocks(sequence)
            allocation = manager.allocate_slots(
                sequence, len(tokens) - computed.num_tokens, computed
            )
            if allocation is not None:
                engine._copies += allocation.copies
                engine._add_chunk(sequence, computed.num_tokens, len(tokens))
                engine.note_blocks()
                engine.commit()
            for _ in range(chance.randrange(3)):
                step(engine, chance)
                engine.verify([TokenSequence("probe", [*tokens, 0, 1])])


def step(engine: DraftingEngine, chance: random.Random) -> None:
    """Run a step of all sequences, some with drafts.

    It may fail, and sequences may end.
    """
    manager = engine.manager
    for sequence in list(manager.sequences):
        if len(sequence.token_ids) == sequence.num_computed_tokens:
            sequence.append(chance.randrange(2))
        draft = manager.draft(sequence, 3) if chance.random() < 0.5 else []
        draft = draft or [chance.randrange(2) for _ in range(chance.randrange(5))]
        if len(sequence.token_ids) > 40 or not engine.decode(sequence, draft):
            manager.free(sequence)
    engine.note_blocks()
    drafts = engine.drafts
    if chance.random() < 0.1:
        engine.scribble()
        manager.fail_step()
        engine.end_step()
        drafts.clear()
    engine.write_drafts()
    engine.commit()
    for sequence, draft in drafts:
        if chance.random() < 0.1:
            manager.free(sequence)
            continue
        count = chance.randrange(len(draft) + 1)
        for token in draft[:count]:
            sequence.append(token)
        manager.accept(sequence, count)
        engine.note_blocks()
    drafts.clear()
    manager.check()
