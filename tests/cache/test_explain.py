"""Reasons for misses, and the token from which each applies."""

import random
import re
from collections import OrderedDict
from pathlib import Path

import pytest

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    KVCacheManager,
    MissExplanation,
    MissReason,
    MultiModalItem,
    TokenSequence,
)
from tests.cache.snapshot import snapshot
from tests.cache.steps import admit, decode, finish, make_manager, start
from tests.cache.unwalked import unwalked
from tests.interruptions import Interruption

LONG = list(range(100, 112))  # three blocks of four


def explain(
    manager: KVCacheManager, tokens: list[int], *, across_salts: bool = False, **options: object
) -> tuple[MissReason, int]:
    """Explain a new request's misses; check that its admission counts the same."""
    sequence = TokenSequence("probe", tokens, **options)  # type: ignore[arg-type]
    before = snapshot(manager)
    explanation = manager.explain(sequence, across_salts=across_salts)
    assert snapshot(manager) == before
    if not across_salts and manager.num_free_blocks >= 4:
        match = manager.get_computed_blocks(sequence)
        allocation = manager.allocate_slots(sequence, 1, match)
        assert allocation is not None
        assert allocation.missed == explanation
        manager.fail_step()
    return explanation.reason, explanation.position


def test_no_reason_when_all_but_the_last_token_hit() -> None:
    manager = make_manager()
    finish(manager, "first", LONG)
    assert explain(manager, LONG) == (MissReason.NONE, 11)
    assert explain(manager, [*LONG, 0]) == (MissReason.NONE, 12)
    assert explain(manager, LONG[:6]) == (MissReason.NONE, 5)
    assert explain(manager, [7]) == (MissReason.NONE, 0)


def test_disabled() -> None:
    manager = make_manager(enable_prefix_caching=False)
    finish(manager, "first", LONG)
    assert explain(manager, LONG) == (MissReason.DISABLED, 0)


def test_not_read() -> None:
    manager = make_manager()
    finish(manager, "first", LONG)
    sequence = TokenSequence("second", LONG)
    allocation = manager.allocate_slots(sequence, 12)
    assert allocation is not None
    assert allocation.missed == MissExplanation(MissReason.NOT_READ, 0)
    manager.commit_step()
    assert manager.stats.missed[MissReason.NOT_READ] == 1


def test_unseen_in_an_empty_cache_and_in_a_full_one() -> None:
    manager = make_manager()
    assert explain(manager, LONG) == (MissReason.UNSEEN, 0)
    finish(manager, "first", LONG)
    assert explain(manager, [1, 2, 3, 4, 5]) == (MissReason.UNSEEN, 0)


def test_unseen_beyond_all_that_is_cached() -> None:
    manager = make_manager()
    finish(manager, "first", LONG)
    assert explain(manager, [*LONG, 1, 2, 3, 4, 5]) == (MissReason.UNSEEN, 12)


def test_unseen_beyond_a_partial_block() -> None:
    """The next turn of a chat continues all that is cached; no cached token differs."""
    manager = make_manager()
    finish(manager, "turn 1", [*LONG, 1, 2])
    assert explain(manager, [*LONG, 1, 2, 3, 4, 5]) == (MissReason.UNSEEN, 14)
    item = MultiModalItem(b"cat", 14, 2)
    assert explain(manager, [*LONG, 1, 2, 9, 9, 5], items=[item]) == (MissReason.UNSEEN, 14)


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("at", [1, 3, 4, 7, 11])
def test_token_and_its_position(partial_hits: bool, at: int) -> None:
    manager = make_manager(partial_hits=partial_hits)
    finish(manager, "first", LONG)
    finish(manager, "other", [1, 2, 3, 4])
    prompt = [*LONG[:at], 0, *LONG[at + 1 :], 5]
    assert explain(manager, prompt) == (MissReason.TOKEN, at)


def test_token_where_the_closest_of_several_differs() -> None:
    manager = make_manager()
    for at, third in enumerate([10, 20, 30]):
        finish(manager, f"request {at}", [1, 2, third, 4])
        finish(manager, f"late {at}", [1, 2, third, 9])
    assert explain(manager, [1, 2, 20, 5, 0]) == (MissReason.TOKEN, 3)
    assert explain(manager, [1, 2, 25, 5, 0]) == (MissReason.TOKEN, 2)
    assert explain(manager, [1, 7, 25, 5, 0]) == (MissReason.TOKEN, 1)


def test_evicted() -> None:
    manager = make_manager(num_blocks=5, partial_hits=False, ghost_entries=2)
    finish(manager, "first", LONG)
    finish(manager, "other", list(range(16)))  # takes the two empty blocks, then 2 and 1
    assert explain(manager, [*LONG, 0]) == (MissReason.EVICTED, 4)


def test_evicted_where_the_head_is_still_in_another_block() -> None:
    manager = make_manager(num_blocks=8, ghost_entries=8)
    finish(manager, "first", LONG[:8])
    finish(manager, "sister", [*LONG[:6], 1, 2])
    assert manager.get_computed_blocks(TokenSequence("probe", [*LONG[:8], 0])).num_tokens == 8
    finish(manager, "other", list(range(24)))  # leaves the oldest to be evicted, and one more
    assert explain(manager, [*LONG[:8], 0]) == (MissReason.EVICTED, 6)


def test_evictions_are_remembered_for_the_configured_number_of_blocks() -> None:
    """The last block of a prompt is evicted first; what is evicted last is remembered longest."""
    manager = make_manager(num_blocks=6, partial_hits=False, ghost_entries=2)
    finish(manager, "first", list(range(100, 124)))
    finish(manager, "other", list(range(24)))
    sequence = TokenSequence("probe", list(range(100, 125)))
    assert manager.explain(sequence) == MissExplanation(MissReason.EVICTED, 0)
    root = manager.pool.index.root(sequence.namespace)
    assert root is not None
    nodes, keys = [], sequence.cut(4)
    node = manager.pool.index.find(root, keys[0])
    while node is not None:
        nodes.append(node)
        node = manager.pool.index.find(node, keys[len(nodes)])
    assert len(nodes) == 2
    manager.check()


def test_no_evictions_are_remembered_if_disabled() -> None:
    manager = make_manager(num_blocks=3, partial_hits=False, ghost_entries=0)
    finish(manager, "first", LONG)
    finish(manager, "other", list(range(12)))
    assert explain(manager, LONG) == (MissReason.UNSEEN, 0)
    assert manager.pool.index.root(TokenSequence("x", [1]).namespace) is not None
    finish(manager, "salted", list(range(12)), salt="s")
    assert [root.namespace.salt for root in manager.pool.index.roots()] == ["s"]
    manager.check()


def test_adapter() -> None:
    manager = make_manager()
    finish(manager, "first", LONG, adapter="lora")
    assert explain(manager, LONG) == (MissReason.ADAPTER, 0)
    assert explain(manager, LONG, adapter="other") == (MissReason.ADAPTER, 0)
    assert explain(manager, [1, *LONG], adapter="other") == (MissReason.UNSEEN, 0)


@pytest.mark.parametrize("num_shared", [4, 400])
def test_the_cost_of_an_admission_does_not_grow_with_adapters(num_shared: int) -> None:
    shared = list(range(num_shared))

    def admission_lines(num_adapters: int) -> int:
        manager = make_manager(num_blocks=(num_adapters + 3) * (num_shared // 4 + 3))
        for at in range(num_adapters):
            start(manager, f"{at}", [*shared, 1, 2, 3, 4], adapter=f"{at}")
        start(manager, "mine", shared, adapter="mine")
        sequence = TokenSequence("next", [*shared, 1, 2, 3, 4, 5], adapter="mine")
        index = manager.pool.index
        index._roots = unwalked(index._roots)
        manager._sequences = unwalked(manager._sequences)
        with Interruption() as counted:
            match = manager.get_computed_blocks(sequence)
            assert manager.allocate_slots(sequence, 5, match) is not None
        return len(counted.lines)

    assert admission_lines(60) == admission_lines(30)
    assert admission_lines(30) < admission_lines(0) + 200


def test_the_latest_adapters_are_searched_without_visiting_deleted_ones() -> None:
    """Iterated backwards, a dict walks over all items that were deleted after its last one."""
    manager = make_manager()
    for adapter in (None, "a", "b"):
        finish(manager, "one", [1] * 4, adapter=adapter)
    assert isinstance(manager.pool.index._roots[None], OrderedDict)
    recent = manager.pool.index.recent_roots(None, 2)
    assert [root.namespace.adapter for root in recent] == [None, "b"]


def test_adapter_is_the_reason_if_another_adapter_has_more() -> None:
    manager = make_manager()
    finish(manager, "base", LONG[:8])
    finish(manager, "first", LONG, adapter="lora")
    assert explain(manager, [*LONG, 0]) == (MissReason.ADAPTER, 8)
    manager.reset_prefix_cache()
    finish(manager, "base", LONG[:8])
    finish(manager, "first", LONG[:8], adapter="lora")
    assert explain(manager, [*LONG, 0]) == (MissReason.UNSEEN, 8)


def test_salt_is_a_reason_only_across_salts() -> None:
    manager = make_manager()
    finish(manager, "first", LONG, salt="tenant a")
    assert explain(manager, LONG, salt="tenant b") == (MissReason.UNSEEN, 0)
    assert explain(manager, LONG) == (MissReason.UNSEEN, 0)
    wide = {"across_salts": True}
    assert explain(manager, LONG, salt="tenant b", **wide) == (MissReason.SALT, 0)
    assert explain(manager, LONG, **wide) == (MissReason.SALT, 0)
    assert explain(manager, LONG, salt="tenant a", **wide) == (MissReason.NONE, 11)
    assert explain(manager, [1, *LONG], salt="tenant b", **wide) == (MissReason.UNSEEN, 0)


def test_the_adapter_of_another_tenant_is_not_reported() -> None:
    manager = make_manager()
    finish(manager, "first", LONG, salt="tenant a", adapter="lora")
    assert explain(manager, LONG, salt="tenant b") == (MissReason.UNSEEN, 0)
    assert explain(manager, LONG, salt="tenant b", across_salts=True) == (MissReason.UNSEEN, 0)


def test_item() -> None:
    manager = make_manager()
    cat, dog = MultiModalItem(b"cat", 5, 4), MultiModalItem(b"dog", 5, 4)
    prompt = [1, 2, 3, 4, 5, 9, 9, 9, 9, 6, 7, 8]
    finish(manager, "cat", prompt, items=(cat,))
    assert explain(manager, prompt, items=(dog,)) == (MissReason.ITEM, 5)
    assert explain(manager, prompt) == (MissReason.ITEM, 5)
    assert explain(manager, [*prompt[:9], 0, 0, 0], items=(cat,)) == (MissReason.TOKEN, 9)


def test_item_at_the_very_first_token() -> None:
    manager = make_manager()
    finish(manager, "cat", [9, 9, 9, 9], items=(MultiModalItem(b"cat", 0, 4),))
    dog = MultiModalItem(b"dog", 0, 4)
    assert explain(manager, [9, 9, 9, 9, 1], items=(dog,)) == (MissReason.ITEM, 0)


def test_shorter_than_a_block() -> None:
    manager = make_manager()
    assert explain(manager, [1, 2, 3]) == (MissReason.SHORT, 0)
    finish(manager, "first", LONG)
    assert explain(manager, [*LONG, 1, 2, 3]) == (MissReason.SHORT, 12)
    assert explain(manager, [100, 1, 2]) == (MissReason.SHORT, 1)


def test_in_progress() -> None:
    manager = make_manager()
    first = TokenSequence("first", LONG)
    admit(manager, first, 6)
    assert explain_running(manager, LONG) == (MissReason.IN_PROGRESS, 4)
    manager.commit_step()
    assert manager.append_slots(first, 6)
    manager.commit_step()
    assert explain_running(manager, LONG) == (MissReason.NONE, 11)


def explain_running(manager: KVCacheManager, tokens: list[int]) -> tuple[MissReason, int]:
    explanation = manager.explain(TokenSequence("probe", tokens))
    return explanation.reason, explanation.position


def test_an_explanation_reads_as_a_sentence() -> None:
    assert str(MissExplanation(MissReason.TOKEN, 17)) == (
        "from token 17 on: differs from the cached tokens"
    )
    assert str(MissExplanation(MissReason.NONE, 3)) == "every reusable token was hit"


def test_generated_tokens_count_like_prompt_tokens() -> None:
    manager = make_manager()
    sequence = start(manager, "first", LONG[:3])
    decode(manager, sequence, *LONG[3:6])
    assert explain_running(manager, [*LONG[:5], 0]) == (MissReason.SHORT, 4)
    manager.free(sequence)
    assert explain_running(manager, [*LONG[:6], 0]) == (MissReason.NONE, 6)


def test_a_caller_that_cannot_use_all_of_a_hit_is_the_reason() -> None:
    manager = make_manager()
    finish(manager, "a", list(range(12)))
    again = TokenSequence("b", list(range(13)))
    for blocks in (2, 0):
        match = manager.get_computed_blocks(again).cut(blocks, 4)
        assert (len(match.blocks), match.num_tokens, match.partial) == (blocks, blocks * 4, None)
        allocation = manager.allocate_slots(again, 13 - match.num_tokens, match)
        assert allocation is not None
        assert allocation.missed == MissExplanation(MissReason.OUTPUTS, blocks * 4)
        manager.check()
        manager.commit_step()
        manager.free(again)


def test_an_adapter_of_another_tenant_behind_a_public_prefix_is_not_named() -> None:
    names = BlockHasher(4, "model")
    names.publish(LONG[:8])
    manager = KVCacheManager(CacheConfig(num_blocks=32, block_size=4), names)
    reasons = []
    for salt, adapter in (("a", "secret"), ("b", None)):
        sequence = TokenSequence(
            salt, [*LONG[:8], 1, 2, 3], salt=salt, adapter=adapter, public=names.public
        )
        match = manager.get_computed_blocks(sequence)
        allocation = manager.allocate_slots(sequence, 11 - match.num_tokens, match)
        assert allocation is not None
        reasons.append(str(allocation.missed))
        manager.commit_step()
        manager.free(sequence)
    assert "secret" not in reasons[1] and reasons[1] == reasons[0]


@pytest.mark.parametrize("eviction", ["lru", "adaptive-lru", "fair-lru"])
def test_every_miss_of_a_loop_that_is_larger_than_the_pool_is_an_eviction(eviction: str) -> None:
    """The prompts begin alike within the first block, so another child is always cached."""
    manager = make_manager(num_blocks=140, eviction=eviction)
    for turn in range(3):
        for document in range(5):
            prompt = [1, 2, document, *range(57 * 4), turn]
            finish(manager, f"{document} {turn}", prompt)
    assert manager.stats.missed[MissReason.EVICTED] == 10
    manager.check()


def test_evicted_where_another_follows_the_same_prefix() -> None:
    manager = make_manager(num_blocks=11, partial_hits=False)
    for at in (1, 2, 3, 1):
        finish(manager, f"request {at}", [*LONG, *[at] * 16])
    assert manager.stats.missed[MissReason.EVICTED] == 1
    assert explain(manager, [*LONG, *[2] * 16]) == (MissReason.EVICTED, 12)
    assert explain(manager, [*LONG, *[4] * 16]) == (MissReason.TOKEN, 12)


def test_evicted_takes_precedence_over_adapter_and_salt() -> None:
    manager = make_manager(num_blocks=6, partial_hits=False, ghost_entries=6)
    finish(manager, "mine", LONG, salt="a")
    finish(manager, "adapter's", LONG, salt="a", adapter="lora")
    finish(manager, "theirs", LONG, salt="b")
    for across_salts in (False, True):
        miss = explain(manager, LONG, salt="a", across_salts=across_salts)
        assert miss == (MissReason.EVICTED, 0)


def test_evicted_agrees_with_an_oracle_that_remembers_all() -> None:
    """Random prompts of a small tree; the oracle has the prefixes of every prompt so far."""
    rng = random.Random(5)
    manager = make_manager(num_blocks=40, partial_hits=False, ghost_entries=1000)
    seen: set[tuple[int, ...]] = set()
    reasons = set()
    for at in range(600):
        tokens = [word for _ in range(rng.randrange(1, 6)) for word in [rng.randrange(4)] * 4]
        sequence = TokenSequence(f"{at}", [*tokens, 9])
        depth = len(manager.get_computed_blocks(sequence).blocks)
        reason = manager.explain(sequence).reason
        if 4 * depth < len(tokens):
            was_seen = tuple(tokens[: 4 * depth + 4]) in seen
            assert (reason is MissReason.EVICTED) == was_seen
        finish(manager, f"{at}", [*tokens, 9])
        seen.update(tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4))
        reasons.add(reason)
        manager.check()
    assert {MissReason.EVICTED, MissReason.UNSEEN} <= reasons


def test_all_reasons_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "prefix-caching.md"
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.read_text(), re.MULTILINE)
    documented = {name: text for name, text in rows if name.upper() in MissReason.__members__}
    assert documented == {reason.name.lower(): reason.value for reason in MissReason}
