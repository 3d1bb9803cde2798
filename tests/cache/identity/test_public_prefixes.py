"""Public prefixes: tenants share the blocks that lie wholly in one, and no others."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    ComputedBlocks,
    KVCacheManager,
    MissReason,
    MultiModalItem,
    PublicBlocks,
    TokenSequence,
)
from headstart.errors import CacheError
from tests.cache.naming import block_names

SIZE = 4
SYSTEM = list(range(100, 110))  # two full blocks, and two tokens of a third
TOKENS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=16)


def make_public(*prefixes: Sequence[int]) -> PublicBlocks:
    public = PublicBlocks()
    for prefix in prefixes:
        public.publish(prefix, SIZE)
    return public


def run(manager: KVCacheManager, sequence: TokenSequence) -> int:
    """Compute a sequence and free it; return how many of its tokens were cached."""
    match = manager.get_computed_blocks(sequence)
    left = len(sequence.token_ids) - match.num_tokens
    assert manager.allocate_slots(sequence, left, match) is not None
    manager.commit_step()
    manager.free(sequence)
    manager.check()
    return match.num_tokens


def make_manager(**options: object) -> KVCacheManager:
    config = CacheConfig(**{"num_blocks": 64, "block_size": SIZE, **options})
    return KVCacheManager(config, BlockHasher(config.block_size))


def shared_blocks(left: TokenSequence, right: TokenSequence) -> int:
    """Count the blocks with equal hashes, without a lookup."""
    names = make_manager().block_hashes
    return len({*names(left)} & {*names(right)})


@settings(max_examples=250)
@given(
    prefixes=st.lists(TOKENS, max_size=3),
    before=st.lists(st.tuples(TOKENS, st.sampled_from("abc")), max_size=4),
    prompt=TOKENS,
    item=st.none() | st.integers(0, 15),
)
def test_two_tenants_share_a_block_if_and_only_if_it_lies_wholly_in_a_public_prefix(
    prefixes: list[list[int]],
    before: list[tuple[list[int], str]],
    prompt: list[int],
    item: int | None,
) -> None:
    public, manager = make_public(*prefixes), make_manager()
    for at, (tokens, tenant) in enumerate(before):
        run(manager, TokenSequence(f"{at}", tokens, salt=tenant, public=public))
    items = [] if item is None or item >= len(prompt) else [MultiModalItem(b"cat", item, 1)]
    mine = TokenSequence("mine", prompt, salt="x", items=items, public=public)
    usable = len(prompt) // SIZE if not items else items[0].offset // SIZE
    expected = max(
        (_common(prompt, prefix, tokens) // SIZE for prefix in prefixes for tokens, _ in before),
        default=0,
    )
    expected = min(expected, usable)
    match = manager.get_computed_blocks(mine)
    assert len(match.blocks) == expected
    if match.partial is not None:  # rows of a public block, for a block that is public, too
        assert match.partial.block.node.salt() == ""
        assert any(_common(prompt, prefix) // SIZE > expected for prefix in prefixes)
    theirs = [TokenSequence("t", tokens, salt=who, public=public) for tokens, who in before]
    assert max((shared_blocks(mine, one) for one in theirs), default=0) == expected
    names = block_names(mine, SIZE, public=prefixes)
    assert manager.block_hashes(mine) == names


def _common(*lists: Sequence[int]) -> int:
    """Return the length of the head that all lists share."""
    count = 0
    for tokens in zip(*lists, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        ([*SYSTEM, 1, 2, 3, 4], 8),  # the third block has private tokens of the tenant
        ([*SYSTEM[:8], 9], 8),
        ([*SYSTEM[:7], 9, 9, 9], 4),  # leaves the prefix in its second block
        (SYSTEM[:7], 4),
        ([9, *SYSTEM], 0),
    ],
)
def test_hits_of_another_tenant(prompt: list[int], shared: int) -> None:
    public, manager = make_public(SYSTEM), make_manager()
    run(manager, TokenSequence("one", [*SYSTEM, 1, 2, 3, 4, 5], salt="a", public=public))
    assert run(manager, TokenSequence("two", prompt, salt="b", public=public)) == shared


def test_a_tenant_hits_its_rows_after_the_prefix_to_the_token() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    prompt = [*SYSTEM, 1, 2, 3, 4, 5]
    run(manager, TokenSequence("one", prompt, salt="a", public=public))
    assert run(manager, TokenSequence("two", [*prompt[:11], 9, 9], salt="a", public=public)) == 11
    assert run(manager, TokenSequence("three", [*prompt, 6], salt="a", public=public)) == 15


def test_requests_without_a_salt_share_nothing() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    run(manager, TokenSequence("one", SYSTEM, public=public))
    assert run(manager, TokenSequence("two", SYSTEM, salt="a", public=public)) == 0
    assert run(manager, TokenSequence("three", SYSTEM, public=public)) == 9


def test_generated_tokens_within_a_public_prefix_are_shared() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    one = TokenSequence("one", SYSTEM[:3], salt="a", public=public)
    manager.allocate_slots(one, 3, manager.get_computed_blocks(one))
    for token in SYSTEM[3:8]:
        manager.commit_step()
        one.append(token)
        assert manager.append_slots(one)
    manager.commit_step()
    manager.free(one)
    manager.check()
    assert run(manager, TokenSequence("two", SYSTEM, salt="b", public=public)) == 8


def test_adapters_do_not_share_a_public_prefix() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    run(manager, TokenSequence("one", SYSTEM, salt="a", public=public))
    two = TokenSequence("two", SYSTEM, adapter="x", salt="b", public=public)
    assert run(manager, two) == 0


def test_a_miss_is_not_explained_by_other_tenants_rows_behind_the_prefix() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    prompt = [*SYSTEM, 1, 2, 3, 4, 5, 6, 7]
    run(manager, TokenSequence("one", prompt, salt="a", public=public))
    same = TokenSequence("two", prompt, salt="b", public=public)
    other = TokenSequence("two", [*SYSTEM, 9, 9, 9, 9], salt="b", public=public)
    unseen = TokenSequence("two", [*SYSTEM[:8], 9, 9, 9, 9, 9], salt="b", public=public)
    assert {manager.explain(one) for one in (same, other, unseen)} == {manager.explain(unseen)}
    assert manager.explain(same).reason is MissReason.UNSEEN
    assert manager.explain(same, across_salts=True).reason is MissReason.SALT
    assert manager.explain(unseen, across_salts=True).reason is MissReason.UNSEEN


def test_public_blocks_have_no_owner_and_others_belong_to_their_tenant() -> None:
    public, manager = make_public(SYSTEM), make_manager(eviction="fair-lru")
    manager.shares.set("a", 1.0)
    run(manager, TokenSequence("one", [*SYSTEM, 1, 2, 3, 4, 5, 6, 7], salt="a/x", public=public))
    owners = {(s.namespace.salt, s.start): len(s.ids) for s in manager.path_segments()}
    assert owners == {("", 0): 2, ("a/x", 2): 3}  # the last is the partial block
    run(manager, TokenSequence("two", [*SYSTEM, 1, 2], salt="b", public=public))
    manager.check()


def test_one_shot_requests_do_not_evict_the_public_prefix() -> None:
    """It serves all tenants. Regression: counted as one more owner, it was evicted first."""
    head = list(range(1, 25))
    public, manager = make_public(head), make_manager(eviction="fair-lru", num_blocks=20)
    for at in range(10):
        manager.shares.set(f"t{at}", 1.0)
    run(manager, TokenSequence("first", [*head, 99], salt="t0", public=public))
    for turn in range(30):
        alone = [1000 + 50 * turn + n for n in range(40)]
        run(manager, TokenSequence(f"one shot {turn}", alone, salt=f"t{turn % 9 + 1}"))
        manager.check()
    again = TokenSequence("again", [*head, 98], salt="t5", public=public)
    assert run(manager, again) == 24


def test_a_prefix_with_an_image_is_private() -> None:
    public, manager = make_public(SYSTEM), make_manager()
    for salt, cached in (("a", 0), ("b", 4)):
        items = [MultiModalItem(salt.encode(), 5, 2)]
        one = TokenSequence(salt, SYSTEM, salt=salt, items=items, public=public)
        assert run(manager, one) == cached


def test_a_prefix_of_less_than_a_block_shares_nothing() -> None:
    public = PublicBlocks()
    assert public.publish([1, 2, 3], SIZE) == 0
    assert not public


def test_a_public_prefix_is_of_token_ids() -> None:
    with pytest.raises(CacheError, match="token id"):
        PublicBlocks().publish([1, 2, -3, 4], SIZE)


def test_partial_rows_of_the_first_public_block_are_hit_by_their_owner() -> None:
    """Regression: they were indexed under the common root, where a shorter prompt does not look."""
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=3))
    public = PublicBlocks()
    public.publish([0, 0, 0, 0], 3)

    def look(name: str, tokens: list[int], salt: str) -> tuple[TokenSequence, ComputedBlocks]:
        sequence = TokenSequence(name, tokens, salt=salt, public=public)
        return sequence, manager.get_computed_blocks(sequence)

    first, match = look("first", [0, 0, 0], "s")
    assert manager.allocate_slots(first, 1, match) is not None  # a chunk of one token
    manager.commit_step()
    manager.free(first)
    manager.check()
    assert look("same", [0, 0], "s")[1].num_tokens == 1
    assert look("other", [0, 0], "t")[1].num_tokens == 0
