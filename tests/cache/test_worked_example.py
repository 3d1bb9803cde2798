"""The worked examples of "Automatic Prefix Caching" (vLLM v1 design), block id by block id."""

import pytest

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence

SHARED = list(range(100, 111))  # 11 tokens that request 0 and request 1 have in common
REQUEST_0 = [*SHARED, 111, 112, 113]


def make_manager(**options: object) -> KVCacheManager:
    """Return a manager of ten blocks of four tokens, in the order of the reference."""
    options = {"num_blocks": 10, "block_size": 4, "eviction": "lru", "deduplicate": False} | options
    return KVCacheManager(CacheConfig(**options))  # type: ignore[arg-type]


def admit(manager: KVCacheManager, name: str, tokens: list[int]) -> tuple[TokenSequence, int]:
    """Admit a request whose prompt runs in one step; also return how many tokens hit."""
    sequence = TokenSequence(name, tokens)
    computed = manager.get_computed_blocks(sequence)
    allocation = manager.allocate_slots(sequence, len(tokens) - computed.num_tokens, computed)
    assert allocation is not None
    manager.check()
    manager.commit_step()
    return sequence, computed.num_tokens


def decode(manager: KVCacheManager, sequence: TokenSequence, *tokens: int) -> None:
    """Generate these tokens, one per step."""
    for token in tokens:
        sequence.append(token)
        assert manager.append_slots(sequence)
        manager.check()
        manager.commit_step()


def cached(manager: KVCacheManager) -> list[int]:
    """Return the ids of the blocks that have a name."""
    return [b.block_id for b in manager.pool.blocks if b.node is not None]


def free(manager: KVCacheManager) -> list[int]:
    """Return the ids on the free queue, next to be reused first."""
    return [b.block_id for b in manager.pool.free]


def at_time_6(partial_hits: bool) -> KVCacheManager:
    """Run the example up to time 6, and check each of its statements."""
    manager = make_manager(partial_hits=partial_hits)
    zero, hit = admit(manager, "request 0", REQUEST_0)  # time 1
    assert (zero.block_ids, hit, cached(manager)) == ([0, 1, 2, 3], 0, [0, 1, 2])

    decode(manager, zero, 114, 115, 116)  # time 3: block 3 is full, block 4 is new
    assert (zero.block_ids, cached(manager)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])

    one, hit = admit(manager, "request 1", [*SHARED, 211, 212, 213])  # time 4
    assert one.block_ids == [0, 1, 5, 6]
    assert hit == (11 if partial_hits else 8)  # the reference hits whole blocks alone
    assert cached(manager) == [0, 1, 2, 3, 5]

    manager.free(zero)  # time 5
    assert free(manager) == [7, 8, 9, 4, 3, 2]
    manager.check()

    manager.free(one)  # time 6
    assert free(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    manager.check()
    return manager


@pytest.mark.parametrize("partial_hits", [False, True])
def test_time_7_with_the_block_ids_that_the_reference_lists(partial_hits: bool) -> None:
    """They belong to 29 tokens of which 12 are request 0's."""
    manager = at_time_6(partial_hits)
    prompt = REQUEST_0[:12] + list(range(300, 317))
    two, hit = admit(manager, "request 2", prompt)
    assert hit == 12
    assert two.block_ids == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free(manager) == [6, 5]


@pytest.mark.parametrize("partial_hits", [False, True])
def test_time_7_with_the_token_counts_that_the_reference_gives(partial_hits: bool) -> None:
    """33 tokens of which 16 are request 0's: four blocks hit, and five are new."""
    manager = at_time_6(partial_hits)
    prompt = [*REQUEST_0, 114, 115, *range(300, 317)]
    two, hit = admit(manager, "request 2", prompt)
    assert hit == 16
    assert two.block_ids == [0, 1, 2, 3, 7, 8, 9, 4, 6]
    assert free(manager) == [5]


def test_touched_blocks_leave_the_queue_before_any_is_taken() -> None:
    manager = at_time_6(partial_hits=False)
    sequence = TokenSequence("request 2", [*REQUEST_0[:12], 300])
    computed = manager.get_computed_blocks(sequence)
    assert free(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]  # a lookup moves nothing
    assert manager.allocate_slots(sequence, 1, computed) is not None
    assert free(manager) == [8, 9, 4, 3, 6, 5]


A, B, C, D, E, F, G, H, J = range(9)


def test_duplicated_blocks_stay_until_they_are_freed() -> None:
    manager = make_manager(partial_hits=False)
    first, _ = admit(manager, "request 1", [A, B, C, D, E, F])
    decode(manager, first, G)
    assert (first.block_ids, cached(manager)) == ([0, 1], [0])
    decode(manager, first, H)
    assert (first.block_ids, cached(manager)) == ([0, 1], [0, 1])
    decode(manager, first, J)
    assert (first.block_ids, cached(manager)) == ([0, 1, 2], [0, 1])

    second, hit = admit(manager, "request 2", [A, B, C, D, E, F])
    decode(manager, second, G)
    assert (hit, second.block_ids, cached(manager)) == (4, [0, 3], [0, 1])
    decode(manager, second, H)
    assert (second.block_ids, cached(manager)) == ([0, 3], [0, 1, 3])

    manager.free(second)
    assert cached(manager) == [0, 1]
    manager.check()


def test_the_copy_takes_over_when_the_first_is_freed() -> None:
    manager = make_manager(partial_hits=False)
    first, _ = admit(manager, "request 1", [A, B, C, D, E, F])
    second, _ = admit(manager, "request 2", [A, B, C, D, E, F])
    decode(manager, first, G, H)
    decode(manager, second, G, H)
    assert (first.block_ids, second.block_ids) == ([0, 1], [0, 2])
    manager.free(first)
    manager.check()
    assert cached(manager) == [0, 2]
    assert manager.get_computed_blocks(
        TokenSequence("request 3", [A, B, C, D, E, F, G, H, J])
    ).blocks == [manager.pool.blocks[0], manager.pool.blocks[2]]


def test_deduplication_switches_to_the_cached_block() -> None:
    """The block table becomes [0, 1] when the second request's block fills, as in vLLM v0."""
    manager = make_manager(deduplicate=True, partial_hits=False)
    first, _ = admit(manager, "request 1", [A, B, C, D, E, F])
    decode(manager, first, G, H, J)
    second, _ = admit(manager, "request 2", [A, B, C, D, E, F])
    decode(manager, second, G)
    assert second.block_ids == [0, 3]
    decode(manager, second, H)
    assert second.block_ids == [0, 1]
    assert manager.pool.blocks[1].ref_cnt == 2
    assert free(manager)[-1] == 3  # released, least recently used last
    decode(manager, second, J)
    assert second.block_ids == [0, 1, 4]
