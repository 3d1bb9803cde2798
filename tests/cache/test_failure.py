"""Failed steps, misuse, and too few blocks: nothing is lost, and no call is half done."""

import pytest

from headstart.cache import (
    BlockEvicted,
    BlockStored,
    CacheConfig,
    MissReason,
    TokenSequence,
)
from headstart.errors import CacheError, ConfigError
from tests.cache.snapshot import snapshot
from tests.cache.steps import (
    admit,
    cached_ids,
    counts,
    decode,
    finish,
    hits,
    make_manager,
    start,
)

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens


def test_a_failed_step_leaves_nothing_to_hit() -> None:
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


def test_a_failed_step_s_admissions_do_not_count() -> None:
    """Regression: they counted, and later admissions counted as those of resumed requests."""
    failing, other = make_manager(), make_manager()
    for manager in (failing, other):
        finish(manager, "before", PROMPT[:8])
        preempted = start(manager, "preempted", [3] * 6)
        manager.free(preempted)
        first = TokenSequence("first", PROMPT)
        before = counts(manager)
        for _ in range(2 if manager is failing else 0):
            admit(manager, first)
            admit(manager, preempted)
            assert manager.fail_step() == [first, preempted]
            assert counts(manager) == before
        admit(manager, first)
        admit(manager, preempted)
        manager.commit_step()
    assert counts(failing) == counts(other)
    assert (failing.stats.requests, failing.stats.resumed_requests) == (3, 1)


def test_a_request_whose_later_step_failed_is_resumed() -> None:
    manager = make_manager()
    sequence = start(manager, "one", PROMPT)
    sequence.append(1)
    assert manager.append_slots(sequence)
    assert manager.fail_step() == [sequence]
    assert admit(manager, sequence) == 8
    manager.commit_step()
    assert counts(manager) == (1, 10, 0, {MissReason.UNSEEN: 1}, 1, 11, 8)


def test_a_failed_step_is_over() -> None:
    manager = make_manager()
    admit(manager, TokenSequence("first", PROMPT))
    assert len(manager.fail_step()) == 1
    assert manager.fail_step() == []
    second = start(manager, "second", PROMPT)
    manager.free(second)


def test_the_blocks_of_a_discarded_request_are_not_cached() -> None:
    manager = make_manager()
    finish(manager, "before", PROMPT[:4])
    poisoned = start(manager, "poisoned", PROMPT[:9])
    decode(manager, poisoned, 1, 2, 3)
    other = TokenSequence("other", [5] * 8)
    admit(manager, other)
    poisoned.append(4)
    assert manager.append_slots(poisoned)
    manager.discard([poisoned])
    manager.check()
    manager.commit_step()
    assert (poisoned.block_ids, manager.sequences) == ([], (other,))
    assert hits(manager, [*PROMPT[:9], 1, 2, 3, 4]) == 4  # blocks that it hit itself
    assert hits(manager, [5] * 9) == 8
    with pytest.raises(CacheError, match="'poisoned' holds no blocks"):
        manager.discard([poisoned])


def test_a_block_that_another_holds_outlives_a_discarded_request() -> None:
    manager = make_manager()
    first, second = TokenSequence("first", PROMPT), TokenSequence("second", PROMPT)
    admit(manager, first)
    assert admit(manager, second) == 8
    manager.discard([first])
    manager.commit_step()
    assert hits(manager, PROMPT) == 8
    manager.free(second)
    assert hits(manager, PROMPT) == 9


def test_requests_that_are_discarded_together_leave_no_blocks() -> None:
    manager = make_manager(events=True)
    first, second = TokenSequence("first", PROMPT), TokenSequence("second", PROMPT)
    admit(manager, first)
    assert admit(manager, second) == 8
    manager.discard([first, second])
    manager.check()
    manager.commit_step()
    assert hits(manager, PROMPT) == 0
    kinds = [type(event) for event in manager.take_events()]
    assert kinds == [BlockStored, BlockStored, BlockEvicted, BlockEvicted]


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_hit_outlives_a_copy_that_is_discarded_with_its_reader(reader_first: bool) -> None:
    """Regression: the reader's blocks passed their identity to the other's copies.

    These were then removed too.
    """
    manager = make_manager(deduplicate=False)
    finish(manager, "before", PROMPT[:8])
    reader = start(manager, "reader", PROMPT)
    other = TokenSequence("other", PROMPT)
    assert manager.allocate_slots(other, 10) is not None
    manager.commit_step()
    manager.discard([reader, other] if reader_first else [other, reader])
    manager.check()
    assert cached_ids(manager) == [0, 1]
    assert hits(manager, PROMPT) == 8


def test_only_the_requests_of_the_step_fail() -> None:
    manager = make_manager()
    first = start(manager, "first", [1, 2])
    second = start(manager, "second", [3, 4])
    second.append(5)
    assert manager.append_slots(second)
    assert manager.fail_step() == [second]
    assert manager.sequences == (first,)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_failed_copy_affects_no_other_block(deduplicate: bool) -> None:
    manager = make_manager(deduplicate=deduplicate)
    start(manager, "first", PROMPT)
    second = TokenSequence("second", PROMPT)
    assert manager.allocate_slots(second, 10) is not None
    assert manager.fail_step() == [second]
    manager.check()
    assert cached_ids(manager) == [0, 1]


def test_misuse_is_a_cache_error_and_changes_nothing() -> None:
    manager = make_manager(events=True)
    running = start(manager, "running", PROMPT)
    stepping = TokenSequence("stepping", [7] * 6)
    admit(manager, stepping, 3)
    stranger = TokenSequence("stranger", [8] * 6)
    impostor = TokenSequence("running", PROMPT)
    match = manager.get_computed_blocks(stranger)
    before = snapshot(manager, stranger, impostor)
    for misuse, complaint in (
        (lambda: manager.append_slots(running, 1), "which has 0 tokens left"),
        (
            lambda: manager.append_slots(stepping, 4),
            "4 slots requested for 'stepping', which has 3 tokens left",
        ),
        (lambda: manager.append_slots(stepping, 0), "0 slots requested for 'stepping'"),
        (lambda: manager.append_slots(stepping, -3), "-3 slots requested for 'stepping'"),
        (lambda: manager.append_slots(stranger, 1), "'stranger' holds no blocks"),
        (lambda: manager.append_slots(impostor, 1), "'running' holds no blocks"),
        (lambda: manager.free(stranger), "'stranger' holds no blocks; freed twice?"),
        (lambda: manager.free(impostor), "'running' holds no blocks; freed twice?"),
        (lambda: manager.free(stepping), "'stepping' is in a step"),
        (lambda: manager.allocate_slots(running, 1), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(impostor, 1), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(impostor, 1, match), "'running' holds blocks already"),
        (lambda: manager.allocate_slots(stranger, 0, match), "0 slots requested for 'stranger'"),
        (lambda: manager.allocate_slots(stranger, 7, match), "7 slots requested for 'stranger'"),
        (lambda: manager.allocate_slots(stranger, -1), "-1 slots requested for 'stranger'"),
    ):
        with pytest.raises(CacheError, match=complaint):
            misuse()
        assert snapshot(manager, stranger, impostor) == before
    manager.check()


def test_hit_tokens_are_not_left_to_compute() -> None:
    manager = make_manager()
    finish(manager, "first", PROMPT[:8])
    sequence = TokenSequence("second", PROMPT)
    match = manager.get_computed_blocks(sequence)
    with pytest.raises(CacheError, match="3 slots requested for 'second', which has 2 tokens left"):
        manager.allocate_slots(sequence, 3, match)
    assert manager.allocate_slots(sequence, 2, match) is not None


def test_a_new_sequence_has_nothing() -> None:
    sequence = TokenSequence("new", PROMPT)
    assert (sequence.num_computed_tokens, sequence.blocks, sequence.block_ids) == (0, [], [])
    assert not make_manager().is_known(sequence)


def test_a_lookup_of_another_sequence_is_refused() -> None:
    manager = make_manager()
    match = manager.get_computed_blocks(TokenSequence("one", PROMPT))
    with pytest.raises(
        CacheError, match="the lookup passed for 'other' belongs to another sequence"
    ):
        manager.allocate_slots(TokenSequence("other", PROMPT), 10, match)


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
    match = manager.get_computed_blocks(sequence)
    if what == "evicted":
        finish(manager, "other", [1] * 12)
    else:
        assert manager.reset_prefix_cache()
    before = snapshot(manager, sequence)
    with pytest.raises(CacheError, match="lookup of 'late' is older than an eviction; repeat it"):
        manager.allocate_slots(sequence, 1, match)
    assert snapshot(manager, sequence) == before
    assert manager.allocate_slots(sequence, 9, manager.get_computed_blocks(sequence)) is not None


def test_an_invalid_token_moves_no_block() -> None:
    """Appended to `token_ids` directly, it is refused where a block is cut."""
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
        ({"num_blocks": 0}, "num_blocks is 0; allowed: a whole number of at least 1"),
        ({"block_size": 0}, "block_size is 0; allowed: a whole number of at least 1"),
        ({"ghost_entries": -1}, "ghost_entries is -1; allowed: a whole number of at least 0"),
    ],
)
def test_options_out_of_range_are_config_errors(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CacheConfig(**({"num_blocks": 1} | options))
    assert CacheConfig(num_blocks=1, block_size=1, ghost_entries=0).num_blocks == 1


def test_too_few_blocks_move_nothing() -> None:
    manager = make_manager(num_blocks=4, partial_hits=False)
    finish(manager, "first", PROMPT[:8])
    sequence = TokenSequence("big", [*PROMPT[:8], *range(9)])
    match = manager.get_computed_blocks(sequence)
    before = snapshot(manager, sequence)
    assert manager.allocate_slots(sequence, 9, match) is None  # 3 new, and 2 of 4 are hit
    assert snapshot(manager, sequence) == before
    assert manager.allocate_slots(sequence, 8, match) is not None
    assert manager.num_free_blocks == 0
    before = snapshot(manager, sequence)
    manager.commit_step()
    assert not manager.append_slots(sequence, 1)
    assert manager.num_free_blocks == 0
    manager.check()


def test_the_last_free_block_can_be_allocated() -> None:
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
    """One block is free, and it is both the source and the target."""
    manager = make_manager(num_blocks=3)
    first = start(manager, "first", PROMPT[:8])
    finish(manager, "second", [*PROMPT[:8], 1, 2])
    third = TokenSequence("third", [*PROMPT[:8], 1, 3])
    assert admit(manager, third) == 9
    assert third.block_ids == [*first.block_ids, 2]


def test_another_managers_running_sequence_gets_no_slots() -> None:
    own, other = make_manager(), make_manager()
    sequence = start(own, "running", PROMPT[:6])
    sequence.append(5)
    with pytest.raises(CacheError, match="'running' holds no blocks"):
        other.append_slots(sequence)
    assert own.append_slots(sequence)
    own.check()


@pytest.mark.parametrize("partial_hits", [False, True])
def test_a_lookup_of_another_manager_moves_nothing_in_either(partial_hits: bool) -> None:
    cached, empty = (make_manager(partial_hits=partial_hits) for _ in range(2))
    finish(cached, "first", PROMPT)
    sequence = TokenSequence("second", PROMPT)
    for theirs, ours in ((cached, empty), (empty, cached)):
        match = theirs.get_computed_blocks(sequence)
        for lookup in (match, match.cut(0, theirs.block_size)):
            before = snapshot(theirs, sequence), snapshot(ours)
            with pytest.raises(CacheError, match="lookup of 'second' belongs to another manager"):
                ours.allocate_slots(sequence, 1, lookup)
            with pytest.raises(CacheError, match="lookup of 'second' belongs to another manager"):
                ours.can_admit(lookup)
            assert (snapshot(theirs, sequence), snapshot(ours)) == before
    assert hits(cached, PROMPT) == (9 if partial_hits else 8)


def test_every_call_refuses_a_sequence_that_another_manager_admitted() -> None:
    theirs, ours = make_manager(), make_manager()
    sequence = start(theirs, "one", PROMPT)
    sequence.append(1)
    before = snapshot(theirs, sequence), snapshot(ours)
    for call in (
        lambda: ours.allocate_slots(sequence, 1, ours.get_computed_blocks(sequence)),
        lambda: ours.append_slots(sequence, 1),
        lambda: ours.free(sequence),
        lambda: ours.discard([sequence]),
    ):
        with pytest.raises(CacheError, match="'one' holds"):
            call()
        assert (snapshot(theirs, sequence), snapshot(ours)) == before
    assert theirs.append_slots(sequence, 1)


def test_a_sequence_cut_for_one_block_size_is_refused_by_another() -> None:
    """Its keys would be those of other blocks: a hit on rows of other tokens."""
    sequence = start(make_manager(), "one", list(range(16)))
    manager = make_manager(block_size=8)
    for call in (manager.get_computed_blocks, manager.explain, manager.block_hashes):
        with pytest.raises(CacheError, match=r"blocks of 4 tokens; it cannot be used with .* 8"):
            call(sequence)


def test_a_prompt_that_never_fits_is_an_error() -> None:
    manager = make_manager(num_blocks=3)
    for tokens, ever in ((12, True), (13, False)):
        running = start(manager, "running", [7])
        sequence = TokenSequence("waits", list(range(tokens)))
        assert manager.allocate_slots(sequence, tokens) is None
        manager.free(running)
        assert (manager.allocate_slots(sequence, tokens) is not None) is ever
        assert manager.fits(sequence) is ever
        manager.fail_step()
