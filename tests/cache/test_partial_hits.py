"""Hits to the token: heads of blocks that are copied, and partial blocks of finished requests."""

from headstart.cache import (
    BlockStored,
    RowCopy,
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
from tests.cache.unwalked import unwalked
from tests.interruptions import Interruption

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens


def test_a_full_hit_computes_one_token_and_takes_no_block() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    second = TokenSequence("second", PROMPT[:8])
    assert admit(manager, second) == 7
    assert second.block_ids == [0, 1]
    assert second.slots(7, 8, 4, scratch=-1) == [-1]  # so it writes nowhere


def test_the_head_of_a_block_is_copied() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    second = TokenSequence("second", [*PROMPT[:6], 0, 0, 0])
    match = manager.get_computed_blocks(second)
    assert (match.num_tokens, len(match.blocks)) == (6, 1)
    allocation = manager.allocate_slots(second, 3, match)
    assert allocation is not None
    assert allocation.copies == (RowCopy(source_block=1, target_block=2, num_rows=2),)
    assert second.block_ids == [0, 2, 3]
    manager.check()


def test_the_row_of_the_computed_token_is_not_copied() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    for length, num_tokens in ((5, 4), (8, 7)):
        match = manager.get_computed_blocks(TokenSequence("second", PROMPT[:length]))
        assert (match.num_tokens, match.partial) == (num_tokens, None)
    match = manager.get_computed_blocks(TokenSequence("second", PROMPT[:7]))
    assert match.partial is not None
    assert (match.num_tokens, match.partial.num_rows) == (6, 2)


def test_no_head_is_copied_when_partial_hits_are_off() -> None:
    manager = make_manager(partial_hits=False)
    finish(manager, "first", PROMPT[:8])
    assert hits(manager, [*PROMPT[:6], 0, 0, 0]) == 4


def test_the_longest_head_of_several_is_taken() -> None:
    manager = make_manager(num_blocks=20)
    for at, tokens in enumerate([[1, 2, 3, 4], [1, 2, 4, 4], [1, 3, 3, 3], [2, 2, 2, 2]]):
        finish(manager, f"request {at}", tokens)
    probes = {(1, 2, 4, 5): 3, (1, 2, 5, 5): 2, (1, 2, 0, 0): 2, (1, 9, 9, 9): 1, (3, 3, 3, 3): 0}
    for probe, rows in probes.items():
        assert hits(manager, [*probe, 0]) == rows


def test_a_finished_request_s_last_block_hits_to_the_token() -> None:
    manager = make_manager()
    first = start(manager, "first", PROMPT)
    assert hits(manager, [*PROMPT, 0, 0]) == 8  # its rows may still be joined by others
    manager.free(first)
    assert hits(manager, [*PROMPT, 0, 0]) == 10
    assert hits(manager, PROMPT) == 9
    assert hits(manager, [*PROMPT[:9], 0, 0]) == 9


def test_a_reply_s_last_tokens_hit_in_the_next_turn() -> None:
    manager = make_manager()
    first = start(manager, "turn 1", PROMPT)
    decode(manager, first, 1, 2, 3)
    first.append(4)  # sampled last, and never computed
    manager.free(first)
    assert hits(manager, [*PROMPT, 1, 2, 3, 4, 5, 6, 7]) == 13


def test_a_partial_block_that_another_block_covers_is_dropped() -> None:
    manager = make_manager()
    finish(manager, "long", PROMPT[:8])
    finish(manager, "short", PROMPT[:6])
    assert cached_ids(manager) == [0, 1]


def test_a_longer_partial_block_replaces_a_shorter_one() -> None:
    manager = make_manager()
    for length in (1, 2, 3):
        finish(manager, f"of {length}", PROMPT[:length])
    assert len(cached_ids(manager)) == 1
    finish(manager, "whole", PROMPT[:4])
    assert len(cached_ids(manager)) == 1
    assert free_ids(manager)[-1] == cached_ids(manager)[0]


def test_partial_blocks_that_differ_are_both_cached() -> None:
    manager = make_manager()
    finish(manager, "one", [1, 2])
    finish(manager, "other", [1, 3])
    assert (hits(manager, [1, 2, 0]), hits(manager, [1, 3, 0])) == (2, 2)


def test_a_partial_block_is_not_a_full_block() -> None:
    """It has no name, no event and no children."""
    manager = make_manager(events=True)
    finish(manager, "first", PROMPT)
    assert [type(event) for event in manager.take_events()] == [BlockStored, BlockStored]
    finish(manager, "other", [1] * 28)
    assert hits(manager, [*PROMPT, 0]) == 10
    start(manager, "another", [2] * 4)  # takes the partial block's place
    assert hits(manager, [*PROMPT, 0]) == 8
    assert all(isinstance(event, BlockStored) for event in manager.take_events())


def test_the_source_of_a_copy_may_be_the_block_that_is_taken() -> None:
    """All reads of copies come before all writes, so the last free block serves both."""
    manager = make_manager(num_blocks=1)
    finish(manager, "first", [1, 2, 3])
    second = TokenSequence("second", [1, 2, 4])
    match = manager.get_computed_blocks(second)
    allocation = manager.allocate_slots(second, 1, match)
    assert allocation is not None
    assert allocation.copies == (RowCopy(0, 0, 2),)
    manager.check()


def test_rows_are_not_copied_into_a_released_block() -> None:
    """Between lookup and admission another request caches the same block."""
    manager = make_manager()
    finish(manager, "sister", [1, 2, 3, 9])
    late = TokenSequence("late", [1, 2, 3, 4, 5])
    match = manager.get_computed_blocks(late)
    assert match.partial is not None
    admit(manager, TokenSequence("first", [1, 2, 3, 4, 6]))
    allocation = manager.allocate_slots(late, 2, match)
    assert allocation is not None
    assert late.block_ids[0] == 1
    assert allocation.copies == ()
    manager.check()


def test_an_unwritten_block_is_hit_but_not_copied_from() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    admit(manager, first)
    assert hits(manager, [*PROMPT[:8], 0]) == 8
    assert hits(manager, [*PROMPT[:6], 0, 0, 0]) == 4
    manager.commit_step()
    assert hits(manager, [*PROMPT[:6], 0, 0, 0]) == 6


def test_unwritten_blocks_are_skipped_for_the_next_best() -> None:
    """They stand on both sides of the position of the new block."""
    manager = make_manager(num_blocks=20)
    for at, tokens in enumerate([[5, 5, 1, 1], [5, 5, 5, 9], [5, 9, 9, 9], [6, 6, 6, 6]]):
        finish(manager, f"request {at}", tokens)
    assert hits(manager, [5, 5, 5, 5, 0]) == 3
    for at, tokens in enumerate([[5, 5, 5, 4], [5, 5, 5, 6], [5, 5, 4, 4]]):
        manager.allocate_slots(TokenSequence(f"running {at}", tokens), 4)
    assert hits(manager, [5, 5, 5, 5, 0]) == 3
    assert hits(manager, [5, 5, 5, 3, 0]) == 3
    assert hits(manager, [5, 5, 4, 5, 0]) == 2
    assert hits(manager, [5, 5, 5, 4, 0]) == 4
    manager.check()


def test_an_unwritten_block_alone_is_not_a_head() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("running", [1, 2, 3, 4]))
    admit(manager, TokenSequence("sister", [1, 2, 3, 5]))
    assert hits(manager, [1, 2, 3, 6]) == 0
    manager.commit_step()
    assert hits(manager, [1, 2, 3, 6]) == 3


def test_an_admission_does_not_look_at_the_unwritten_siblings_of_its_step() -> None:
    def lines(num_others: int) -> int:
        manager = make_manager(num_blocks=2 * num_others + 10)
        for at in range(num_others):
            other = TokenSequence(f"{at}", [1000 + at] * 5)
            assert manager.allocate_slots(other, 5, manager.get_computed_blocks(other)) is not None
        sequence = TokenSequence("next", [7] * 5)
        index = manager.pool.index
        index._unordered = unwalked(index._unordered)
        manager._sequences = unwalked(manager._sequences)
        with Interruption() as counted:
            assert manager.allocate_slots(sequence, 5, manager.get_computed_blocks(sequence))
        return len(counted.lines)

    assert lines(400) == lines(4)
