"""What the manager promises, one promise at a time; the state machine tries them together."""

import pytest

from headstart.cache import (
    AllBlocksCleared,
    BlockEvicted,
    BlockStored,
    CacheConfig,
    MissReason,
    MultiModalItem,
    RowCopy,
    TokenSequence,
)
from headstart.errors import CacheError, ConfigError
from tests.cache.snapshot import snapshot
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


# Hits to the token


def test_a_full_hit_computes_one_token_and_takes_no_block() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    second = TokenSequence("second", PROMPT[:8])
    assert admit(manager, second) == 7
    assert second.block_ids == [0, 1]
    assert [block.writer for block in second.blocks] == [None, None]  # so it writes nowhere


def test_the_head_of_a_block_is_copied() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    second = TokenSequence("second", [*PROMPT[:6], 0, 0, 0])
    found = manager.get_computed_blocks(second)
    assert (found.num_tokens, len(found.blocks)) == (6, 1)
    allocation = manager.allocate_slots(second, 3, found)
    assert allocation is not None
    assert allocation.copies == (RowCopy(source_block=1, target_block=2, num_rows=2),)
    assert second.block_ids == [0, 2, 3]
    manager.check()


def test_nothing_is_copied_for_the_token_that_is_computed_anyway() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    for length, num_tokens in ((5, 4), (8, 7)):
        found = manager.get_computed_blocks(TokenSequence("second", PROMPT[:length]))
        assert (found.num_tokens, found.partial) == (num_tokens, None)
    found = manager.get_computed_blocks(TokenSequence("second", PROMPT[:7]))
    assert found.partial is not None
    assert (found.num_tokens, found.partial.num_rows) == (6, 2)


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


def test_a_tail_that_another_block_covers_is_not_kept() -> None:
    manager = make_manager()
    finish(manager, "long", PROMPT[:8])
    finish(manager, "short", PROMPT[:6])
    assert cached_ids(manager) == [0, 1]


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    manager = make_manager()
    for length in (1, 2, 3):
        finish(manager, f"of {length}", PROMPT[:length])
    assert len(cached_ids(manager)) == 1
    finish(manager, "whole", PROMPT[:4])
    assert len(cached_ids(manager)) == 1
    assert free_ids(manager)[-1] == cached_ids(manager)[0]


def test_tails_that_differ_are_both_kept() -> None:
    manager = make_manager()
    finish(manager, "one", [1, 2])
    finish(manager, "other", [1, 3])
    assert (hits(manager, [1, 2, 0]), hits(manager, [1, 3, 0])) == (2, 2)


def test_a_tail_is_no_full_block() -> None:
    """It has no name and no event, and nothing hangs under it."""
    manager = make_manager(events=True)
    finish(manager, "first", PROMPT)
    assert [type(event) for event in manager.take_events()] == [BlockStored, BlockStored]
    finish(manager, "other", [1] * 28)
    assert hits(manager, [*PROMPT, 0]) == 10
    start(manager, "another", [2] * 4)  # takes the tail's block
    assert hits(manager, [*PROMPT, 0]) == 8
    assert all(isinstance(event, BlockStored) for event in manager.take_events())


def test_the_source_of_a_copy_may_be_the_block_that_is_taken() -> None:
    """All reads of copies come before all writes, so the last free block serves both."""
    manager = make_manager(num_blocks=1)
    finish(manager, "first", [1, 2, 3])
    second = TokenSequence("second", [1, 2, 4])
    found = manager.get_computed_blocks(second)
    allocation = manager.allocate_slots(second, 1, found)
    assert allocation is not None
    assert allocation.copies == (RowCopy(0, 0, 2),)
    manager.check()


def test_rows_are_not_copied_into_a_block_that_was_given_back() -> None:
    """Between lookup and admission another request has cached the very block."""
    manager = make_manager()
    finish(manager, "sister", [1, 2, 3, 9])
    late = TokenSequence("late", [1, 2, 3, 4, 5])
    found = manager.get_computed_blocks(late)
    assert found.partial is not None
    admit(manager, TokenSequence("first", [1, 2, 3, 4, 6]))
    allocation = manager.allocate_slots(late, 2, found)
    assert allocation is not None
    assert late.block_ids[0] == 1
    assert allocation.copies == ()
    manager.check()


def test_a_block_of_the_step_under_way_is_hit_but_not_copied_from() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    admit(manager, first)
    assert hits(manager, [*PROMPT[:8], 0]) == 8
    assert hits(manager, [*PROMPT[:6], 0, 0, 0]) == 4
    manager.commit_step()
    assert hits(manager, [*PROMPT[:6], 0, 0, 0]) == 6


def test_blocks_of_the_step_under_way_are_passed_over_for_the_next_best() -> None:
    """On both sides of the place where the new block would stand."""
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


def test_only_a_block_of_the_step_under_way_is_no_head() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("running", [1, 2, 3, 4]))
    admit(manager, TokenSequence("sister", [1, 2, 3, 5]))
    assert hits(manager, [1, 2, 3, 6]) == 0
    manager.commit_step()
    assert hits(manager, [1, 2, 3, 6]) == 3


# Twins


def test_a_twin_waits_for_what_the_first_computes_then_shares_it() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first, 2)
    assert manager.get_computed_blocks(second).writer == "first"
    manager.commit_step()
    assert manager.append_slots(first, 3)
    found = manager.get_computed_blocks(second)
    assert (found.num_tokens, found.writer) == (4, "first")
    manager.commit_step()
    assert manager.append_slots(first, 5)
    found = manager.get_computed_blocks(second)
    assert (found.num_tokens, found.writer) == (8, None)
    assert manager.allocate_slots(second, 2, found) is not None
    assert second.block_ids[:2] == first.block_ids[:2]
    manager.check()


def test_a_twin_in_the_same_step_shares_what_the_first_fills() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first)
    assert admit(manager, second) == 8
    manager.commit_step()
    assert (first.block_ids, second.block_ids) == ([0, 1, 2], [0, 1, 3])


def test_the_twin_of_an_aborted_request_goes_on_from_what_was_computed() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first, 6)
    manager.commit_step()
    manager.free(first)
    found = manager.get_computed_blocks(second)
    assert (found.num_tokens, found.writer) == (6, None)


def test_a_twin_waits_in_a_cache_that_has_seen_others() -> None:
    manager = make_manager()
    finish(manager, "other", [1] * 8)
    admit(manager, TokenSequence("first", PROMPT), 2)
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_tokens_that_came_later_are_waited_for() -> None:
    manager = make_manager()
    first = start(manager, "first", PROMPT[:4])
    for token in PROMPT[4:]:
        first.append(token)
    assert manager.append_slots(first)
    manager.check()
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_what_is_computed_is_announced_no_more() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    admit(manager, first, 2)
    for count in (4, 2, 2):
        assert first.in_progress is not None or first.num_computed_tokens == 8
        assert manager.append_slots(first, count)
        manager.check()
        manager.commit_step()
    assert first.in_progress is None


def test_one_that_does_not_read_is_waited_for_as_well() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    assert manager.allocate_slots(first, 2) is not None
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_nobody_is_waited_for_who_computes_something_else() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("first", PROMPT), 2)
    for other in (
        TokenSequence("other tokens", [*PROMPT[:3], 0, 0]),
        TokenSequence("other adapter", PROMPT, adapter="a"),
        TokenSequence("other salt", PROMPT, salt="s"),
        TokenSequence("other item", PROMPT, items=[MultiModalItem(b"x", 1, 1)]),
        TokenSequence("shorter than the block", PROMPT[:3]),
    ):
        assert manager.get_computed_blocks(other).writer is None, other.request_id


def test_a_request_that_only_decodes_is_not_waited_for() -> None:
    manager = make_manager()
    first = start(manager, "first", PROMPT)
    decode(manager, first, 1)
    assert manager.get_computed_blocks(TokenSequence("probe", [*PROMPT, 1, 2])).writer is None


# Isolation


@pytest.mark.parametrize("other", [{"adapter": "b"}, {"salt": "b"}, {"adapter": "a", "salt": "b"}])
def test_namespaces_share_nothing(other: dict[str, str]) -> None:
    manager = make_manager(num_blocks=20)
    finish(manager, "first", PROMPT, adapter="a", salt="a")
    sequence = TokenSequence("second", PROMPT, **({"adapter": "a", "salt": "a"} | other))  # type: ignore[arg-type]
    assert manager.get_computed_blocks(sequence).num_tokens == 0
    same = TokenSequence("third", PROMPT, adapter="a", salt="a")
    assert manager.get_computed_blocks(same).num_tokens == 9


def test_the_same_image_hits_and_another_does_not() -> None:
    manager = make_manager()
    cat, dog = (MultiModalItem(digest, 2, 5) for digest in (b"cat", b"dog"))
    finish(manager, "cat", PROMPT, items=(cat,))
    probe = TokenSequence("cat again", PROMPT, items=[cat])
    assert manager.get_computed_blocks(probe).num_tokens == 9
    probe = TokenSequence("dog", PROMPT, items=[dog])
    assert manager.get_computed_blocks(probe).num_tokens == 2


# Off means off


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
    assert all(block.writer is None for block in manager.pool.blocks)


# Failure


def test_a_failed_step_leaves_nothing_of_it_to_be_hit() -> None:
    manager = make_manager(events=True)
    bystander = start(manager, "bystander", [1] * 6)
    first = start(manager, "first", PROMPT[:5])
    first.token_ids.extend(PROMPT[5:])
    assert manager.append_slots(first, 5)
    twin = TokenSequence("twin", PROMPT)
    admit(manager, twin)
    assert manager.fail_step() == [first, twin]
    manager.check()
    assert (first.blocks, twin.blocks, manager.sequences) == ([], [], (bystander,))
    assert hits(manager, PROMPT) == 4  # of the step before
    assert bystander.block_ids == [0, 1]
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored)]
    assert len(stored) == 3  # and the last of them is taken back
    manager.commit_step()
    assert start(manager, "again", PROMPT).num_computed_tokens == 10


def test_a_failed_step_is_over() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("first", PROMPT))
    assert len(manager.fail_step()) == 1
    assert manager.fail_step() == []
    second = start(manager, "second", PROMPT)
    manager.free(second)


def test_only_the_requests_of_the_step_fail() -> None:
    manager = make_manager()
    first = start(manager, "first", [1, 2])
    second = start(manager, "second", [3, 4])
    second.append(5)
    assert manager.append_slots(second)
    assert manager.fail_step() == [second]
    assert manager.sequences == (first,)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_failed_copy_takes_no_one_else_s_block(deduplicate: bool) -> None:
    manager = make_manager(deduplicate=deduplicate)
    start(manager, "first", PROMPT)
    second = TokenSequence("second", PROMPT)
    assert manager.allocate_slots(second, 10) is not None
    assert manager.fail_step() == [second]
    manager.check()
    assert cached_ids(manager) == [0, 1]


# Misuse


def test_misuse_is_a_cache_error_and_changes_nothing() -> None:
    manager = make_manager(events=True)
    running = start(manager, "running", PROMPT)
    stepping = TokenSequence("stepping", [7] * 6)
    admit(manager, stepping, 3)
    stranger = TokenSequence("stranger", [8] * 6)
    impostor = TokenSequence("running", PROMPT)
    found = manager.get_computed_blocks(stranger)
    before = snapshot(manager, stranger, impostor)
    for misuse, complaint in (
        (lambda: manager.append_slots(running, 1), "from 1 to 0 tokens are left"),
        (lambda: manager.append_slots(stepping, 4), "4 slots asked for 'stepping'; from 1 to 3"),
        (lambda: manager.append_slots(stepping, 0), "0 slots asked for 'stepping'"),
        (lambda: manager.append_slots(stepping, -3), "-3 slots asked for 'stepping'"),
        (lambda: manager.append_slots(stranger, 1), "'stranger' holds no blocks"),
        (lambda: manager.append_slots(impostor, 1), "'running' holds no blocks"),
        (lambda: manager.free(stranger), "'stranger' holds no blocks; freed twice?"),
        (lambda: manager.free(impostor), "'running' holds no blocks; freed twice?"),
        (lambda: manager.free(stepping), "'stepping' is in a step"),
        (lambda: manager.allocate_slots(running, 1), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(impostor, 1), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(impostor, 1, found), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(stranger, 0, found), "0 slots asked for 'stranger'"),
        (lambda: manager.allocate_slots(stranger, 7, found), "7 slots asked for 'stranger'"),
        (lambda: manager.allocate_slots(stranger, -1), "-1 slots asked for 'stranger'"),
    ):
        with pytest.raises(CacheError, match=complaint):
            misuse()
        assert snapshot(manager, stranger, impostor) == before
    manager.check()


def test_what_was_hit_is_not_left_to_compute() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    sequence = TokenSequence("second", PROMPT)
    found = manager.get_computed_blocks(sequence)
    with pytest.raises(CacheError, match="3 slots asked for 'second'; from 1 to 2 tokens"):
        manager.allocate_slots(sequence, 3, found)
    assert manager.allocate_slots(sequence, 2, found) is not None


def test_a_new_sequence_has_nothing() -> None:
    sequence = TokenSequence("new", PROMPT)
    assert (sequence.num_computed_tokens, sequence.blocks, sequence.block_ids) == (0, [], [])
    assert not make_manager().is_known(sequence)


def test_a_lookup_of_another_sequence_is_refused() -> None:
    manager = make_manager()
    found = manager.get_computed_blocks(TokenSequence("one", PROMPT))
    with pytest.raises(CacheError, match="the lookup given for 'other' is another sequence's"):
        manager.allocate_slots(TokenSequence("other", PROMPT), 10, found)


def test_a_sequence_of_another_manager_is_refused() -> None:
    sequence = start(make_manager(), "one", PROMPT)
    manager = make_manager()
    with pytest.raises(CacheError, match="'one' holds blocks of another manager"):
        manager.allocate_slots(sequence, 1)
    with pytest.raises(CacheError, match="'one' holds no blocks"):
        manager.free(sequence)


@pytest.mark.parametrize("what", ["evicted", "reset"])
def test_a_lookup_older_than_a_loss_is_refused(what: str) -> None:
    manager = make_manager(num_blocks=3)
    finish(manager, "first", PROMPT[:8])
    sequence = TokenSequence("late", PROMPT[:9])
    found = manager.get_computed_blocks(sequence)
    if what == "evicted":
        finish(manager, "other", [1] * 12)
    else:
        assert manager.reset_prefix_cache()
    before = snapshot(manager, sequence)
    with pytest.raises(CacheError, match="lookup of 'late' is older than an eviction: look again"):
        manager.allocate_slots(sequence, 1, found)
    assert snapshot(manager, sequence) == before
    assert manager.allocate_slots(sequence, 9, manager.get_computed_blocks(sequence)) is not None


def test_a_token_that_is_none_moves_nothing() -> None:
    """Put into `token_ids` behind the sequence's back, it is refused where a block is cut."""
    manager = make_manager()
    sequence = start(manager, "one", PROMPT[:7])
    sequence.token_ids.append(-1)
    before = snapshot(manager)
    with pytest.raises(CacheError, match="token id -1"):
        manager.append_slots(sequence)
    assert snapshot(manager) == before
    other = TokenSequence("other", PROMPT[:7])
    other.token_ids.append(-1)
    with pytest.raises(CacheError, match="token id -1"):
        manager.allocate_slots(other, 8)
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_blocks": 0}, "num_blocks is 0; it must be at least 1"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"remember": -1}, "remember is -1; it must be at least 0"),
    ],
)
def test_options_out_of_range_are_config_errors(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CacheConfig(**({"num_blocks": 1} | options))
    assert CacheConfig(num_blocks=1, block_size=1, remember=0).num_blocks == 1


# All or nothing


def test_too_few_blocks_move_nothing() -> None:
    manager = make_manager(num_blocks=4, partial_hits=False)
    finish(manager, "first", PROMPT[:8])
    sequence = TokenSequence("big", [*PROMPT[:8], *range(9)])
    found = manager.get_computed_blocks(sequence)
    before = snapshot(manager, sequence)
    assert manager.allocate_slots(sequence, 9, found) is None  # 3 new, and 2 of 4 are hit
    assert snapshot(manager, sequence) == before
    assert manager.allocate_slots(sequence, 8, found) is not None
    assert manager.num_free_blocks == 0
    before = snapshot(manager, sequence)
    manager.commit_step()
    assert not manager.append_slots(sequence, 1)
    assert manager.num_free_blocks == 0
    manager.check()


def test_the_last_free_block_can_be_had() -> None:
    manager = make_manager(num_blocks=2)
    sequence = start(manager, "one", PROMPT[:4])
    decode(manager, sequence, *PROMPT[4:8])
    assert (sequence.block_ids, manager.num_free_blocks) == ([0, 1], 0)
    sequence.append(0)
    before = snapshot(manager)
    assert not manager.append_slots(sequence)
    assert snapshot(manager) == before


def test_blocks_that_another_holds_are_not_counted_twice() -> None:
    manager = make_manager(num_blocks=3)
    start(manager, "first", PROMPT[:8])
    second = TokenSequence("second", [*PROMPT[:8], 0, 0, 0, 0])
    assert admit(manager, second) == 8
    assert manager.num_free_blocks == 0


def test_a_copy_s_source_is_counted_once() -> None:
    """One free block left, and it is the source as well as the target."""
    manager = make_manager(num_blocks=3)
    first = start(manager, "first", PROMPT[:8])
    finish(manager, "second", [*PROMPT[:8], 1, 2])
    third = TokenSequence("third", [*PROMPT[:8], 1, 3])
    assert admit(manager, third) == 9
    assert third.block_ids == [*first.block_ids, 2]


# Preemption, reset, statistics, events


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
    assert (manager.stats.requests, manager.stats.resumed_requests) == (1, 1)


def test_a_request_that_does_not_read_gets_all_its_slots_anew() -> None:
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


def test_reset_forgets_everything_once_nobody_holds_a_block() -> None:
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


def test_events_tell_of_each_prefix_once() -> None:
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


def test_events_are_not_collected_unless_asked_for() -> None:
    manager = make_manager()
    finish(manager, "one", PROMPT)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == []


def test_duplicates_are_given_back() -> None:
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
    """The middle block was evicted; behind it the request meets what is cached still."""
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
