"""Requests that begin alike and arrive together compute their blocks once; others share nothing."""

import pytest

from headstart.cache import (
    MultiModalItem,
    TokenSequence,
)
from tests.cache.steps import (
    admit,
    decode,
    finish,
    make_manager,
    start,
)

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens


def test_a_twin_waits_for_the_first_request_and_shares_its_blocks() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first, 2)
    assert manager.get_computed_blocks(second).writer == "first"
    manager.commit_step()
    assert manager.append_slots(first, 3)
    match = manager.get_computed_blocks(second)
    assert (match.num_tokens, match.writer) == (4, "first")
    manager.commit_step()
    assert manager.append_slots(first, 5)
    match = manager.get_computed_blocks(second)
    assert (match.num_tokens, match.writer) == (8, None)
    assert manager.allocate_slots(second, 2, match) is not None
    assert second.block_ids[:2] == first.block_ids[:2]
    manager.check()


def test_a_twin_in_the_same_step_shares_the_blocks_that_the_first_fills() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first)
    assert admit(manager, second) == 8
    manager.commit_step()
    assert (first.block_ids, second.block_ids) == ([0, 1, 2], [0, 1, 3])


def test_the_twin_of_an_aborted_request_continues_from_its_computed_blocks() -> None:
    manager = make_manager()
    first, second = (TokenSequence(name, PROMPT) for name in ("first", "second"))
    admit(manager, first, 6)
    manager.commit_step()
    manager.free(first)
    match = manager.get_computed_blocks(second)
    assert (match.num_tokens, match.writer) == (6, None)


def test_a_twin_waits_in_a_cache_that_has_seen_others() -> None:
    manager = make_manager()
    finish(manager, "other", [1] * 8)
    admit(manager, TokenSequence("first", PROMPT), 2)
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_tokens_appended_later_are_waited_for() -> None:
    manager = make_manager()
    first = start(manager, "first", PROMPT[:4])
    for token in PROMPT[4:]:
        first.append(token)
    assert manager.append_slots(first)
    manager.check()
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_computed_blocks_are_no_longer_announced() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    admit(manager, first, 2)
    for count in (4, 2, 2):
        assert first.in_progress is not None or first.num_computed_tokens == 8
        assert manager.append_slots(first, count)
        manager.check()
        manager.commit_step()
    assert first.in_progress is None


def test_a_request_that_does_not_read_the_cache_is_waited_for_too() -> None:
    manager = make_manager()
    first = TokenSequence("first", PROMPT)
    assert manager.allocate_slots(first, 2) is not None
    assert manager.get_computed_blocks(TokenSequence("second", PROMPT)).writer == "first"


def test_requests_with_other_prompts_are_not_waited_for() -> None:
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
