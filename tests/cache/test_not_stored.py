"""Sequences that read the cache and leave nothing in it."""

from headstart.cache import TokenSequence
from tests.cache.steps import admit, cached_ids, decode, finish, free_ids, hits, make_manager

TEXT = list(range(14))


def not_stored(name: str, tokens: list[int]) -> TokenSequence:
    sequence = TokenSequence(name, tokens)
    sequence.is_stored = False
    return sequence


def test_nothing_that_it_computes_is_found_while_it_runs_or_later() -> None:
    manager = make_manager()
    sequence = not_stored("secret", TEXT)
    assert admit(manager, sequence) == 0
    assert hits(manager, TEXT) == 0
    manager.commit_step()
    decode(manager, sequence, 1, 2, 3)
    assert hits(manager, TEXT) == 0
    manager.free(sequence)
    manager.check()
    assert hits(manager, TEXT) == 0
    assert cached_ids(manager) == []


def test_it_hits_what_others_left_and_that_stays() -> None:
    manager = make_manager()
    finish(manager, "open", TEXT)
    sequence = not_stored("secret", [*TEXT, 20, 21, 22, 23, 24])
    assert admit(manager, sequence) == 14
    manager.commit_step()
    manager.free(sequence)
    manager.check()
    assert hits(manager, [*TEXT, 20, 21, 22, 23, 24]) == 14


def test_its_blocks_are_the_next_to_be_reused() -> None:
    manager = make_manager()
    finish(manager, "open", [9] * 8)
    sequence = not_stored("secret", TEXT)
    admit(manager, sequence)
    table = list(sequence.block_ids)
    manager.commit_step()
    manager.free(sequence)
    assert sorted(free_ids(manager)[:4]) == sorted(table)


def test_nobody_waits_for_what_it_computes() -> None:
    """A lookup names who writes the next block; that one would never come."""
    manager = make_manager()
    sequence = not_stored("secret", TEXT)
    admit(manager, sequence, 4)
    assert manager.get_computed_blocks(TokenSequence("other", TEXT)).writer is None
    stored = TokenSequence("open", TEXT)
    admit(manager, stored, 4)
    assert manager.get_computed_blocks(TokenSequence("other", TEXT)).writer == "open"
