"""Preemption, reset, statistics, events, duplicates, and requests that are not stored."""

from headstart.cache import (
    AllBlocksCleared,
    BlockEvicted,
    BlockStored,
    MissReason,
    TokenSequence,
)
from tests.cache.steps import (
    admit,
    cached_ids,
    decode,
    finish,
    free_ids,
    hits,
    make_manager,
    start,
)

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens
LONGER = list(range(14))


def test_without_prefix_caching_nothing_is_cached() -> None:
    manager = make_manager(enable_prefix_caching=False, events=True)
    first = TokenSequence("first", PROMPT)
    second = TokenSequence("second", PROMPT)
    assert admit(manager, first) == admit(manager, second) == 0
    assert (first.block_ids, second.block_ids) == ([0, 1, 2], [3, 4, 5])
    manager.commit_step()
    decode(manager, first, 1, 2, 3)
    manager.free(first)
    manager.free(second)
    assert (cached_ids(manager), manager.take_events()) == ([], [])
    assert manager.pool.index.roots() == []
    assert hits(manager, PROMPT) == 0
    assert manager.stats.missed == {MissReason.DISABLED: 2}
    assert not manager.pool.index.unwritten


def test_a_preempted_request_resumes_by_its_own_blocks() -> None:
    manager = make_manager()
    sequence = start(manager, "one", PROMPT)
    decode(manager, sequence, 1, 2, 3)
    sequence.append(4)
    manager.free(sequence)
    assert (sequence.num_computed_tokens, sequence.blocks) == (0, [])
    assert admit(manager, sequence) == 13
    manager.commit_step()
    stats = manager.stats
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (1, 10, 0)
    resumed = (stats.resumed_requests, stats.resumed_queried_tokens, stats.resumed_hit_tokens)
    assert resumed == (1, 14, 13)
    assert stats.missed == {MissReason.UNSEEN: 1}


def test_a_request_preempted_in_the_first_step_of_all_is_resumed_too() -> None:
    manager = make_manager()
    sequence = start(manager, "one", PROMPT)
    manager.free(sequence)
    admit(manager, sequence)
    manager.commit_step()
    assert (manager.stats.requests, manager.stats.resumed_requests) == (1, 1)


def test_a_request_that_does_not_read_the_cache_gets_new_slots() -> None:
    manager = make_manager(deduplicate=False)
    finish(manager, "first", PROMPT)
    sequence = TokenSequence("second", PROMPT)
    assert manager.allocate_slots(sequence, 8) is not None
    manager.check()
    assert (sequence.num_computed_tokens, len(sequence.blocks)) == (8, 2)
    assert manager.stats.hit_tokens == 0
    manager.commit_step()


def test_statistics_count_each_admission_once() -> None:
    manager = make_manager(num_blocks=3)
    assert manager.stats.hit_rate == 0
    finish(manager, "first", PROMPT[:8])
    first = start(manager, "second", [*PROMPT[:6], 0, 0])
    big = TokenSequence("too big", PROMPT)
    for _ in range(3):
        assert manager.allocate_slots(big, 10) is None
    stats = manager.stats
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (2, 16, 6)
    assert stats.hit_rate == 6 / 16
    assert stats.missed == {MissReason.UNSEEN: 1, MissReason.TOKEN: 1}
    manager.free(first)


def test_reset_forgets_everything_once_no_block_is_held() -> None:
    manager = make_manager(events=True, deduplicate=False)
    sequence = start(manager, "one", PROMPT)
    assert not manager.reset_prefix_cache()
    assert hits(manager, PROMPT) == 8
    manager.free(sequence)
    manager.take_events()
    assert manager.reset_prefix_cache()
    manager.check()
    assert (hits(manager, PROMPT), cached_ids(manager), manager.num_free_blocks) == (0, [], 10)
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.explain(TokenSequence("probe", PROMPT)).reason is MissReason.UNSEEN
    assert start(manager, "two", PROMPT).block_ids != []


def test_each_prefix_has_one_event() -> None:
    manager = make_manager(num_blocks=6, events=True, deduplicate=False, partial_hits=False)
    first = start(manager, "first", PROMPT[:8])
    second = TokenSequence("second", PROMPT[:8])
    assert manager.allocate_slots(second, 8) is not None  # a copy of both blocks
    manager.commit_step()
    names = manager.block_hashes(first)
    one, other = manager.take_events()
    assert isinstance(one, BlockStored) and isinstance(other, BlockStored)
    assert (one.block_id, one.block_hash, other.block_hash) == (0, *names)
    assert (other.block_id, other.parent_hash) == (1, names[0])
    manager.free(first)  # the copies remain
    assert manager.take_events() == []
    manager.free(second)
    finish(manager, "other", [1] * 24)
    events = manager.take_events()
    assert [type(e) for e in events] == [BlockEvicted] * 2 + [BlockStored] * 6
    assert [e.block_hash for e in events[:2]] == names[::-1]  # type: ignore[union-attr]
    assert repr(events[0]) == "BlockEvicted(block_id=3)"
    assert manager.take_events() == []


def test_others_are_evicted_while_a_copy_is_held() -> None:
    manager = make_manager(num_blocks=6, deduplicate=False, partial_hits=False)
    for name in ("first", "second"):
        sequence = TokenSequence(name, PROMPT[:8])
        assert manager.allocate_slots(sequence, 8) is not None
        manager.commit_step()
    finish(manager, "cached", [1] * 8)
    finish(manager, "evicts it", [2] * 8)
    assert (hits(manager, [1] * 9), hits(manager, [2] * 9)) == (0, 8)
    manager.free(sequence)
    manager.check()
    assert manager.pool.copies == {}
    assert hits(manager, [*PROMPT[:8], 0]) == 8


def test_a_freed_copy_passes_its_recency_to_the_remaining_block() -> None:
    """The request that held the copy was the last to use the prefix, so it is evicted last."""
    manager = make_manager(num_blocks=8, deduplicate=False, partial_hits=False)
    finish(manager, "old", PROMPT[:8])
    finish(manager, "other", [1] * 12)
    sequence = TokenSequence("new, not reading", [*PROMPT[:8], 2, 2, 2])
    assert manager.allocate_slots(sequence, 11) is not None
    manager.commit_step()
    manager.free(sequence)
    manager.check()
    finish(manager, "pressure", [3] * 16)
    assert (hits(manager, [*PROMPT[:8], 2]), hits(manager, [1] * 13)) == (8, 8)


def test_copies_are_added_and_removed_in_constant_time() -> None:
    manager = make_manager(num_blocks=300, deduplicate=False)
    sequences = [TokenSequence(str(at), PROMPT[:4]) for at in range(280)]
    for sequence in sequences:
        assert manager.allocate_slots(sequence, 4) is not None
    manager.commit_step()
    [copies] = manager.pool.copies.values()
    assert isinstance(copies, dict)
    assert len(copies) == 279
    for sequence in sequences[::-1]:
        manager.free(sequence)
    manager.check()
    assert manager.pool.copies == {}


def test_events_are_not_collected_by_default() -> None:
    manager = make_manager()
    finish(manager, "one", PROMPT)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == []


def test_duplicates_are_released() -> None:
    """Both decode the same tokens; the second switches to the first's block as it fills."""
    manager = make_manager(partial_hits=False)
    first, second = start(manager, "first", PROMPT[:6]), start(manager, "second", PROMPT[:6])
    for token in PROMPT[6:8]:
        for sequence in (first, second):
            sequence.append(token)
            assert manager.append_slots(sequence)
        manager.commit_step()
    assert first.block_ids == second.block_ids == [0, 1]
    assert [block.ref_cnt for block in first.blocks] == [2, 2]
    assert manager.num_free_blocks == 8
    manager.check()


def test_a_later_block_that_is_cached_is_shared_again_after_a_gap() -> None:
    """The middle block was evicted; after it the request reaches blocks that are still cached."""
    manager = make_manager(num_blocks=12, partial_hits=False)
    tokens = list(range(12))
    first = start(manager, "first", tokens)
    blocks = list(first.blocks)
    manager.free(first)
    manager.pool.touch([blocks[1]])
    manager.pool.forget([blocks[1]])  # as if it had been taken
    manager.pool.release([blocks[1]])
    second = TokenSequence("second", [*tokens, 99])
    assert admit(manager, second) == 4
    assert second.block_ids[0] == blocks[0].block_id
    assert second.block_ids[2] == blocks[2].block_id
    manager.commit_step()
    manager.check()


def not_stored(name: str, tokens: list[int]) -> TokenSequence:
    sequence = TokenSequence(name, tokens)
    sequence.is_stored = False
    return sequence


def test_its_blocks_are_never_hit() -> None:
    manager = make_manager()
    sequence = not_stored("secret", LONGER)
    assert admit(manager, sequence) == 0
    assert hits(manager, LONGER) == 0
    manager.commit_step()
    decode(manager, sequence, 1, 2, 3)
    assert hits(manager, LONGER) == 0
    manager.free(sequence)
    manager.check()
    assert hits(manager, LONGER) == 0
    assert cached_ids(manager) == []


def test_it_hits_cached_blocks_and_these_stay_cached() -> None:
    manager = make_manager()
    finish(manager, "open", LONGER)
    sequence = not_stored("secret", [*LONGER, 20, 21, 22, 23, 24])
    assert admit(manager, sequence) == 14
    manager.commit_step()
    manager.free(sequence)
    manager.check()
    assert hits(manager, [*LONGER, 20, 21, 22, 23, 24]) == 14


def test_its_blocks_are_the_next_to_be_reused() -> None:
    manager = make_manager()
    finish(manager, "open", [9] * 8)
    sequence = not_stored("secret", LONGER)
    admit(manager, sequence)
    table = list(sequence.block_ids)
    manager.commit_step()
    manager.free(sequence)
    assert sorted(free_ids(manager)[:4]) == sorted(table)


def test_no_request_waits_for_its_blocks() -> None:
    """A lookup names the writer of the next block; this writer's block would never arrive."""
    manager = make_manager()
    sequence = not_stored("secret", LONGER)
    admit(manager, sequence, 4)
    assert manager.get_computed_blocks(TokenSequence("other", LONGER)).writer is None
    stored = TokenSequence("open", LONGER)
    admit(manager, stored, 4)
    assert manager.get_computed_blocks(TokenSequence("other", LONGER)).writer == "open"
