"""Blocks that are passed to a tier: their content at that moment, without omissions."""

import random
from typing import Any

import pytest

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    KVCacheManager,
    TokenSequence,
    UnsavedBlock,
    UnsavedBlocks,
)
from tests.cache.unwalked import Walked

BLOCK = 4


class Engine:
    """Run requests through a pool, write the names of blocks for rows, and save them."""

    def __init__(self, seed: int, **options: Any) -> None:
        names = BlockHasher(BLOCK, "model")
        config = CacheConfig(num_blocks=12, block_size=BLOCK, events=True, **options)
        self.manager = KVCacheManager(config, names)
        names.publish([0] * BLOCK)  # in such a prompt the salt enters behind its first block
        self.public = names.public
        self.unsaved = UnsavedBlocks(names, with_tokens=True)
        self.random = random.Random(seed)
        self.rows: dict[int, bytes] = {}  # by block id: the name of the written content
        self.saved: set[bytes] = set()
        self.written: set[bytes] = set()
        self.running: list[TokenSequence] = []

    def save(self, blocks: list[UnsavedBlock], has_room: bool) -> int:
        for block in blocks:
            assert self.rows[block.block_id] == block.name, "these are other rows"
            assert block.depth == len(block.path()[1]) - 1
            assert len(block.token_ids) == (0 if block.node.salt() else BLOCK)
            if has_room:
                self.saved.add(block.name)
        return len(blocks) if has_room else 0

    def step(self, number: int) -> None:
        manager, drawn = self.manager, self.random
        sequences = list(self.running)
        for sequence in sequences:
            sequence.append(drawn.randrange(2))
            if not manager.append_slots(sequence, 1):
                self.end(sequence)
        tokens = [drawn.randrange(2) for _ in range(drawn.randrange(1, 30))]
        salt = drawn.choice([None, None, "one", "other"])
        new = TokenSequence(f"{number}", tokens, salt=salt, public=self.public)
        match = manager.get_computed_blocks(new)
        if manager.can_admit(match) and match.writer is None:
            match = match.cut(len(match.blocks), BLOCK)
            if manager.allocate_slots(new, len(tokens) - match.num_tokens, match):
                self.running.append(new)
        leaving = self.unsaved.note(manager.take_events(), number)
        self.save(leaving, has_room=True)
        if drawn.random() < 0.2:
            self.fail()
            return
        self.write()
        manager.commit_step()
        self.unsaved.commit()
        some = self.unsaved.pending(drawn.randrange(1, 5))
        self.unsaved.remove(self.save(some, has_room=drawn.random() < 0.5))
        for sequence in list(self.running):
            if drawn.random() < 0.4:
                self.end(sequence)

    def write(self) -> None:
        for sequence in self.running:
            names = self.manager.block_hashes(sequence)
            full = sequence.num_computed_tokens // BLOCK
            for at, block_id in enumerate(sequence.block_table()):
                self.rows[block_id] = names[at] if at < full else b"a part of a block"
            self.written.update(names[:full])

    def fail(self) -> None:
        for sequence in self.running:  # whatever they were to write may be half done
            for block_id in sequence.block_table()[sequence.num_reused :]:
                if self.rows.get(block_id) not in self.manager.block_hashes(sequence):
                    self.rows[block_id] = b"torn"
        for sequence in self.manager.fail_step():
            self.running.remove(sequence)
        self.unsaved.roll_back(self.manager.take_events())

    def end(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        if sequence.step == self.manager._step:
            self.manager.discard([sequence])
        else:
            self.manager.free(sequence)


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_passed_to_the_tier_are_in_memory_and_none_is_omitted(
    seed: int, deduplicate: bool
) -> None:
    engine = Engine(seed, deduplicate=deduplicate)
    for number in range(300):
        engine.step(number)
        engine.manager.check()
    while some := engine.unsaved.pending(3):
        engine.unsaved.remove(engine.save(some, has_room=True))
    assert len(engine.saved) > 100
    cached = {name for name in engine.written if name in engine.rows.values()}
    assert len(engine.unsaved) == 0
    assert engine.saved <= engine.written
    assert len(cached - engine.saved) == 0, "a block of the pool was never passed to the tier"


def test_no_block_remains_unsaved_after_a_reset() -> None:
    engine = Engine(0)
    sequence = TokenSequence("one", list(range(30)))
    assert engine.manager.allocate_slots(sequence, 30)
    engine.unsaved.note(engine.manager.take_events(), 0)
    engine.manager.commit_step()
    engine.unsaved.commit()
    engine.manager.free(sequence)
    assert engine.manager.reset_prefix_cache()
    assert engine.unsaved.note(engine.manager.take_events(), 0) == []
    assert engine.unsaved.pending(100) == []


def test_the_cost_of_passing_blocks_does_not_grow_with_the_pool() -> None:
    """Regression: every step visited all blocks that no tier had space for."""
    config = CacheConfig(num_blocks=500, block_size=BLOCK, events=True)
    manager = KVCacheManager(config, names := BlockHasher(BLOCK, "model"))
    unsaved = UnsavedBlocks(names)
    sequences = [TokenSequence(f"{at}", [at] * 40) for at in range(50)]
    for sequence in sequences:
        assert manager.allocate_slots(sequence, 40)
    unsaved.note(manager.take_events(), 0)
    manager.commit_step()
    unsaved.commit()
    manager.discard(sequences[:1])  # its blocks are removed, and the tier does not know it yet
    unsaved._pending = walked = Walked(unsaved._pending)
    for at in (1, 2):
        few = unsaved.pending(3)
        assert [block.depth for block in few] == list(range(3 * at - 3, 3 * at))
        unsaved.remove(3)
    assert len(unsaved) == 500 - 10 - 6
    assert walked.count < 30
